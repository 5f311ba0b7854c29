"""The clerk (prompt answers, expiry of waiting reads) and the janitor (everything slow), as thread bodies.

The clerk does no I/O, so a refusal is told at once even when every reader hangs on the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvalet.store import janitor, layout, recordchores, scan
from kvalet.store.directory import write_probe
from kvalet.store.entries import keys_of
from kvalet.store.faultwords import explain
from kvalet.store.janitor import Burial
from kvalet.store.layout import FileName
from kvalet.store.reading import ReadOutcome
from kvalet.store.state import ReadOver, StoreState
from kvalet.store.storefiles import write_small
from kvalet.store.workers import call, discard_all

log = logging.getLogger("kvalet.store")
RECORDS_EVERY_S = 1.0
"""How often records are looked through for those whose time is over."""
IDLE_S = 0.25
"""Longest sleep of clerk and janitor: how late an expiry or a chore can be."""


def clerk_loop(state: StoreState) -> None:
    while True:
        with state.lock:
            while not state.answers:
                if state.stopping:
                    return
                state.for_clerk.wait(IDLE_S)
                expire(state)
            done, over = state.answers.popleft()
            state.unsettled += 1
            state.quiet.notify_all()
        call(done, over)


def expire(state: StoreState) -> None:
    """Lock held. Reads that nobody started within the deadline are answered; their slots were never touched."""
    limit = state.clock() - state.config.queue_deadline_s
    for read in state.reads.jobs():
        if read.queued_at < limit and state.reads.remove(read.job):
            state.answer(read.done, ReadOver(read, (ReadOutcome("deadline", "queue"),)))


@dataclass(slots=True)
class Timers:
    """When each chore is due next, on the store's monotonic clock."""

    free: float
    touch: float
    walk: float
    records: float


def janitor_loop(state: StoreState) -> None:
    now, config = state.clock(), state.config
    timers = Timers(now + config.free_every_s, now + config.touch_every_s, now + config.walk_every_s, now + RECORDS_EVERY_S)
    while True:
        with state.lock:
            if not state.burials and not state.janitor_stopping:
                state.for_janitor.wait(IDLE_S)
            burials = list(state.burials)
            state.burials.clear()
            garbage = list(state.tmp_garbage)
            state.tmp_garbage.clear()
            stopping = state.janitor_stopping
        _guarded(state, discard_all, state, garbage)
        for burial in burials:
            _guarded(state, _bury, state, burial)
        _guarded(state, partial(_timed, last=stopping), state, timers)
        if stopping and not burials:
            return


def _guarded(state: StoreState, chore: Callable[..., object], *args: object) -> None:
    """One chore's defect ends neither the janitor nor the chores after it; it is counted like any defect."""
    try:
        chore(*args)
    except Exception:
        log.exception("store: a chore failed")
        with state.lock:
            state.counts.internal += 1


def _bury(state: StoreState, burial: Burial) -> None:
    before, ok = state.bad.n_bytes, False
    try:
        if burial.aside:
            ok = janitor.set_aside(state.disk, state.bad, burial, state.config, state.wall_ns())
        else:
            ok = janitor.bury(state.disk, burial)
    finally:  # whatever happened: who waits for the gate must hear of it
        _buried(state, burial, ok=ok, before=before)


def _buried(state: StoreState, burial: Burial, *, ok: bool, before: int) -> None:
    with state.lock:
        state.books.buried(burial.n_bytes, gone=ok)
        state.spare_bytes += burial.n_bytes if ok and not burial.aside else 0
        state.books.aside_bytes += state.bad.n_bytes - before
        if state.dying.get(burial.file.name) is burial.gate:
            state.dying.pop(burial.file.name, None)
        state.quiet.notify_all()
    if burial.gate is not None:
        burial.gate.one_over(ok=ok)


def _timed(state: StoreState, timers: Timers, *, last: bool) -> None:
    now = state.clock()
    if now >= timers.free:
        timers.free = now + state.config.free_every_s
        measure_free(state)
    if now >= timers.touch or last:
        timers.touch = now + state.config.touch_every_s
        flush_touches(state)
    with state.lock:
        probe = state.write_breaker.probe_due(now) and not last
    if probe:
        _probe(state)
    if now >= timers.records and not last:
        timers.records = now + RECORDS_EVERY_S
        recordchores.sweep(state)
    with state.lock:
        spent = state.budget.save(now, state.wall_ns() / 1e9) if last or state.budget.save_due(now) else b""
    if spent and state.config.bytes_per_day:
        _save_budget(state, spent)
    if now >= timers.walk and not last:
        timers.walk = now + state.config.walk_every_s
        compare(state)


def _save_budget(state: StoreState, spent: bytes) -> None:
    try:
        write_small(state.disk.root_fd, layout.BUDGET_FILE, spent)
    except (OSError, MemoryError) as error:
        log.warning("store: the budget of the day is not written down: %s", explain(error))


def measure_free(state: StoreState) -> None:
    """df arithmetic, kept for the loop thread, which must not ask the disk itself."""
    try:
        free = state.disk.io.free_bytes(state.disk.root_fd)
    except (OSError, MemoryError) as error:
        log.warning("store: free space unknown: %s", explain(error))
        return
    with state.lock:
        state.spare_bytes = free - state.config.min_free_bytes


def flush_touches(state: StoreState) -> int:
    """Write recency to the files' mtimes, parents first (the order in which they were touched). Returns how many."""
    with state.lock:
        touched = list(state.touched.values())
        state.touched.clear()
    for file, recency in touched:
        _touch(state, file, recency)
    return len(touched)


def _touch(state: StoreState, file: FileName, recency: int) -> None:
    try:
        fd = state.disk.open_shard(file.folder, file.shard)
        try:
            state.disk.io.utime(file.name, recency, dir_fd=fd)
        finally:
            state.disk.close_quietly(fd)
    except (OSError, MemoryError) as error:
        log.debug("store: recency of %s not written: %s", file.name[:16], explain(error))


def _probe(state: StoreState) -> None:
    """Does the disk take writes again?"""
    try:
        write_probe(state.disk, state.disk.data_flags)
    except (OSError, MemoryError) as error:
        with state.lock:
            state.write_breaker.probe_failed(state.clock(), explain(error))
        return
    with state.lock:
        state.write_breaker.probe_passed()
        state.quiet.notify_all()
    log.info("store: writes work again")


def compare(state: StoreState) -> int:
    """Walk the disk and correct the ledger where it drifted (files removed or changed from outside). Returns the drift in
    bytes; 0 also when something was in flight, because then nothing can be said."""
    with state.lock:
        if len(state.board) or state.burials or state.dying:
            return 0
        writes, evicted = state.counts.writes, state.books.evicted_files
    found = {}
    try:
        for file, st in scan.walk(state.disk):
            if file is not None:
                found[file.name] = janitor.round_block(st.size)
    except (OSError, MemoryError) as error:
        log.warning("store: the walk of the disk failed: %s", explain(error))
        return 0
    drift = 0
    with state.lock:
        if len(state.board) or (writes, evicted) != (state.counts.writes, state.books.evicted_files):
            return 0  # the disk changed under the walk
        for entry in list(state.books.entries()):
            if entry.file.name not in found:
                drift += entry.n_bytes
                state.gone += keys_of([entry])
                state.books.drop(entry.index_key)
        if drift:
            state.counts.drift += drift
            log.warning("store: %d bytes were removed from outside", drift)
    return drift
