"""Booking what jobs found out: index, ledger, quarantine, breakers, counters. On the loop thread."""

from __future__ import annotations

import logging

from kvalet.store.admission import parent_key
from kvalet.store.entries import Entry, keys_of
from kvalet.store.janitor import Burial, Gate
from kvalet.store.jobs import ReadResult, RecordResult, WriteResult
from kvalet.store.reading import ReadOutcome
from kvalet.store.recordjobs import settle_record, settle_record_read
from kvalet.store.state import ReadOver, StoreState, WriteOver
from kvalet.store.writeboard import Stage, Write

KEEP = frozenset({"resources", "cancelled", "deadline", "closed", "quarantined", "no_prefix", "internal"})
"""Reasons that say nothing against the file."""
ASIDE = frozenset({"size", "header", "payload", "key"})
"""The file is damaged, or stands under a wrong name: moved to bad/. Others (identity, foreign, io) keep their place, are
never read again, and are evicted first."""
WARN_EVERY_S = 60.0
log = logging.getLogger(__name__)


def settle_read(state: StoreState, over: ReadOver) -> ReadResult | RecordResult:
    result = _booked(state, over)
    _warn(state, over)
    return result


def _warn(state: StoreState, over: ReadOver) -> None:
    """Tell of damage, at most once in WARN_EVERY_S: the counters have all of it. Not under the lock."""
    for outcome in over.outcomes:
        if outcome.file is not None and outcome.reason in ASIDE | {"io"} and state.clock() >= state.warn_from_s:
            state.warn_from_s = state.clock() + WARN_EVERY_S
            log.warning(
                "store: %s is refused (%s) and will be computed again; more of it in the next minute is only counted "
                "(`kvalet store check --read-data` names every bad file)",
                outcome.file.name,
                outcome.reason,
            )


def _booked(state: StoreState, over: ReadOver) -> ReadResult | RecordResult:
    read, last = over.read, over.outcomes[-1]
    with state.lock:
        state.unsettled -= 1
        state.books.unpin(read.held)
        for outcome in over.outcomes:
            book_refusal(state, outcome)
        if not last.reason and last.file is not None and read.record is None:
            state.books.learn(last.file.index_key, last.key, parent_key(state, last.parent))
        if any(outcome.reason == "io" and outcome.file is not None for outcome in over.outcomes):
            state.read_breaker.failed(state.clock())
        if read.record is not None:
            return settle_record_read(state, read, last)
    return ReadResult(read.job, last.reason, last.key, last.ids, last.n_bytes, last.read_ms, last.verify_ms)


def book_refusal(state: StoreState, outcome: ReadOutcome) -> None:
    """Lock held. Count what was found (a hit, too), and act on what was refused."""
    _count(state, outcome)
    if outcome.reason and outcome.file is not None and outcome.reason not in KEEP:
        _condemn(state, outcome)


def _count(state: StoreState, outcome: ReadOutcome) -> None:
    counts = state.counts
    counts.reads += 1
    if outcome.reason:
        counts.refusals[outcome.reason, outcome.field] += 1
        counts.internal += outcome.reason == "internal"
        return
    counts.hits += 1
    counts.read_bytes += outcome.n_bytes
    counts.read_ms += outcome.read_ms
    counts.verify_ms += outcome.verify_ms


def _condemn(state: StoreState, outcome: ReadOutcome) -> None:
    """A file was refused: out of the index (or marked), its key quarantined until a new put of it is durable."""
    file = outcome.file
    assert file is not None
    entry = state.books.entry(file.index_key)
    if entry is None or entry.file.name != file.name or entry.unusable:
        return  # another read was quicker
    state.gone += keys_of([entry])
    state.touched.pop(file.name, None)
    if outcome.reason != "missing":
        state.books.quarantined.put(file.index_key, outcome.reason)
    if outcome.stranger or outcome.reason == "missing":
        state.books.drop(file.index_key)
        _fail_children(state, entry)
    elif outcome.reason in ASIDE:
        state.books.drop(file.index_key)
        state.books.dying_bytes += entry.n_bytes
        state.bury([Burial(file, entry.n_bytes, Gate(1), aside=True)])
        _fail_children(state, entry)
    else:
        state.books.mark_unusable(file.index_key, outcome.reason)
        _fail_children(state, entry)


def _fail_children(state: StoreState, entry: Entry) -> None:
    """Writes in flight after a chunk that turned out to be lost."""
    for write in state.board.parent_lost(entry.index_key):
        for done, over in state.finish_write(write):
            state.answer(done, over)
        if write.tmp:
            state.tmp_garbage.append(write)


def settle_write(state: StoreState, over: WriteOver) -> WriteResult | RecordResult:
    write = over.write
    with state.lock:
        state.unsettled -= 1
        if over.reason:
            state.counts.failures[over.reason] += 1
            state.counts.internal += over.reason == "internal"
        elif over.skipped:
            state.counts.skipped += 1
        if write is None and over.is_record:
            return RecordResult(over.job, over.reason)
        if write is None or not over.leader:
            return WriteResult(over.job, over.reason, skipped=over.skipped and not over.reason)
        state.books.release(write.n_bytes)
        if write.stage is Stage.DURABLE:
            state.spare_bytes -= write.file_bytes  # until it is measured again
            state.counts.writes += 1
            state.counts.written_bytes += write.file_bytes
            state.counts.write_ms += over.write_ms
            if write.record is None:
                _enter(state, write)
        state.budget.settle(write.n_bytes, write.file_bytes if write.stage is Stage.DURABLE else 0)
        state.books.remove_child(write.parent)
        state.board.remove(write)
        if write.record is not None:
            return settle_record(state, write, over)
    n_bytes = 0 if over.reason else write.n_bytes
    return WriteResult(over.job, over.reason, n_bytes, write_ms=over.write_ms)


def _enter(state: StoreState, write: Write) -> None:
    meta = write.meta
    entry = Entry(write.file, write.n_bytes, write.recency, meta.ordinal, bytes(meta.key), write.parent)
    parent = state.books.entry(write.parent)
    if parent is not None and not parent.unusable:
        entry.recency = min(entry.recency, parent.recency)
    replaced = state.books.add(entry)
    state.books.quarantined.pop(meta.key[:8], None)
    if replaced is not None and replaced.file.name != write.file.name:
        state.books.dying_bytes += replaced.n_bytes
        state.bury([Burial(replaced.file, replaced.n_bytes, Gate(1))])
