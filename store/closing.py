"""Ending a store: drain within a bound, answer everybody, stop the threads, clean tmp/, give up the lock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from kvalet.store.reading import ReadOutcome
from kvalet.store.state import ReadOver, StoreState

log = logging.getLogger("kvalet.store")
STOP_S = 2.0
"""What threads get to notice that they should stop, on top of the caller's deadline."""


def close(state: StoreState, threads: Sequence[threading.Thread], deadline_s: float) -> int:
    """See DiskStore.close. The last thread is the janitor."""
    until = time.monotonic() + deadline_s
    with state.lock:
        if state.closed:
            return 0
        state.closed = True
        while _busy(state) and time.monotonic() < until:
            state.quiet.wait(max(until - time.monotonic(), 0.0))
        refused = _refuse_rest(state)
        state.stopping = True
        _wake_all(state)
    until = time.monotonic() + STOP_S
    for thread in threads[:-1]:
        thread.join(max(until - time.monotonic(), 0.0))
    with state.lock:
        state.janitor_stopping = True  # last: a writer may still wait for an unlink
        state.for_janitor.notify()
    threads[-1].join(max(until - time.monotonic(), 0.0))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        log.error("store: %s hang in the disk; the lock is kept until the process ends", ", ".join(stuck))
        return refused + len(stuck)
    state.disk.close()
    return refused


def _busy(state: StoreState) -> bool:
    return bool(len(state.reads) or state.running or state.board.unfinished() or state.answers or state.burials or state.dying)


def _refuse_rest(state: StoreState) -> int:
    """Lock held. Answers go out through the clerk, which stops only when it has none left."""
    n = 0
    while (read := state.reads.take()) is not None:
        state.answer(read.done, ReadOver(read, (ReadOutcome("closed", "close"),)))
        n += 1
    for write in state.board.close():
        for done, over in state.finish_write(write):
            state.answer(done, over)
            n += 1
        if write.tmp:
            state.tmp_garbage.append(write)
    return n + len(state.running) + state.board.unfinished()


def _wake_all(state: StoreState) -> None:
    for condition in (state.for_readers, state.for_writers, state.for_committer, state.for_clerk, state.for_janitor):
        condition.notify_all()
