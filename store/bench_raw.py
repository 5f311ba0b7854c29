"""The raw disk as fast as plain threads get it: O_DIRECT, one call per file, no header, no digest. And what measuring needs."""

from __future__ import annotations

import os
import queue
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvalet.store.fileio import CREATE_FLAGS, READ_FLAGS


def in_parallel(n: int, paths: Sequence[str], slots: Sequence[memoryview], one: Callable[[str, memoryview], None]) -> None:
    """``one`` on all paths by ``n`` threads, a slot each. Raises what the first failed one raised."""
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    failed: list[OSError] = []
    for path in paths:
        left.put(path)

    def work(slot: memoryview) -> None:
        try:
            while True:
                one(left.get_nowait(), slot)
        except queue.Empty:
            return
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(slots[i],)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def write_raw(path: str, slot: memoryview, *, flushed: bool = False) -> None:
    fd = os.open(path, CREATE_FLAGS | os.O_DIRECT, 0o600)
    try:
        if os.pwritev(fd, [slot], 0) != len(slot):
            raise OSError("short write")
        if flushed:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def write_raw_flushed(path: str, slot: memoryview) -> None:
    write_raw(path, slot, flushed=True)


def read_raw(path: str, slot: memoryview) -> None:
    fd = os.open(path, READ_FLAGS | os.O_DIRECT)
    try:
        if os.preadv(fd, [slot], 0) != len(slot):
            raise OSError("short read")
    finally:
        os.close(fd)


def flush(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def cpu_seconds() -> Iterator[list[float]]:
    """CPU seconds of the whole process inside the block, in the list's only item."""
    before, spent = resource.getrusage(resource.RUSAGE_SELF), [0.0]
    yield spent
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent[0] = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
