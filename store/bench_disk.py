"""What the store's promises cost beside the raw disk: alternating rounds of the same sizes and threads on the same disk.

Raw: O_DIRECT preadv/pwritev of whole files by N threads, one call per file. Writes are measured twice: without any flush (what
``spill_of_raw`` compares with, the stricter reading) and with fdatasync each. Store: the public interface only, verified
restores and durable spills of several chains at once. Every round does all five, every second round backwards, and a ratio is
the median over rounds of two figures of one round, so that what else the machine does hits both sides.
"""

from __future__ import annotations

import mmap
import os
import queue
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.store import layout
from kvalet.store.bench_raw import cpu_seconds, flush, in_parallel, read_raw, write_raw, write_raw_flushed
from kvalet.store.config import BLOCK_BYTES, StoreConfig
from kvalet.store.ids import ChunkKey, ChunkMeta, Identity, chunk_key, tenant_secret
from kvalet.store.store import DiskStore

PAGE_TOKENS = 16
CHAINS = 12
STAGING_BYTES = 256 << 20
DEFAULTS = StoreConfig(".", 0)
IDENTITY = Identity.of({"bench": "1"})
PHASES = ("raw_write", "raw_write_flushed", "spill", "raw_read", "restore")
BACKWARDS = ("spill", "raw_write_flushed", "raw_write", "restore", "raw_read")


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's chunk: ``pages`` pages of PAGE_TOKENS tokens, ``stride`` bytes each."""

    model: str
    pages: int
    stride: int

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_TOKENS

    @property
    def file_bytes(self) -> int:
        return BLOCK_BYTES + self.pages * self.stride


SMOLLM = Shape("SmolLM2-135M", 16, 16 * 23_040)
QWEN = Shape("Qwen3-8B", 8, 16 * 147_456)


@dataclass(frozen=True, slots=True)
class Plan:
    """``phase_bytes``: moved per measurement, rounded to whole chains of CHAINS; ``slots``: chunks in flight, within 256 MB."""

    directory: str
    rounds: int = 7
    phase_bytes: int = 640 << 20
    readers: int = DEFAULTS.readers
    writers: int = DEFAULTS.writers
    slots: int = 32

    def chunks(self, shape: Shape) -> int:
        """Per chain."""
        return max(2, round(self.phase_bytes / CHAINS / shape.file_bytes))

    def room(self, shape: Shape) -> int:
        """Bytes of disk that a run takes at most."""
        return (self.rounds + 1) * CHAINS * self.chunks(shape) * shape.file_bytes


def make_slots(plan: Plan, shape: Shape) -> list[memoryview]:
    """The fixed set through which everything goes, filled (so that its memory is there before anything is measured)."""
    slots = [memoryview(mmap.mmap(-1, shape.file_bytes)) for _ in range(min(plan.slots, STAGING_BYTES // shape.file_bytes))]
    for slot in slots:
        slot[:] = os.urandom(BLOCK_BYTES) * (len(slot) // BLOCK_BYTES)
    return slots


def open_store(plan: Plan, shape: Shape, directory: str, cap_bytes: int) -> DiskStore:
    config = StoreConfig(directory, cap_bytes, min_free_bytes=0, readers=plan.readers, writers=plan.writers)
    return DiskStore.open(config, IDENTITY, page_stride_bytes=shape.stride, page_tokens=PAGE_TOKENS, chunk_tokens=shape.tokens)


def chain(store: DiskStore, shape: Shape, number: int, n_chunks: int) -> list[ChunkMeta]:
    """One sequence of its own: ``number`` makes its tokens differ from all others'."""
    secret, parent, metas = tenant_secret(store.secret, "bench"), IDENTITY.digest, []
    for i in range(n_chunks):
        first = i * shape.tokens
        ids = tuple(range(number * 200_000 + first, number * 200_000 + first + shape.tokens))
        key = chunk_key(secret, parent, ids)
        metas.append(ChunkMeta(ChunkKey(key), parent, i, first, ids, shape.pages))
        parent = bytes(key)
    return metas


def make_shards(directory: str) -> None:
    """All 256, as any store has that is not new: a new one makes each at its first file."""
    for shard in layout.SHARDS:
        os.mkdir(os.path.join(directory, layout.CHUNKS, shard), 0o700)


class Bed:
    """Everything one shape is measured with, in a directory of its own."""

    def __init__(self, plan: Plan, shape: Shape, directory: str) -> None:
        self.plan, self.shape, self.directory = plan, shape, directory
        self.slots = make_slots(plan, shape)
        self.n_bytes = CHAINS * plan.chunks(shape) * shape.file_bytes
        self._raw = os.path.join(directory, "raw")
        self._spilled: list[list[ChunkMeta]] = []
        self._next_chain = 0
        os.mkdir(self._raw)
        path = os.path.join(directory, "store")
        open_store(plan, shape, path, self.n_bytes).close(30)
        make_shards(path)
        self.store = open_store(plan, shape, path, plan.room(shape))

    def close(self) -> None:
        self.store.close(30)

    def measure(self, phase: str) -> tuple[float, float]:
        """(bytes per second, CPU seconds per 1e9 bytes) of one phase. A restore reads what was spilled last."""
        body = self._prepare(phase)
        flush(self.directory)  # earlier deletions are not this phase's work
        with cpu_seconds() as cpu:
            began = time.perf_counter()
            body()
            took = time.perf_counter() - began
        return self.n_bytes / took, cpu[0] / self.n_bytes * 1e9

    def _prepare(self, phase: str) -> Callable[[], None]:
        if phase == "spill":
            numbers = range(self._next_chain, self._next_chain + CHAINS)
            self._next_chain += CHAINS
            self._spilled = [chain(self.store, self.shape, n, self.plan.chunks(self.shape)) for n in numbers]
            return lambda: spill(self.store, self._spilled, self.slots)
        if phase == "restore":
            return lambda: restore(self.store, self._spilled, self.slots)
        if phase == "raw_read":
            return lambda: in_parallel(self.plan.readers, self._raw_paths(), self.slots, read_raw)
        for name in os.listdir(self._raw):
            os.unlink(os.path.join(self._raw, name))
        write = write_raw if phase == "raw_write" else write_raw_flushed
        return lambda: in_parallel(self.plan.writers, self._raw_paths(), self.slots, write)

    def _raw_paths(self) -> list[str]:
        return [os.path.join(self._raw, str(i)) for i in range(self.n_bytes // self.shape.file_bytes)]


def measure_shape(plan: Plan, shape: Shape, directory: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """Medians of all phases. One unmeasured round first. OSError: no room, or no direct I/O. RuntimeError: a job failed."""
    bed = Bed(plan, shape, directory)
    rates: dict[str, list[float]] = {phase: [] for phase in PHASES}
    cpu: dict[str, list[float]] = {phase: [] for phase in PHASES}
    try:
        if not bed.store.statistics().direct:
            raise OSError("this disk takes no direct I/O, so there is no raw figure to compare with")
        for number in range(plan.rounds + 1):
            for phase in PHASES if number % 2 else BACKWARDS:
                rate, seconds = bed.measure(phase)
                if number:
                    rates[phase].append(rate)
                    cpu[phase].append(seconds)
            progress(f"{shape.model}: round {number} of {plan.rounds}")
    finally:
        bed.close()
        shutil.rmtree(directory)
    return {
        "model": shape.model,
        "chunk_tokens": shape.tokens,
        "file_bytes": shape.file_bytes,
        "bytes_per_phase": bed.n_bytes,
        "rounds": plan.rounds,
        "threads": {"readers": plan.readers, "writers": plan.writers},
        "slots": len(bed.slots),
        "gb_per_s": {phase: statistics.median(rates[phase]) / 1e9 for phase in PHASES},
        "cpu_s_per_gb": {phase: statistics.median(cpu[phase]) for phase in PHASES},
        "restore_share": share(rates["restore"], rates["raw_read"]),
        "spill_share": share(rates["spill"], rates["raw_write"]),
        "spill_share_of_flushed_writes": share(rates["spill"], rates["raw_write_flushed"]),
    }


def share(ours: Sequence[float], raw: Sequence[float]) -> dict[str, float]:
    """Median over rounds of the ratio of two figures of one round, with its quartiles."""
    ratios = sorted(a / b for a, b in zip(ours, raw, strict=True))
    quarter = len(ratios) // 4
    return {"median": statistics.median(ratios), "low": ratios[quarter], "high": ratios[-1 - quarter]}


def in_turns(chains: Sequence[Sequence[ChunkMeta]]) -> list[tuple[int, ChunkMeta]]:
    return [item for level in zip(*chains, strict=True) for item in enumerate(level)]


def spill(store: DiskStore, chains: Sequence[Sequence[ChunkMeta]], slots: Sequence[memoryview]) -> None:
    """Returns when all are durable."""

    def write(job: int, _: int, meta: ChunkMeta, slot: memoryview, done: Callable[[Any], None]) -> None:
        store.write(job, meta, slot, done, klass=2)

    pump(store, in_turns(chains), slots, write)


def restore(store: DiskStore, chains: Sequence[Sequence[ChunkMeta]], slots: Sequence[memoryview]) -> None:
    """Returns when all were verified in a slot."""

    def read(job: int, number: int, meta: ChunkMeta, slot: memoryview, done: Callable[[Any], None]) -> None:
        store.read(job, meta, slot, done, session=str(number), klass=0)

    pump(store, in_turns(chains), slots, read)


def pump(
    store: DiskStore, work: Iterable[tuple[int, ChunkMeta]], slots: Sequence[memoryview], start: Callable[..., None]
) -> None:
    """Keeps every slot busy, as the scheduler does. RuntimeError if a job fails: then there is nothing to measure."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    running: dict[int, memoryview] = {}
    free = list(slots)

    def finish() -> memoryview:
        outcome = store.settle(done.get(timeout=120))
        if outcome.reason:
            raise RuntimeError(f"a job of the benchmark failed: {outcome.reason}")
        return running.pop(outcome.job)

    for job, (number, meta) in enumerate(work):
        running[job] = free.pop() if free else finish()
        start(job, number, meta, running[job], done.put)
    while running:
        finish()
