"""What the store does to an event loop: a heartbeat every millisecond while eight restores and eight spills run at once,
beside the same heartbeat on the idle loop, in turns within one run. uvloop, as in the server; asyncio where that is missing.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvalet.store.bench_disk import Plan, Shape, chain, make_shards, make_slots, open_store
from kvalet.store.ids import ChunkMeta
from kvalet.store.store import DiskStore

BEAT_S = 0.001
AT_ONCE = 8
RESTORED_CHUNKS = 4
SESSIONS, SESSION_CHUNKS = 25, 8
ROUNDS, ROUND_S = 3, 1.5


def measure_lag(plan: Plan, shape: Shape, directory: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """Lag in milliseconds: how much later than a millisecond each beat came."""
    path = os.path.join(directory, "lag")
    cap = AT_ONCE * (RESTORED_CHUNKS + 16) * shape.file_bytes  # soon full: eviction is part of what runs
    open_store(plan, shape, path, cap).close(30)
    make_shards(path)
    store = open_store(plan, shape, path, cap)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_measure(store, plan, shape, progress))
    finally:
        store.close(30)
        shutil.rmtree(path)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return factory


async def _measure(store: DiskStore, plan: Plan, shape: Shape, progress: Callable[[str], None]) -> dict[str, Any]:
    desk = Desk(store)
    slots = make_slots(plan, shape)[: 2 * AT_ONCE]
    kept = [chain(store, shape, number, RESTORED_CHUNKS) for number in range(AT_ONCE)]
    for metas in kept:
        for meta in metas:
            await desk.write(meta, slots[0])
        store.pin([meta.key for meta in metas])
    idle: list[float] = []
    busy: list[float] = []
    for number in range(1, ROUNDS + 1):
        progress(f"heartbeat: round {number} of {ROUNDS}")
        new = [_sessions(store, shape, number * AT_ONCE + i) for i in range(AT_ONCE)]  # before: it takes time on the loop
        await heartbeat(ROUND_S, idle)
        until = time.perf_counter() + ROUND_S
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(heartbeat(ROUND_S, busy), name="heartbeat")]
            for i in range(len(slots) // 2):
                tasks.append(group.create_task(desk.restore_on(kept[i], slots[i], until), name=f"restore {i}"))
                tasks.append(group.create_task(desk.spill_on(new[i], slots[-1 - i], until), name=f"spill {i}"))
    for metas in kept:
        store.unpin([meta.key for meta in metas])
    return {
        "loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
        "heartbeat_ms": BEAT_S * 1e3,
        "restores_at_once": len(slots) // 2,
        "spills_at_once": len(slots) // 2,
        "restored_chunks": desk.restored,
        "spilled_chunks": desk.spilled,
        "gb_per_s": (desk.restored + desk.spilled) * shape.file_bytes / (ROUNDS * ROUND_S) / 1e9,
        "idle_ms": percentiles(idle),
        "busy_ms": percentiles(busy),
    }


def _sessions(store: DiskStore, shape: Shape, number: int) -> list[list[ChunkMeta]]:
    """More than can be spilled in one round; tokens that no other ``number`` has."""
    return [chain(store, shape, number * SESSIONS + i, SESSION_CHUNKS) for i in range(SESSIONS)]


async def heartbeat(seconds: float, lags: list[float]) -> None:
    """A timer every BEAT_S, as callbacks; ``lags`` gets seconds beyond BEAT_S, one per beat."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    until = time.perf_counter() + seconds
    last = time.perf_counter()

    def beat() -> None:
        nonlocal last
        now = time.perf_counter()
        lags.append(max(now - last - BEAT_S, 0.0))
        if now >= until:
            over.set()
            return
        last = time.perf_counter()
        loop.call_later(BEAT_S, beat)

    loop.call_later(BEAT_S, beat)
    await over.wait()


class Desk:
    """The store's caller on an event loop: completions come in by ``call_soon_threadsafe`` and are settled there."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._jobs = 0
        self.restored = 0
        self.spilled = 0

    async def write(self, meta: ChunkMeta, slot: memoryview) -> str:
        over: asyncio.Future[Any] = self._loop.create_future()
        self._jobs += 1
        self._store.write(self._jobs, meta, slot, self._done(over), klass=2)
        return str((await over).reason)

    async def read(self, meta: ChunkMeta, slot: memoryview, session: str) -> str:
        over: asyncio.Future[Any] = self._loop.create_future()
        self._jobs += 1
        self._store.read(self._jobs, meta, slot, self._done(over), session=session, klass=0)
        return str((await over).reason)

    async def restore_on(self, metas: Sequence[ChunkMeta], slot: memoryview, until: float) -> None:
        """The same session again and again. RuntimeError if anything is refused."""
        while time.perf_counter() < until:
            for meta in metas:
                _must(await self.read(meta, slot, meta.key.hex()))
                self.restored += 1

    async def spill_on(self, sessions: Sequence[Sequence[ChunkMeta]], slot: memoryview, until: float) -> None:
        """Session after session, chunk after chunk. One whose beginning was evicted meanwhile ends there."""
        for metas in sessions:
            for meta in metas:
                if time.perf_counter() >= until:
                    return
                if await self.write(meta, slot):
                    break
                self.spilled += 1

    def _done(self, over: asyncio.Future[Any]) -> Callable[[Any], None]:
        def settle(completion: Any) -> None:
            over.set_result(self._store.settle(completion))

        def done(completion: Any) -> None:
            self._loop.call_soon_threadsafe(settle, completion)

        return done


def _must(reason: str) -> None:
    if reason:
        raise RuntimeError(f"a job of the benchmark failed: {reason}")


def percentiles(lags: Sequence[float]) -> dict[str, float]:
    """p50, p99, max in milliseconds, and how many."""
    ordered = sorted(lags)
    at = {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)], "max": ordered[-1]}
    return {**{name: round(value * 1e3, 3) for name, value in at.items()}, "beats": len(ordered)}
