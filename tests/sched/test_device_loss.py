"""The device fails at each point where it is used: every turn ends once, what RAM holds reaches the disk, a restart goes on."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from fake_house import CHUNK_TOKENS, IDENTITY, PAGE_TOKENS, GatedEngine, House, ThreadedCopier, ThreadedStore, read
from kvalet.runtime.errors import DeviceLostText
from kvalet.runtime.fake import FakeCopy, FakeModel, FakePool, FakeSlab
from kvalet.runtime.plan import StepResult
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.errors import Refused
from kvalet.sched.loop import Scheduler
from kvalet.sched.turns import EndReason, Refusal
from schedsim import Walk

POINTS = ("launch", "finish", "copy out", "copy in")
N_PAGES = 33
SHAPES = [(0, True), (0, False), (1, False)]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@dataclass
class Fault:
    """Once ``armed``, the next use of the device at ``point`` fails, and every use after it, as a sticky error does."""

    point: str
    armed: bool = False
    struck: bool = False

    def hit(self, point: str) -> bool:
        self.struck = self.struck or (self.armed and point == self.point)
        return self.struck


class FaultyEngine(GatedEngine):
    fault: Fault

    def finish(self, launched: StepResult) -> StepResult:
        if self.fault.hit("finish"):
            raise RuntimeError("the device fell off the bus")
        return super().finish(launched)

    def launch(self, plan):  # type: ignore[no-untyped-def]
        if self.fault.hit("launch"):
            raise RuntimeError("the device fell off the bus")
        return super().launch(plan)


class FaultyCopier(ThreadedCopier):
    fault: Fault

    def _take(self, copy: FakeCopy) -> None:
        if self.fault.hit("copy in" if copy.inward else "copy out"):
            copy.fail(DeviceLostText("the device fell off the bus"))
        else:
            super()._take(copy)


@asynccontextmanager
async def house_with(fault: Fault, store: ThreadedStore, lag: int, synchronous: bool) -> AsyncIterator[House]:
    pool, model = FakePool(N_PAGES, PAGE_TOKENS), FakeModel()
    slab = FakeSlab(12 + 3, CHUNK_TOKENS // PAGE_TOKENS, pool.page_bytes)
    engine, copier = FaultyEngine(pool, model, synchronous=synchronous), FaultyCopier(pool, slab)
    engine.fault = copier.fault = fault
    settings = SchedConfig(
        page_tokens=PAGE_TOKENS, chunk_tokens=CHUNK_TOKENS, n_pages=N_PAGES, context_tokens=1024, identity=IDENTITY,
        ram_slots=12, staging_slots=3, lag=lag, page_bytes=pool.page_bytes, max_rows=8,
    )  # fmt: skip
    core = Core(settings, store)
    with anyio.fail_after(120):
        async with Scheduler(core, engine, copier, store, slab.view, write_timeout_s=60.0) as scheduler:
            yield House(core, scheduler, engine, copier, store, model)
            core.check()
    state = scheduler.statistics()
    assert (state.violation, state.open_turns, state.duplicate_answers) == (None, 0, 0)
    assert state.totals.accepted == sum(state.totals.ended.values())
    assert state.totals.ended[EndReason.INTERNAL] == 0


def words(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=n)


@pytest.mark.anyio
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("lag", "synchronous"), SHAPES)
async def test_a_device_that_fails_at(point: str, lag: int, synchronous: bool) -> None:
    """Sessions 0-3 fill pool and RAM; then more of them and a return of session 0 until the fault strikes."""
    fault, store = Fault(point), ThreadedStore()
    try:
        async with house_with(fault, store, lag, synchronous) as house:
            for seed in range(4):
                await house.ask(words(seed, 40), 4, session=f"s{seed}", ignore_eos=True)
            await house.quiet()
            assert house.core.statistics().counters["spilled_chunks"] > 0
            fault.armed = True
            prompts = [words(0, 40), *(words(seed, 40) for seed in range(5, 9))]
            streams, refusals = [], set()
            for number, prompt in enumerate(prompts):
                try:
                    streams.append(await house.scheduler.submit(house.spec(prompt, 30, ignore_eos=True, session=f"n{number}")))
                except Refused as refused:
                    refusals.add(refused.refusal)
            assert refusals <= {Refusal.DEVICE_LOST}
            ends = [(await read(stream))[1] for stream in streams]
            assert fault.struck
            assert {end.reason for end in ends} <= {EndReason.DEVICE_ERROR, EndReason.LENGTH}
            assert any(end.reason is EndReason.DEVICE_ERROR for end in ends)
            assert "fell off the bus" in (house.scheduler.device_lost or "")
            with pytest.raises(Refused) as late:
                await house.scheduler.submit(house.spec(words(99, 9)))
            assert late.value.refusal is Refusal.DEVICE_LOST
            report = await house.scheduler.drain(60)
            assert (report.finished, report.left_behind) == (True, 0)
            counters = house.core.statistics().counters
            assert report.lost_pages == counters["lost_device_pages"] > 0
            assert report.lost_chunks == counters["lost_device_chunks"]
            assert store.keys()
        async with house_with(Fault("never"), store, lag, synchronous) as house:
            reports = [(await house.ask(words(seed, 40), 4, session=f"s{seed}", ignore_eos=True))[1] for seed in range(4)]
            assert sum(report.disk_tokens for report in reports) >= CHUNK_TOKENS
    finally:
        store.close()


@pytest.mark.anyio
async def test_a_copy_that_fails_without_losing_the_device_ends_nothing() -> None:
    """Only the type of the text says that the device is lost, whatever its words."""
    store = ThreadedStore()
    try:
        async with house_with(Fault("never"), store, 0, True) as house:
            take, house.copier._take = house.copier._take, lambda copy: copy.fail("device lost: no, only this copy")  # type: ignore[method-assign]
            for seed in range(4):
                await house.ask(words(seed, 40), 4, session=f"s{seed}", ignore_eos=True)
            assert house.core.statistics().counters["copy_failures"] > 0
            assert house.scheduler.device_lost is None
            house.copier._take = take  # type: ignore[method-assign]
    finally:
        store.close()


def test_walks_that_lose_the_device_and_restart() -> None:
    """Whatever was under way: turns end once, the drain ends, the disk serves the next process and holds no hole."""
    lost = restored = 0
    for seed in range(60):
        walk = Walk(seed)
        walk.lose_device, walk.drain = True, True
        rng = random.Random(seed)
        events = rng.randint(100, 700)
        try:
            while walk.world.n_events < events and walk._something():
                if walk.world.lost_device:
                    break
            if not walk.world.lost_device:
                walk.world.fail_device()
            lost += 1
            walk._come_to_rest()
            world = walk.world
            assert world.core.statistics().idle_pages == 0
            histories = [(a.history, a.secret) for a in walk.agents if len(a.history) > 1]
            if world.store is None:
                continue
            world.lost_device = False
            world.drained.clear()
            world.kill()
            for history, secret in histories:
                turn = world.submit(tuple(history)[: world.config.context_tokens // 2], secret=secret, max_tokens=2)
                world.settle()
                client = world.clients[turn]
                if client.ended is not None:
                    restored += client.ended.report.disk_tokens
            world.assert_quiet()
        except Exception as error:
            error.add_note(f"seed {seed}, {events} events")
            raise
    assert lost == 60
    assert restored > 0
