"""``kvalet store gc`` and ``kvalet store rm``: they delete, under the store's lock, so never beside a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from kvalet.api.sizes import parse_age, parse_size
from kvalet.api.store_answer import (
    FOUND,
    GOOD,
    Answer,
    WrongUsage,
    files_text,
    finding_data,
    finding_line,
    parsed,
    parser_of,
    reading,
    show,
    shown,
)
from kvalet.api.store_progress import progress
from kvalet.store import layout
from kvalet.store.inspect_check import CheckPlan, examine_all, surely_orphan
from kvalet.store.inspect_gc import Cause, GcOptions, Removal, plan
from kvalet.store.inspect_open import Place, holder, open_to_change, open_to_look
from kvalet.store.inspect_records import all_records, what_to_keep
from kvalet.store.inspect_remove import Removed, pretend, remove
from kvalet.store.inspect_tree import parents_of_tails, unreachable
from kvalet.store.inspect_walk import list_store

GC = """Delete what is of no use: leftovers in tmp/, what was set aside in bad/, refused files (with --read-data
also those whose payload is wrong), files that no session can reach, tails that a longer one replaced, expired
records. With --older-than and --cap also what is least used, the end of a conversation before its beginning.
Pinned sessions stay. Refused while a server has the store open, except with --dry-run, which deletes nothing."""


def gc(arguments: Sequence[str]) -> int:
    parser = parser_of("gc", GC)
    parser.add_argument(
        "--cap", type=reading(parse_size), metavar="SIZE", help="delete the least used until SIZE (20GB) is left"
    )
    parser.add_argument(
        "--older-than", type=reading(parse_age), metavar="AGE", help="delete what was not used for AGE (30d, 12h)"
    )
    parser.add_argument("--identity-other", action="store_true", help="delete what another model, dtype or layout wrote")
    parser.add_argument("--read-data", action="store_true", help="read all of each file, to find wrong payloads too")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    asked = parsed(parser, arguments)
    if asked.cap is not None and asked.cap < 0:
        raise WrongUsage("--cap must not be negative")
    with (open_to_look if asked.dry_run else open_to_change)(asked.store) as place:
        if asked.identity_other and place.identity is None:
            raise WrongUsage("--identity-other: the file IDENTITY is missing or damaged, so which files are others' is unknown")
        before = None if asked.older_than is None else time.time_ns() - int(asked.older_than * 1e9)
        options = GcOptions(asked.cap, before, place.identity if asked.identity_other else None)
        removals = gc_plan(place, options, payload=asked.read_data)
        removed = carry_out(place, removals, dry_run=asked.dry_run)
        answer = removal_answer(place, removed, dry_run=asked.dry_run)
    return show(answer, as_json=asked.json)


def gc_plan(place: Place, options: GcOptions, *, payload: bool = False) -> list[Removal]:
    """Reads the header of every file."""
    listing = list_store(place)
    with progress("reading", len(listing.files)) as tick:
        verdicts = examine_all(
            place, listing.files, CheckPlan(payload=payload), tick, ids_after=parents_of_tails(listing.files)
        )
    lost = unreachable(listing.files, verdicts, lambda found, parent: surely_orphan(place, found, parent))
    records = all_records(place, listing.files)
    removals = plan(listing, verdicts, lost, options, what_to_keep(records, time.time_ns(), options.before_ns))
    if place.lock_fd < 0 and holder(place):  # a server writes them right now
        removals = [removal for removal in removals if removal.folder != layout.TMP]
    return removals


def carry_out(place: Place, removals: Sequence[Removal], *, dry_run: bool) -> Removed:
    """KeyboardInterrupt: what was deleted so far goes to standard error, then it is passed on."""
    if dry_run:
        return pretend(removals)
    removed = Removed()
    try:
        with progress("deleting", len(removals)) as tick:
            remove(place, removals, removed, tick)
    except KeyboardInterrupt:
        print("\n".join(removal_answer(place, removed, dry_run=False).lines), file=sys.stderr)
        raise
    return removed


def removal_answer(place: Place, removed: Removed, *, dry_run: bool) -> Answer:
    files, n_bytes = sum(removed.files.values()), sum(removed.n_bytes.values())
    data: dict[str, Any] = {
        "store": shown(place.path),
        "dry_run": dry_run,
        "files": files,
        "bytes": n_bytes,
        "causes": {
            cause.name.lower(): {"files": removed.files[cause], "bytes": removed.n_bytes[cause]} for cause in removed.files
        },
        "failed": [finding_data(finding) for finding in removed.failed],
        "kept": removed.kept,
        "free_bytes": place.free_bytes(),
    }
    verb = "would delete" if dry_run else "deleted"
    lines = [
        f"  {cause}: {files_text(removed.files[cause], removed.n_bytes[cause])}" for cause in Cause if cause in removed.files
    ]
    lines += [f"could not delete {finding_line(finding)}" for finding in removed.failed]
    if removed.kept:
        lines.append(f"kept {removed.kept} files because one that follows them could not be deleted")
    lines.append(f"{verb} {files_text(files, n_bytes)}")
    return Answer(FOUND if removed.failed else GOOD, data, lines)
