"""What the store says about itself: one frozen snapshot, and one honest word about its health."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvalet.store.books import Books
from kvalet.store.scan import Walk
from kvalet.store.state import StoreState


@dataclass(frozen=True, slots=True)
class Health:
    """``status``: "ok" or "degraded"; ``why``: one sentence per reason."""

    status: str
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Bytes, counts since open, rates in bytes per second (0 = not measured yet).

    ``used_bytes`` = live + reserved + dying + aside + stranded: what kvalet's files take, or are about to, in whole blocks.
    ``records``, ``record_bytes``: session records; ``held_bytes``: live bytes that pinned records keep from eviction.
    ``budget_left_bytes``: what background writes may still take today, -1 without a limit.
    ``refusals``: (reason, field, count) of reads; ``failures``: (reason, count) of writes. ``internal`` counts defects.
    """

    files: int
    cap_bytes: int
    used_bytes: int
    live_bytes: int
    reserved_bytes: int
    dying_bytes: int
    aside_bytes: int
    stranded_bytes: int
    spare_disk_bytes: int
    strangers: int
    reads: int
    hits: int
    read_bytes: int
    writes: int
    skipped: int
    written_bytes: int
    evicted_files: int
    quarantined: int
    pinned: int
    internal: int
    drift_bytes: int
    commit_waves: int
    reads_waiting: int
    reads_running: int
    oldest_read_s: float
    writes_in_flight: int
    unlinks_waiting: int
    unsettled: int
    direct: bool
    why_buffered: str
    read_breaker_open: bool
    write_breaker: str
    read_bytes_per_s: float
    verify_bytes_per_s: float
    write_bytes_per_s: float
    refusals: tuple[tuple[str, str, int], ...]
    failures: tuple[tuple[str, int], ...]
    records: int = 0
    record_bytes: int = 0
    pinned_records: int = 0
    held_bytes: int = 0
    expired_records: int = 0
    bytes_per_day: int = 0
    budget_left_bytes: int = -1


def held_bytes(books: Books) -> int:
    """Pinned records and what they keep."""
    named = (books.find(key) for key in books.records.held_keys())
    pinned = (entry for entry in books.records.all() if entry.file.pinned)
    return sum(entry.n_bytes for entry in (*named, *pinned) if entry is not None)


def rate(n_bytes: int, ms: float) -> float:
    return n_bytes / ms * 1e3 if ms else 0.0


def statistics_of(state: StoreState, found: Walk) -> StoreStatistics:
    """Lock held."""
    books, counts, now = state.books, state.counts, state.clock()
    refusals: Counter[tuple[str, str]] = counts.refusals
    return StoreStatistics(
        files=len(books),
        cap_bytes=books.cap_bytes,
        used_bytes=books.used_bytes,
        live_bytes=books.live_bytes,
        reserved_bytes=books.reserved_bytes,
        dying_bytes=books.dying_bytes,
        aside_bytes=books.aside_bytes,
        stranded_bytes=books.stranded_bytes,
        spare_disk_bytes=state.spare_bytes,
        strangers=found.strangers,
        reads=counts.reads,
        hits=counts.hits,
        read_bytes=counts.read_bytes,
        writes=counts.writes,
        skipped=counts.skipped,
        written_bytes=counts.written_bytes,
        evicted_files=books.evicted_files,
        quarantined=len(books.quarantined),
        pinned=books.pinned(),
        internal=counts.internal,
        drift_bytes=counts.drift,
        commit_waves=counts.waves,
        reads_waiting=len(state.reads),
        reads_running=len(state.running),
        oldest_read_s=max((now - read.started_at for read in state.running.values()), default=0.0),
        writes_in_flight=len(state.board),
        unlinks_waiting=len(state.burials),
        unsettled=state.unsettled,
        direct=state.disk.direct,
        why_buffered=state.disk.why_buffered,
        read_breaker_open=state.read_breaker.is_open(now),
        write_breaker=state.write_breaker.why,
        read_bytes_per_s=rate(counts.read_bytes, counts.read_ms),
        verify_bytes_per_s=rate(counts.read_bytes, counts.verify_ms),
        write_bytes_per_s=rate(counts.written_bytes, counts.write_ms),
        refusals=tuple(sorted((reason, field, n) for (reason, field), n in refusals.items())),
        failures=tuple(sorted(counts.failures.items())),
        records=len(books.records),
        record_bytes=books.records.n_bytes,
        pinned_records=books.records.n_pinned,
        held_bytes=held_bytes(books),
        expired_records=counts.expired_records,
        bytes_per_day=state.config.bytes_per_day,
        budget_left_bytes=state.budget.left(now) if state.config.bytes_per_day else -1,
    )


def health_of(state: StoreState) -> Health:
    """Lock held."""
    now = state.clock()
    why = []
    if state.closed:
        why.append("the store is closed")
    if state.write_breaker.why:
        why.append(f"writes fail: {state.write_breaker.why}; the tier is read-only until a probe succeeds")
    if state.read_breaker.is_open(now):
        why.append("reads fail: the tier is not read for a while")
    stuck = [read for read in state.running.values() if now - read.started_at > state.config.queue_deadline_s]
    if stuck:
        why.append(f"{len(stuck)} reads hang in the disk and hold their slots")
    if state.books.stranded_bytes:
        why.append(f"{state.books.stranded_bytes} bytes could not be deleted")
    held = held_bytes(state.books) if state.books.no_room else 0
    if held:
        why.append(f"there is no room for more: pinned sessions hold {held} of {state.books.cap_bytes} bytes")
    if state.lost_pins:
        why.append(f"{state.lost_pins} pinned records could not be read when the store was opened")
    if state.budget.exhausted(now):
        why.append(f"the budget of {state.config.bytes_per_day} bytes a day is spent: nothing is written for a while")
    return Health("degraded" if why else "ok", tuple(why))
