"""How much of the raw disk the store's promises cost: one run, same sizes, same threads, same disk.

Raw: O_DIRECT preadv/pwritev of whole files by N threads (writes flushed with fdatasync). Store: the public interface,
verified restores and durable spills, several chains at once. ``restore_of_raw`` and ``spill_of_raw`` are the ratios.
"""

from __future__ import annotations

import mmap
import os
import queue
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvalet.store.config import BLOCK_BYTES, StoreConfig
from kvalet.store.fileio import CREATE_FLAGS, READ_FLAGS
from kvalet.store.ids import ChunkKey, ChunkMeta, Identity, chunk_key, tenant_secret
from kvalet.store.store import DiskStore

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """``chains`` sequences of ``chunks`` chunks each; a chunk is ``pages`` pages of ``stride`` bytes (defaults: SmolLM2's).
    ``repeat``: rounds of everything; medians are reported."""

    directory: str
    chains: int = 8
    chunks: int = 8
    pages: int = 16
    stride: int = 368_640
    readers: int = 4
    writers: int = 2
    repeat: int = 3

    @property
    def file_bytes(self) -> int:
        return BLOCK_BYTES + self.pages * self.stride

    @property
    def total_bytes(self) -> int:
        return self.file_bytes * self.chains * self.chunks


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Bytes per second, CPU seconds (all threads of the process) per 1e9 bytes, milliseconds."""

    file_bytes: int
    total_bytes: int
    direct: bool
    raw_read_bytes_per_s: float
    raw_write_bytes_per_s: float
    restore_bytes_per_s: float
    spill_bytes_per_s: float
    restore_of_raw: float
    spill_of_raw: float
    restore_cpu_s_per_gb: float
    spill_cpu_s_per_gb: float
    open_ms: float
    staging_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(plan: BenchPlan) -> BenchReport:
    """Blocking, in a new folder below ``plan.directory`` that is removed again. OSError if that disk has no room, or no
    direct I/O (then there is no raw figure to compare with)."""
    home = tempfile.mkdtemp(prefix="kvalet-bench-", dir=plan.directory)
    slots = [memoryview(mmap.mmap(-1, plan.file_bytes)) for _ in range(plan.readers + plan.writers + 4)]
    for slot in slots:
        slot[:] = os.urandom(BLOCK_BYTES) * (len(slot) // BLOCK_BYTES)
    try:
        rounds = [_round(plan, os.path.join(home, str(i)), slots) for i in range(plan.repeat)]
    finally:
        shutil.rmtree(home)
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return BenchReport(
        file_bytes=plan.file_bytes,
        total_bytes=plan.total_bytes,
        direct=bool(middle["direct"]),
        raw_read_bytes_per_s=middle["raw_read"],
        raw_write_bytes_per_s=middle["raw_write"],
        restore_bytes_per_s=middle["restore"],
        spill_bytes_per_s=middle["spill"],
        restore_of_raw=statistics.median(one["restore"] / one["raw_read"] for one in rounds),
        spill_of_raw=statistics.median(one["spill"] / one["raw_write"] for one in rounds),
        restore_cpu_s_per_gb=middle["restore_cpu"],
        spill_cpu_s_per_gb=middle["spill_cpu"],
        open_ms=middle["open_ms"],
        staging_bytes=sum(len(slot) for slot in slots),
    )


def _round(plan: BenchPlan, directory: str, slots: Sequence[memoryview]) -> dict[str, float]:
    os.mkdir(directory, 0o700)
    raw = [os.path.join(directory, f"raw{i}") for i in range(plan.chains * plan.chunks)]
    found: dict[str, float] = {}
    found["raw_write"] = plan.total_bytes / _parallel(plan.writers, raw, slots, _write_raw)
    store = _open(plan, directory)
    chains = _chains(plan, store)
    with _cpu() as cpu:
        found["spill"] = plan.total_bytes / _spill(store, chains, slots)
    found["spill_cpu"] = cpu[0] / plan.total_bytes * 1e9
    found["direct"] = store.statistics().direct
    store.close(30)
    found["raw_read"] = plan.total_bytes / _parallel(plan.readers, raw, slots, _read_raw)
    started = time.perf_counter()
    store = _open(plan, directory)
    found["open_ms"] = (time.perf_counter() - started) * 1e3
    with _cpu() as cpu:
        found["restore"] = plan.total_bytes / _restore(store, chains, slots)
    found["restore_cpu"] = cpu[0] / plan.total_bytes * 1e9
    store.close(30)
    shutil.rmtree(directory)
    return found


def _open(plan: BenchPlan, directory: str) -> DiskStore:
    config = StoreConfig(
        os.path.join(directory, "store"), 2 * plan.total_bytes, min_free_bytes=0, readers=plan.readers, writers=plan.writers
    )
    return DiskStore.open(
        config,
        Identity.of({"bench": "1"}),
        page_stride_bytes=plan.stride,
        page_tokens=PAGE_TOKENS,
        chunk_tokens=PAGE_TOKENS * plan.pages,
    )


def _chains(plan: BenchPlan, store: DiskStore) -> list[list[ChunkMeta]]:
    secret, tokens = tenant_secret(store.secret, "bench"), PAGE_TOKENS * plan.pages
    chains = []
    for number in range(plan.chains):
        parent, metas = Identity.of({"bench": "1"}).digest, []
        for i in range(plan.chunks):
            ids = tuple(range(number * 1_000_000 + i * tokens, number * 1_000_000 + (i + 1) * tokens))
            key = chunk_key(secret, parent, ids)
            metas.append(ChunkMeta(ChunkKey(key), parent, i, i * tokens, ids, plan.pages))
            parent = bytes(key)
        chains.append(metas)
    return chains


def _in_turns(chains: Sequence[Sequence[ChunkMeta]]) -> Iterator[tuple[int, ChunkMeta]]:
    for level in zip(*chains, strict=True):
        yield from enumerate(level)


def _spill(store: DiskStore, chains: Sequence[Sequence[ChunkMeta]], slots: Sequence[memoryview]) -> float:
    """Seconds until all are durable."""
    return _pump(
        store, list(_in_turns(chains)), slots, lambda job, _, meta, slot, done: store.write(job, meta, slot, done, klass=2)
    )


def _restore(store: DiskStore, chains: Sequence[Sequence[ChunkMeta]], slots: Sequence[memoryview]) -> float:
    """Seconds until all are verified in a slot."""

    def read(job: int, number: int, meta: ChunkMeta, slot: memoryview, done: Callable[[Any], None]) -> None:
        store.read(job, meta, slot, done, session=str(number), klass=0)

    return _pump(store, list(_in_turns(chains)), slots, read)


def _pump(
    store: DiskStore, work: list[tuple[int, ChunkMeta]], slots: Sequence[memoryview], start: Callable[..., None]
) -> float:
    """Keeps every slot busy, as the scheduler does. RuntimeError if a job fails: then there is nothing to measure."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    running: dict[int, memoryview] = {}
    free = list(slots)
    began = time.perf_counter()
    for job, (number, meta) in enumerate(work):
        if not free:
            free.append(_finish(store, done, running))
        running[job] = free.pop()
        start(job, number, meta, running[job], done.put)
    while running:
        _finish(store, done, running)
    return time.perf_counter() - began


def _finish(store: DiskStore, done: queue.SimpleQueue[Any], running: dict[int, memoryview]) -> memoryview:
    outcome = store.settle(done.get(timeout=120))
    if outcome.reason:
        raise RuntimeError(f"a job of the benchmark failed: {outcome.reason}")
    return running.pop(outcome.job)


def _parallel(n: int, paths: Sequence[str], slots: Sequence[memoryview], one: Callable[[str, memoryview], None]) -> float:
    """Seconds for ``one`` on all paths with ``n`` threads, a slot each."""
    left, failed = queue.SimpleQueue[str](), []
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
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - began


def _write_raw(path: str, slot: memoryview) -> None:
    fd = os.open(path, CREATE_FLAGS | os.O_DIRECT, 0o600)
    try:
        if os.pwritev(fd, [slot], 0) != len(slot):
            raise OSError("short write")
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _read_raw(path: str, slot: memoryview) -> None:
    fd = os.open(path, READ_FLAGS | os.O_DIRECT)
    try:
        if os.preadv(fd, [slot], 0) != len(slot):
            raise OSError("short read")
    finally:
        os.close(fd)


@contextmanager
def _cpu() -> Iterator[list[float]]:
    """CPU seconds of the whole process inside the block, in the list's only item."""
    before, spent = resource.getrusage(resource.RUSAGE_SELF), [0.0]
    yield spent
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent[0] = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
