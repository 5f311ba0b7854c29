"""The whole of sched around the shipped fakes: real core, real loop, a model without torch, slots and pages in real memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from kvalet.runtime.fake import FakeCopier, FakeCopy, FakeEngine, FakeModel, FakePool, FakeSlab
from kvalet.runtime.plan import EndedBy, SamplingParams, StepPlan, StepResult
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.loop import Scheduler
from kvalet.sched.streams import TurnStream
from kvalet.sched.turns import Ended, EndReason, Piece, TurnReport, TurnSpec
from kvalet.store.fake import FakeJob, FakeStore
from kvalet.store.ids import ChunkKey, TailRef

PAGE_TOKENS = 4
CHUNK_TOKENS = 16
SECRET = b"t" * 32
IDENTITY = b"i" * 32
ENDS = {EndedBy.STOP: EndReason.STOP, EndedBy.LENGTH: EndReason.LENGTH, EndedBy.GRAMMAR: EndReason.GRAMMAR}


class GatedEngine(FakeEngine):
    """Waits at ``gate`` before each step; ``fail_at`` counts launches down to an exception (-1 = never)."""

    def __init__(self, pool: FakePool, model: FakeModel, *, synchronous: bool) -> None:
        super().__init__(pool, model)
        self.synchronous = synchronous
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at = -1

    def launch(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(60)
        if self.fail_at == 0:
            raise RuntimeError("the device fell off the bus")
        self.fail_at -= 1
        return super().launch(plan)


class ThreadedCopier(FakeCopier):
    """Copies run in order on a thread of its own, as real ones complete."""

    def __init__(self, pool: FakePool, slab: FakeSlab) -> None:
        super().__init__(pool, slab)
        self._jobs: queue.SimpleQueue[FakeCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _take(self, copy: FakeCopy) -> None:
        self._jobs.put(copy)

    def _work(self) -> None:
        while (copy := self._jobs.get()) is not None:
            copy.run()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(10)


class ThreadedStore(FakeStore):
    """Jobs run on a thread of its own, each after ``gate``; ``fault`` may name a reason to refuse a job for."""

    def __init__(self) -> None:
        super().__init__(identity=IDENTITY)
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Callable[[FakeJob], str] = lambda _: ""
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[FakeJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _take(self, job: FakeJob) -> None:
        with self._lock:
            self.pending.append(job)
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            assert self.gate.wait(60)
            with self._lock:
                waits = job in self.pending
            if not waits:  # cancelled meanwhile, and answered
                continue
            reason = self.fault(job)
            if reason:
                job.refuse(reason)
            else:
                job.run()

    def execute(self, job: FakeJob) -> Any:
        with self._lock:
            return super().execute(job)

    def tails(self, parent: bytes) -> Sequence[TailRef]:
        with self._lock:
            return super().tails(parent)

    def branches(self, tenant: str, session: str) -> Sequence[str]:
        with self._lock:
            return super().branches(tenant, session)

    def drop_record(self, tenant: str, session: str, branch: str) -> None:
        with self._lock:
            super().drop_record(tenant, session, branch)

    def cancel(self, job: int) -> None:
        if self.gate.is_set():  # what the thread may be doing already cannot be cancelled
            return
        with self._lock:
            super().cancel(job)

    def settle(self, completion: Any) -> Any:
        with self._lock:
            return super().settle(completion)

    def keys(self) -> list[ChunkKey]:
        with self._lock:
            return list(self.entries)

    def close(self) -> None:
        self.gate.set()
        self._jobs.put(None)
        self._thread.join(10)


@dataclass
class House:
    core: Core
    scheduler: Scheduler
    engine: GatedEngine
    copier: FakeCopier
    store: ThreadedStore | None
    model: FakeModel
    ended: list[Ended] = field(default_factory=list)

    def spec(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> TurnSpec:
        names = {name: more.pop(name) for name in ("session", "stream_pieces", "secret") if name in more}
        params = SamplingParams(max_tokens=max_tokens, **more)
        names.setdefault("secret", SECRET)
        return TurnSpec(self.scheduler.next_turn_id(), tuple(prompt), params, **names)

    def right(self, spec: TurnSpec) -> tuple[tuple[int, ...], EndReason]:
        ids, ended = self.model.continuation(spec.prompt, spec.params)
        return ids, ENDS[ended]

    async def ask(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> tuple[tuple[int, ...], TurnReport]:
        """One turn to its end; its answer must be right."""
        spec = self.spec(prompt, max_tokens, **more)
        ids, ended = await read(await self.scheduler.submit(spec))
        assert (ids, ended.reason) == self.right(spec), f"{spec} got {ended}"
        return ids, ended.report

    async def quiet(self) -> None:
        """Until no turn is open and nothing moves."""
        scheduler, ticker = self.scheduler, self.scheduler._ticker
        assert await ticker.until(
            lambda: (
                not (len(ticker.turns) or len(ticker.transfers) or ticker.engine_thread.in_flight or len(ticker.inbox))
                and not len(ticker.records)
            ),
            20,
        ), scheduler.statistics()

    def all_pages_are_back(self) -> None:
        state = self.core.statistics()
        assert state.pages.leased_only == 0
        assert state.pages.free + state.idle_pages == state.pages.total, state


async def read(stream: TurnStream) -> tuple[tuple[int, ...], Ended]:
    """All ids and the end; text must say the same as the ids where nothing was cut off."""
    ids: list[int] = []
    async for item in stream:
        if isinstance(item, Piece):
            ids.extend(item.ids)
        else:
            return tuple(ids), item
    raise AssertionError("a stream ended without Ended")


@asynccontextmanager
async def fake_house(
    *,
    n_pages: int = 33,
    ram_slots: int = 4,
    lag: int = 0,
    with_store: bool = True,
    synchronous: bool = True,
    write_timeout_s: float = 60.0,
    seconds: float = 60.0,
    disk_of: House | None = None,
    **config: Any,
) -> AsyncIterator[House]:
    """At its end: every accepted turn has ended exactly once, none as ``internal``, and the core's books are right.
    ``disk_of``: another house, whose disk this one begins with."""
    pool, model = FakePool(n_pages, PAGE_TOKENS), FakeModel()
    staging = 3
    slab = FakeSlab(ram_slots + staging, CHUNK_TOKENS // PAGE_TOKENS, pool.page_bytes)
    engine, copier = GatedEngine(pool, model, synchronous=synchronous), ThreadedCopier(pool, slab)
    store = ThreadedStore() if with_store else None
    if disk_of is not None and store is not None and disk_of.store is not None:
        store.entries.update(disk_of.store.entries)
        store.records = disk_of.store.records
    settings = SchedConfig(
        page_tokens=PAGE_TOKENS, chunk_tokens=CHUNK_TOKENS, n_pages=n_pages, context_tokens=1024, identity=IDENTITY,
        ram_slots=ram_slots, staging_slots=staging, lag=lag, **{"page_bytes": pool.page_bytes, "max_rows": 8, **config},
    )  # fmt: skip
    core = Core(settings, store if store is not None else _NoDisk())
    with anyio.fail_after(seconds):
        async with Scheduler(core, engine, copier, store, slab.view, write_timeout_s=write_timeout_s) as scheduler:
            house = House(core, scheduler, engine, copier, store, model)
            yield house
            if scheduler.statistics().violation is None:
                core.check()
    if store is not None:
        store.close()
    state = scheduler.statistics()
    assert state.violation is None, state.violation
    assert state.duplicate_answers == 0
    assert state.open_turns == 0
    assert state.totals.accepted == sum(state.totals.ended.values())
    assert state.totals.ended[EndReason.INTERNAL] == 0


class _NoDisk:
    def has(self, key: ChunkKey) -> bool:
        return False

    def tails(self, parent: bytes) -> Sequence[TailRef]:
        return ()

    def accepts_writes(self) -> bool:
        return False

    def branches(self, tenant: str, session: str) -> Sequence[str]:
        return ()
