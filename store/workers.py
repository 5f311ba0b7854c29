"""The threads of one store: readers, writers, one committer (chores.py has the others). Bodies only; store.py starts them.

Each loop takes a job under the lock, does I/O without it, books the result under it again, and calls ``done`` without it.
An exception of an unexpected kind fails the job ("internal", counted, logged) and never the thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from kvalet.store import reading, recordfiles, writing
from kvalet.store.admission import bury_victims
from kvalet.store.faultwords import FULL, explain, opens_write_breaker, write_reason
from kvalet.store.janitor import Gate
from kvalet.store.reading import ReadOutcome
from kvalet.store.state import Done, Read, ReadOver, StoreState
from kvalet.store.writeboard import Write

log = logging.getLogger("kvalet.store")
FORCED_EVICTION_BYTES = 64 << 20


def call(done: Done, over: Any) -> None:
    """Tell the owner. Its loop may be gone at shutdown; that must not end a worker."""
    try:
        done(over)
    except Exception:  # a foreign callback at a thread boundary
        log.exception("store: a completion could not be delivered")


def call_all(calls: Iterable[tuple[Done, Any]]) -> None:
    for done, over in calls:
        call(done, over)


# -- readers


def reader_loop(state: StoreState) -> None:
    while True:
        with state.lock:
            while not state.stopping and not len(state.reads):
                state.for_readers.wait()
            read = state.reads.take()
            if read is None:
                return
            read.started_at = state.clock()
            state.running[read.job] = read
            early = _refuse_early(state, read)
        outcomes = [early] if early else _read(state, read)
        with state.lock:
            del state.running[read.job]
            state.unsettled += 1
            state.for_writers.notify_all()
            state.quiet.notify_all()
        call(read.done, ReadOver(read, tuple(outcomes)))


def _refuse_early(state: StoreState, read: Read) -> ReadOutcome | None:
    """Lock held. What became known while it waited."""
    if state.read_breaker.is_open(state.clock()):
        return ReadOutcome("io", "breaker")
    name = read.meta.key[:8] if read.meta is not None else read.held[0][:8] if read.record is not None else b""
    if state.books.quarantined.get(name):
        return ReadOutcome("quarantined", state.books.quarantined[name])
    return None


def _read(state: StoreState, read: Read) -> list[ReadOutcome]:
    try:
        if read.meta is not None:
            return [reading.read_chunk(state.disk, state.home, read.meta, read.files[0], read.slot)]
        if read.record is not None:
            return [recordfiles.read_record(state.disk, read.record, read.files[0])]
        assert read.wish is not None
        return reading.read_tail(state.disk, state.home, read.wish, read.files, read.slot)
    except Exception:  # a defect must fail this job only
        log.exception("store: read job %d failed", read.job)
        return [ReadOutcome("internal", "exception")]


# -- writers


def writer_loop(state: StoreState) -> None:
    while True:
        with state.lock:
            while not state.stopping and not state.board.waiting():
                state.for_writers.wait()
            _yield_to_reads(state)
            write = state.board.take()
            if write is not None:
                write.started_ns = time.perf_counter_ns()
            else:
                if state.stopping:
                    return
                continue
        error = _write(state, write)
        calls: list[tuple[Done, Any]] = []
        unlink: list[Write] = []
        with state.lock:
            if error is None and state.board.written(write):
                state.for_committer.notify()
            else:
                failed = state.board.fail(write, error or write.doomed)
                unlink = [one for one in failed if one.tmp]
                calls = book_failed(state, failed)
        discard_all(state, unlink)
        call_all(calls)


def _yield_to_reads(state: StoreState) -> None:
    """Lock held. A background write lets waiting reads go first, for a bounded time."""
    until = state.clock() + state.config.yield_s
    while not state.stopping and len(state.reads) and state.board.most_urgent() > 0:
        left = until - state.clock()
        if left <= 0:
            return
        state.for_writers.wait(left)


def book_failed(state: StoreState, failed: list[Write]) -> list[tuple[Done, Any]]:
    """Lock held. Completions of writes that failed."""
    calls: list[tuple[Done, Any]] = []
    for one in failed:
        state.unsettled += 1 + len(one.followers)
        calls += state.finish_write(one)
    state.quiet.notify_all()
    return calls


def discard_all(state: StoreState, writes: list[Write]) -> None:
    """Unlink the temporary files of failed writes; what cannot be unlinked stays in the ledger."""
    for write in writes:
        try:
            writing.discard(state.disk, write.tmp, write.n_bytes, MemoryError())
        except writing.Stranded as stranded:
            with state.lock:
                state.books.stranded_bytes += stranded.n_bytes


def _write(state: StoreState, write: Write) -> str | None:
    """The data phase, with one retry after a full disk. None, or the reason of failure."""
    if not _gates_open(state, write.gates):
        return "full"
    for attempt in (0, 1):
        try:
            created = state.wall_ns()
            write.tmp = writing.write_data(state.disk, state.home, write, created, sync=state.config.sync == "data")
            return None
        except writing.Stranded as stranded:
            with state.lock:
                state.books.stranded_bytes += stranded.n_bytes
            return _blame(state, write, stranded.cause)
        except (OSError, MemoryError) as error:
            full = isinstance(error, OSError) and error.errno in FULL
            if not full or attempt or not _make_room(state, write):
                return _blame(state, write, error)
        except ValueError as error:
            log.warning("store: record job %d: %s", write.job, error)
            return "record"
        except Exception:  # a defect must fail this job only
            log.exception("store: write job %d failed", write.job)
            return "internal"
    raise AssertionError("unreachable")


def _gates_open(state: StoreState, gates: list[Gate]) -> bool:
    return all(gate.wait(state.config.room_wait_s) for gate in gates)


def _make_room(state: StoreState, write: Write) -> bool:
    """The disk is full although the books said otherwise: evict by force, once."""
    with state.lock:
        victims = state.books.evict(max(2 * write.n_bytes, FORCED_EVICTION_BYTES), partly=True)
        gate = bury_victims(state, victims or ())
    return gate is not None and gate.wait(state.config.room_wait_s)


def _blame(state: StoreState, write: Write, error: OSError | MemoryError) -> str:
    """Reason of a failed write; the disk's own faults make the tier read-only until a probe succeeds."""
    log.warning("store: write of %s failed: %s", write.meta.key.hex()[:16], explain(error))
    if opens_write_breaker(error):
        with state.lock:
            state.write_breaker.failed(state.clock(), explain(error))
    return write_reason(error)


# -- committer


def committer_loop(state: StoreState) -> None:
    """Publishes shard after shard: renames, one fsync, then the children of what is durable now are ready. Several of these
    threads, because a flush mostly waits, and flushes that wait together share one commit of the file system's journal."""
    while True:
        with state.lock:
            wave = state.board.take_ready()
            while not wave:
                if state.stopping:
                    return
                state.for_committer.wait()
                wave = state.board.take_ready()
            state.counts.waves += 1
            if state.board.has_ready():
                state.for_committer.notify()
        failures = _publish(state, wave)
        reasons = {id(f.write): "internal" if f.defect else _blame(state, f.write, f.error) for f in failures}
        calls: list[tuple[Done, Any]] = []
        unlink: list[Write] = []
        with state.lock:
            for failure in failures:
                state.books.stranded_bytes += failure.stranded_bytes
                lost = state.books.entry(failure.write.file.index_key) if failure.replaced else None
                if lost is not None and lost.file.name == failure.write.file.name:
                    state.books.drop(lost.index_key)
            for write in wave:
                if id(write) in reasons:
                    failed = state.board.fail(write, reasons[id(write)])
                    unlink += [one for one in failed[1:] if one.tmp]
                    calls += book_failed(state, failed)
                else:
                    state.board.durable(write)
                    state.unsettled += 1 + len(write.followers)
                    calls += state.finish_write(write)
            state.quiet.notify_all()
            if state.board.has_ready():
                state.for_committer.notify()
        discard_all(state, unlink)
        call_all(calls)


def _publish(state: StoreState, wave: list[Write]) -> list[writing.PublishFailure]:
    try:
        return writing.publish(state.disk, wave, sync=state.config.sync == "data")
    except Exception as error:  # a defect must fail this wave only
        log.exception("store: publication failed")
        lost = MemoryError(repr(error))  # how far it came is not known: the bytes count as left behind until the next open
        return [writing.PublishFailure(write, lost, write.n_bytes, replaced=True, defect=True) for write in wave]
