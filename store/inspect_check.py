"""``check``: every file of a store against its name, its header and, if asked, its payload; and what the names alone tell.

Changes nothing. Beside a running server it raises no false alarm: files are whole from the moment they have a name, and one
that is gone or replaced when it is about to be reported is looked at again (store/inspect_file.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvalet.store import layout
from kvalet.store.inspect_file import GONE, Interrupted, Reader, Verdict
from kvalet.store.inspect_open import Finding, Place, holder
from kvalet.store.inspect_tree import BAD, unreachable
from kvalet.store.inspect_walk import Found, Listing, Tick, names_in

MAX_FINDINGS = 10_000
"""How many findings a report lists; the rest is counted only."""


@dataclass(frozen=True, slots=True)
class Part:
    """The ``number``-th of ``of`` parts of all files, by key: the union over all numbers is every file, each once."""

    number: int = 1
    of: int = 1

    def holds(self, found: Found) -> bool:
        return int.from_bytes(found.file.index_key[:8], "big") % self.of == self.number - 1


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """``payload``: read all of each file, not only its header. ``threads`` read side by side, each with one buffer of
    PIECE_BYTES."""

    payload: bool = False
    part: Part = field(default_factory=Part)
    threads: int = 4
    direct: bool = True


@dataclass(slots=True)
class CheckReport:
    """``findings``: at most MAX_FINDINGS, in the order of the paths; ``more``: how many beyond. ``reasons`` counts all.
    Bytes as the server's ledger counts them. ``checked``: files whose header was read; ``vanished``: evicted meanwhile.
    ``orphans``: good files that cannot be reached because an ancestor is missing; ``behind_bad``: because one is refused
    (both only among the files of the part). ``identities``: digest -> (files, bytes), among the checked; ``by_folder``:
    folder -> (files, bytes) of all."""

    files: int = 0
    n_bytes: int = 0
    checked: int = 0
    read_bytes: int = 0
    vanished: int = 0
    findings: list[Finding] = field(default_factory=list)
    more: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    orphans: int = 0
    orphan_bytes: int = 0
    behind_bad: int = 0
    leftovers: int = 0
    leftover_bytes: int = 0
    set_aside: int = 0
    set_aside_bytes: int = 0
    identities: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    by_folder: dict[str, tuple[int, int]] = field(default_factory=dict)
    server: str = ""

    @property
    def good(self) -> bool:
        return not self.reasons


def check_store(place: Place, listing: Listing, plan: CheckPlan, tick: Tick = lambda: None) -> CheckReport:
    """``tick`` is called once per file of the part. KeyboardInterrupt is passed on after all threads have ended."""
    server = holder(place)
    chosen = [found for found in listing.files if plan.part.holds(found)]
    verdicts = examine_all(place, chosen, plan, tick)
    report = CheckReport(files=len(listing.files), n_bytes=sum(f.n_bytes for f in listing.files), server=server)
    for found in listing.files:
        files, n_bytes = report.by_folder.get(found.file.folder, (0, 0))
        report.by_folder[found.file.folder] = (files + 1, n_bytes + found.n_bytes)
    findings = list(listing.findings)
    for verdict in verdicts:
        if verdict.reason == GONE:
            report.vanished += 1
            continue
        report.checked += 1
        report.read_bytes += verdict.read_bytes
        if verdict.reason:
            findings.append(Finding(verdict.found.path, verdict.reason, verdict.field))
        if verdict.facts is not None:
            files, n_bytes = report.identities.get(verdict.facts.identity, (0, 0))
            report.identities[verdict.facts.identity] = (files + 1, n_bytes + verdict.found.n_bytes)
    _reach(place, listing, verdicts, report)
    loose = {folder: [one for one in listing.loose if one.folder == folder] for folder in (layout.TMP, layout.BAD)}
    if not server:  # else they are being written right now
        report.leftovers, report.leftover_bytes = len(loose[layout.TMP]), listing.bytes_in(layout.TMP)
    report.set_aside, report.set_aside_bytes = len(loose[layout.BAD]), listing.bytes_in(layout.BAD)
    findings.sort(key=lambda finding: (finding.path, finding.reason))
    report.reasons.update(finding.reason for finding in findings)
    report.findings, report.more = findings[:MAX_FINDINGS], max(0, len(findings) - MAX_FINDINGS)
    return report


def _reach(place: Place, listing: Listing, verdicts: Sequence[Verdict], report: CheckReport) -> None:
    lost = unreachable(listing.files, verdicts, lambda found, parent: surely_orphan(place, found, parent))
    for found, cause in lost.items():
        if cause == BAD:
            report.behind_bad += 1
        else:
            report.orphans += 1
            report.orphan_bytes += found.n_bytes


def surely_orphan(place: Place, found: Found, parent: bytes) -> bool:
    """Looks again, the parent first: children are written after their parents and evicted before them, so a child that is
    there after its parent was not has none."""
    prefix = parent.hex() + "."
    if any(name.startswith(prefix) for name in names_in(place, layout.CHUNKS, prefix[:2])):
        return False
    if found.file.folder == layout.STATES:  # may follow a tail, which stands in the shard of its own parent
        own = f".{prefix[:16]}."
        if any(own in name for shard in layout.SHARDS for name in names_in(place, layout.TAILS, shard)):
            return False
    return found.file.name in names_in(place, found.file.folder, found.file.shard)


def examine_all(
    place: Place,
    files: Sequence[Found],
    plan: CheckPlan,
    tick: Tick = lambda: None,
    *,
    ids_after: frozenset[bytes] = frozenset(),
) -> list[Verdict]:
    """A verdict for each of ``files``, in their order, by ``plan.threads`` threads. KeyboardInterrupt stops them within a
    piece and is passed on; a second one leaves them to the end of the process. RuntimeError for a defect in a thread."""
    stop, lock = threading.Event(), threading.Lock()
    verdicts: list[Verdict | None] = [None] * len(files)
    numbers = iter(range(len(files)))

    def work() -> None:
        reader = Reader(place, direct=plan.direct, stopped=stop.is_set, ids_after=ids_after)
        while not stop.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                verdict = reader.examine(files[number], payload=plan.payload)
            except Interrupted:
                return
            verdicts[number] = replace(verdict, data=b"")  # records would add up to gigabytes
            with lock:
                tick()

    n_threads = max(1, min(plan.threads, len(files)))
    threads = [threading.Thread(target=work, name=f"kvalet-check-{n}", daemon=True) for n in range(n_threads)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    done = [verdict for verdict in verdicts if verdict is not None]
    if len(done) < len(files):
        raise RuntimeError("a thread of the check ended before its work did")
    return done
