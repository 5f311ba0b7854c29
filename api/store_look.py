"""``kvalet store ls`` and ``kvalet store check``: they change nothing and run beside a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvalet.api.sizes import size_text
from kvalet.api.store_answer import (
    FOUND,
    GOOD,
    Answer,
    files_text,
    finding_data,
    finding_line,
    parsed,
    parser_of,
    reading,
    show,
    shown,
    table,
    when,
)
from kvalet.api.store_progress import progress
from kvalet.store import layout
from kvalet.store.inspect_check import CheckPlan, CheckReport, Part, check_store
from kvalet.store.inspect_file import Verdict
from kvalet.store.inspect_open import Place, holder, open_to_look
from kvalet.store.inspect_records import Known, OnDisk, doubles, read_records
from kvalet.store.inspect_sums import KINDS, Sum, sums
from kvalet.store.inspect_walk import Listing, list_store

LS = """What is in a store: bytes and files by tenant tag and kind, and the sessions that have a record."""
CHECK = """Verify a store. Changes nothing and may run beside a server; files that are evicted meanwhile are no finding.
Without --read-data the header of each file is read (4 kB each), with it everything.
Each finding is one line: path: reason (what differs); the reasons are those of docs/store-format.md, and "mode"
for what others could read. Files that no session can reach and leftovers are counted; they are no damage."""


def ls(arguments: Sequence[str]) -> int:
    parser = parser_of("ls", LS)
    parser.add_argument("--files", action="store_true", help="list every file")
    asked = parsed(parser, arguments)
    with open_to_look(asked.store) as place:
        with progress("reading names", len(layout.SHARDED) * len(layout.SHARDS)) as tick:
            listing = list_store(place, tick)
        records, unread = read_records(place, listing.files)
        answer = with_sessions(ls_answer(place, listing, each_file=asked.files), place, listing, records, unread)
    return show(answer, as_json=asked.json)


def ls_answer(place: Place, listing: Listing, *, each_file: bool) -> Answer:
    n_bytes = sum(found.n_bytes for found in listing.files)
    totals = sums(listing.files)
    default_tag = layout.tenant_tag(place.secret, "") if place.secret else ""

    def tenant(tag: str) -> str:
        return f"{tag} (default)" if tag == default_tag else tag or "-"

    pid = holder(place)
    unread = any(finding.reason == "io" for finding in listing.findings)
    loose = {folder: [one for one in listing.loose if one.folder == folder] for folder in (layout.TMP, layout.BAD)}
    data: dict[str, Any] = {
        "store": shown(place.path),
        "store_id": place.store_id.hex() if place.store_id else None,
        "server_pid": int(pid) if pid.isdigit() else None,
        "sums": [{**sum_data(total), "default_tenant": total.tag == default_tag} for total in totals],
        "files": len(listing.files),
        "bytes": n_bytes,
        "temporary": {"files": len(loose[layout.TMP]), "bytes": listing.bytes_in(layout.TMP)},
        "set_aside": {"files": len(loose[layout.BAD]), "bytes": listing.bytes_in(layout.BAD)},
        "findings": len(listing.findings),
        "free_bytes": place.free_bytes(),
        "cap_bytes": None,
    }
    lines = table(
        ("bytes", "files", "kind", "tenant", "oldest use", "newest use"),
        [(size_text(t.n_bytes), str(t.files), t.kind, tenant(t.tag), when(t.oldest_ns), when(t.newest_ns)) for t in totals],
    )
    lines += ["", f"{files_text(len(listing.files), n_bytes)} in all; {free_text(data['free_bytes'])} free on this disk"]
    lines += [f"  in {folder}/: {files_text(len(found), listing.bytes_in(folder))}" for folder, found in loose.items() if found]
    lines.append("  the cap is a setting of the server (--store-bytes) and stands in no file")
    lines += [f"  a server (pid {pid}) has it open"] if pid else []
    if listing.findings:
        lines.append(f"  findings: {len(listing.findings)} (`kvalet store check` names them)")
    if each_file:
        data["list"] = [
            {"path": found.path, "bytes": found.n_bytes, "last_use": found.st.mtime_ns / 1e9} for found in listing.files
        ]
        rows = [(size_text(found.n_bytes), when(found.st.mtime_ns), found.path) for found in listing.files]
        lines += ["", *table(("bytes", "last use", "file"), rows)]
    return Answer(FOUND if unread else GOOD, data, lines)


def with_sessions(
    answer: Answer, place: Place, listing: Listing, records: Sequence[Known], unread: Sequence[Verdict]
) -> Answer:
    """One line per record, the last used first."""
    on_disk = OnDisk(listing.files)
    default = layout.tenant_hash(place.secret, "") if place.secret else b""
    sessions: list[dict[str, Any]] = []
    rows = []
    older = set(doubles(records))
    current = [one for one in records if one.found not in older]
    for one in sorted(current, key=lambda one: (-one.last_use_ns, one.session, one.branch)):
        presence, tag = on_disk.presence(one), on_disk.tag(one)
        sessions.append(
            {
                "session": one.session,
                "branch": one.branch,
                "tenant_tag": tag,
                "default_tenant": one.tenant == default,
                "tokens": one.n_ids,
                "stored_tokens": one.kv_len,
                "chunks": presence.of,
                "chunks_on_disk": presence.chunks,
                "tail_on_disk": presence.tail,
                "last_use": one.last_use_ns / 1e9,
                "ttl_s": one.ttl_s,
                "pinned": one.pinned,
            }
        )
        tail = "" if presence.tail is None else ", tail" if presence.tail else ", no tail"
        rows.append(
            (
                str(one.n_ids),
                f"{presence.chunks} of {presence.of}{tail}",
                when(one.last_use_ns),
                "pinned" if one.pinned else "",
                tag or "-",
                one.branch,
                shown(one.session),
            )
        )
    lines = list(answer.lines)
    if rows:
        lines += ["", *table(("tokens", "chunks on disk", "last use", "", "tenant", "branch", "session"), rows)]
    if unread:
        lines.append(f"{len(unread)} records cannot be read: `kvalet store check --read-data` names them")
    return replace(answer, data={**answer.data, "sessions": sessions, "unread_records": len(unread)}, lines=lines)


def free_text(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else size_text(n_bytes)


def sum_data(total: Sum) -> dict[str, Any]:
    return {
        "tenant_tag": total.tag,
        "kind": total.kind,
        "files": total.files,
        "bytes": total.n_bytes,
        "oldest_use": total.oldest_ns / 1e9,
        "newest_use": total.newest_ns / 1e9,
    }


def parse_part(text: str) -> Part:
    """ "N/M" -> the N-th of M parts. ValueError."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"{text!r} is no part: write N/M with N from 1 to M, such as 3/30")
    return Part(int(match[1]), int(match[2]))


def parse_threads(text: str) -> int:
    """1 to 64. ValueError."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 64:
        raise ValueError(f"{text!r} must be from 1 to 64")
    return int(text)


def check(arguments: Sequence[str]) -> int:
    parser = parser_of("check", CHECK)
    parser.add_argument("--read-data", action="store_true", help="read all of each file and compare its digest")
    parser.add_argument(
        "--subset",
        type=reading(parse_part),
        default=Part(),
        metavar="N/M",
        help="only the N-th of M parts of the files",
    )
    parser.add_argument("--threads", type=reading(parse_threads), default=4, metavar="N", help="files read at once (4)")
    asked = parsed(parser, arguments)
    plan = CheckPlan(payload=asked.read_data, part=asked.subset, threads=asked.threads)
    with open_to_look(asked.store) as place:
        with progress("reading names", len(layout.SHARDED) * len(layout.SHARDS)) as tick:
            listing = list_store(place, tick)
        with progress("checking", sum(map(plan.part.holds, listing.files))) as tick:
            report = check_store(place, listing, plan, tick)
        answer = check_answer(place, report, plan)
    return show(answer, as_json=asked.json)


def check_answer(place: Place, report: CheckReport, plan: CheckPlan) -> Answer:
    data = {
        "store": shown(place.path),
        "good": report.good,
        "findings": [finding_data(finding) for finding in report.findings],
        "findings_not_listed": report.more,
        "reasons": dict(report.reasons),
        "files": report.files,
        "bytes": report.n_bytes,
        "subset": f"{plan.part.number}/{plan.part.of}",
        "read_data": plan.payload,
        "checked": report.checked,
        "read_bytes": report.read_bytes,
        "vanished": report.vanished,
        "orphans": {"files": report.orphans, "bytes": report.orphan_bytes},
        "behind_bad": report.behind_bad,
        "leftovers": {"files": report.leftovers, "bytes": report.leftover_bytes},
        "set_aside": {"files": report.set_aside, "bytes": report.set_aside_bytes},
        "identities": {
            digest.hex(): {"files": files, "bytes": n_bytes, "current": digest == place.identity}
            for digest, (files, n_bytes) in sorted(report.identities.items())
        },
        "sums": {KINDS.get(folder, folder): {"files": n, "bytes": b} for folder, (n, b) in sorted(report.by_folder.items())},
        "server_pid": int(report.server) if report.server.isdigit() else None,
    }
    return Answer(GOOD if report.good else FOUND, data, check_lines(place, report, plan))


def check_lines(place: Place, report: CheckReport, plan: CheckPlan) -> list[str]:
    lines = [finding_line(finding) for finding in report.findings]
    if report.more:
        lines.append(f"... and {report.more} more")
    depth = "headers and payloads" if plan.payload else "headers"
    part = f", part {plan.part.number} of {plan.part.of}" if plan.part.of > 1 else ""
    lines.append(f"{report.checked} of {files_text(report.files, report.n_bytes)}: {depth} read{part}")
    lines += [
        f"  {KINDS.get(folder, folder)}: {files_text(files, n_bytes)}"
        for folder, (files, n_bytes) in sorted(report.by_folder.items())
        if files
    ]
    for digest, (files, n_bytes) in sorted(report.identities.items()):
        which = (
            "the current one"
            if digest == place.identity
            else "another one: evicted in time, or kvalet store gc --identity-other"
        )
        if len(report.identities) > 1 or digest != place.identity:
            lines.append(f"  identity {digest.hex()[:16]}: {files_text(files, n_bytes)} ({which})")
    counted = (
        (report.orphans, f"{report.orphans} of them cannot be reached, because an earlier chunk is missing"),
        (report.behind_bad, f"{report.behind_bad} of them cannot be reached before a refused chunk is written again"),
        (report.vanished, f"{report.vanished} were evicted meanwhile"),
        (report.leftovers, f"left in tmp/: {files_text(report.leftovers, report.leftover_bytes)}"),
        (report.set_aside, f"set aside in bad/: {files_text(report.set_aside, report.set_aside_bytes)}"),
        (bool(report.server), f"a server (pid {report.server}) has it open"),
    )
    lines += [f"  {text}" for number, text in counted if number]
    if place.secret is None:
        lines.append("SECRET is missing or damaged: nothing that is stored here will ever be found again")
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(report.reasons.items()))
    lines.append("good" if report.good else f"not good: {reasons}")
    return lines
