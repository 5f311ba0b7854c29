"""How long a full store takes to open, and how much memory a restore takes, short and long."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

from kvalet.store import layout
from kvalet.store.bench_disk import Plan, Shape, chain, make_shards, make_slots, open_store, restore, spill
from kvalet.store.fileio import CREATE_FLAGS
from kvalet.store.store import DiskStore

SHORT_TOKENS, LONG_TOKENS = 1_024, 143_000
MEMORY_EVERY = 4
"""Completions between two looks at the process's memory."""


def measure_open(plan: Plan, shape: Shape, directory: str, files: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Opening looks at names, sizes and times only, so the files are sparse: right names, right sizes, no data. Their names
    were just made, so the kernel has them in memory: a first opening after a boot takes longer."""
    path = os.path.join(directory, "many")
    cap = 2 * files * shape.file_bytes
    open_store(plan, shape, path, cap).close(30)
    make_shards(path)
    for number in range(files):
        make_sparse(path, number, shape.file_bytes)
        if number % 20_000 == 0:
            progress(f"making {number} of {files} names")
    times, before, found = [], anonymous_bytes(), 0
    for _ in range(3):
        began = time.perf_counter()
        store = open_store(plan, shape, path, cap)
        times.append(time.perf_counter() - began)
        found = store.statistics().files
        index_bytes = anonymous_bytes() - before
        store.close(30)
    shutil.rmtree(path)
    if found != files:
        raise RuntimeError(f"the store found {found} of {files} files")
    return {"files": files, "seconds": statistics.median(times), "index_bytes": max(index_bytes, 0)}


def make_sparse(path: str, number: int, n_bytes: int) -> None:
    key = f"{number * 2654435761 % 2**32:08x}{number:056x}"
    name = os.path.join(path, layout.CHUNKS, key[:2], f"{key}.{number % 7}.00000000")
    fd = os.open(name, CREATE_FLAGS, 0o600)
    try:
        os.ftruncate(fd, n_bytes)
    finally:
        os.close(fd)


def measure_staging(plan: Plan, shape: Shape, directory: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """One session of 1k and one of 143k tokens, spilled and restored through the same slots: what the slots take, and what
    the process's memory grew by at its highest beyond them."""
    slots = make_slots(plan, shape)
    lengths = {"1k": SHORT_TOKENS // shape.tokens, "143k": -(-LONG_TOKENS // shape.tokens)}
    path = os.path.join(directory, "staging")
    store = open_store(plan, shape, path, 2 * sum(lengths.values()) * shape.file_bytes)
    found: dict[str, Any] = {}
    try:
        for number, (name, n_chunks) in enumerate(lengths.items()):
            progress(f"restoring {n_chunks * shape.tokens} tokens")
            metas = chain(store, shape, number, n_chunks)
            spill(store, [metas], slots)
            watch = Watch(store)
            restore(watch, [metas], slots)  # type: ignore[arg-type]
            found[name] = {
                "tokens": n_chunks * shape.tokens,
                "slots_bytes": sum(len(s) for s in slots),
                "grown_bytes": watch.grown,
            }
    finally:
        store.close(30)
        shutil.rmtree(path)
    return found


class Watch:
    """The store, looking at the process's memory now and then."""

    def __init__(self, store: DiskStore) -> None:
        self._store, self._settled = store, 0
        self._before = anonymous_bytes()
        self.grown = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def settle(self, completion: Any) -> Any:
        self._settled += 1
        if self._settled % MEMORY_EVERY == 0:
            self.grown = max(self.grown, anonymous_bytes() - self._before)
        return self._store.settle(completion)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, as the kernel counts it (Linux; 0 elsewhere)."""
    try:
        with open("/proc/self/status", encoding="ascii") as f:
            return next((int(line.split()[1]) << 10 for line in f if line.startswith("RssAnon:")), 0)
    except OSError:
        return 0
