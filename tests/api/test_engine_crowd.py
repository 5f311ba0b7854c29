"""Many clients of one engine at once, each free to leave at any moment: real core and loop, a fake model, tiers in use.

Every turn that was accepted ends exactly once, every answer that was read to its end is the right one, and when all have gone
nothing runs and every page is free or idle."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from bytetokens import byte_tokenizer
from fake_house import CHUNK_TOKENS, IDENTITY, PAGE_TOKENS, GatedEngine, ThreadedCopier, ThreadedStore
from kvalet.api.build import Parts
from kvalet.api.config import EngineConfig
from kvalet.api.engine import Engine
from kvalet.api.errors import ApiError
from kvalet.api.memory_plan import MemoryPlan
from kvalet.api.prompts import Prompts
from kvalet.api.requests import ChatRequest, TurnEnd
from kvalet.api.session import Session
from kvalet.api.template import ChatTemplate
from kvalet.runtime.fake import FakePool, FakeSlab
from kvalet.runtime.fake_model import FakeModel
from kvalet.runtime.plan import EndedBy, SamplingParams
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.turns import EndReason

TOKENIZER = byte_tokenizer()
SOURCE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant "
N_PAGES = 97
RAM_SLOTS, STAGING_SLOTS = 4, 3
CONTEXT_TOKENS = 4 * N_PAGES
SYSTEM = {"role": "system", "content": "All agents share this text, page by page."}
FINISH = {EndedBy.STOP: "stop", EndedBy.LENGTH: "length"}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


class FakeDisk(ThreadedStore):
    """With the few things that the engine asks of a store beside its port."""

    secret = b"s" * 32

    def statistics(self) -> dict[str, int]:
        return {"files": len(self.entries)}


class Crowd:
    """The parts of one engine, kept so that the tests can look at them."""

    def __init__(self, *, lag: int) -> None:
        pool = FakePool(N_PAGES, PAGE_TOKENS)
        self.model = FakeModel()
        self.slab = FakeSlab(RAM_SLOTS + STAGING_SLOTS, CHUNK_TOKENS // PAGE_TOKENS, pool.page_bytes)
        self.engine = GatedEngine(pool, self.model, synchronous=lag == 0)
        self.copier = ThreadedCopier(pool, self.slab)
        self.store = FakeDisk()
        settings = SchedConfig(
            page_tokens=PAGE_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            n_pages=N_PAGES,
            context_tokens=CONTEXT_TOKENS,
            identity=IDENTITY,
            ram_slots=RAM_SLOTS,
            staging_slots=STAGING_SLOTS,
            page_bytes=pool.page_bytes,
            max_rows=6,
            lag=lag,
            queue_limit=16,
        )
        self.core = Core(settings, self.store)

    def parts(self, config: EngineConfig, progress: Any) -> Parts:
        template = ChatTemplate(SOURCE, list(TOKENIZER.control_ids))
        return Parts(
            core=self.core,
            step_engine=self.engine,
            copier=self.copier,
            store=self.store,  # type: ignore[arg-type] # the parts of it that are used
            slot_view=self.slab.view,
            tokenizer=TOKENIZER,
            prompts=Prompts(TOKENIZER, None, template, context_tokens=CONTEXT_TOKENS),
            plan=MemoryPlan(N_PAGES, 4 * (N_PAGES - 1), 0, 0, RAM_SLOTS, 0, STAGING_SLOTS, 0, 0),
            model_id="fake",
            context_tokens=CONTEXT_TOKENS,
            created=0,
            banner=(),
            close=self.store.close,
        )


@asynccontextmanager
async def crowd(*, lag: int = 0) -> AsyncIterator[tuple[Engine, Crowd]]:
    made = Crowd(lag=lag)
    with anyio.fail_after(120):
        async with Engine(EngineConfig(), builder=made.parts) as engine:
            yield engine, made


class Client:
    """One agent with a growing history. ``outcomes`` counts how its turns went; a wrong answer fails at once."""

    def __init__(self, engine: Engine, model: FakeModel, name: int, rng: random.Random) -> None:
        self.engine, self.model, self.rng = engine, model, rng
        self.session = engine.session(f"agent-{name}")
        self.history = [SYSTEM, {"role": "user", "content": f"I am {name}."}]
        self.outcomes: Counter[str] = Counter()

    async def live(self, turns: int) -> None:
        for _ in range(turns):
            try:
                await self.rng.choice([self.read, self.read, self.read, self.cancel, self.drop, self.be_cancelled, self.fork])()
            except ApiError as refused:
                if refused.status not in (400, 429):
                    raise
                self.outcomes[f"refused {refused.code}"] += 1
                if refused.code == "context_length_exceeded":
                    self.history = self.history[:2]
        if self.rng.random() < 0.5:
            await self.session.close()

    def turn(self, session: Session | None = None) -> Any:
        return (session or self.session).turn(self.history, max_tokens=self.rng.randrange(1, 12))

    async def read(self, session: Session | None = None) -> None:
        turn = self.turn(session)
        ends = [item async for item in turn if isinstance(item, TurnEnd)]
        assert len(ends) == 1, "exactly one end"
        self.check(ends[0], turn._request.params)
        if session is None:
            self.history += [{"role": "assistant", "content": ends[0].text}, {"role": "user", "content": "Go on."}]

    def check(self, end: TurnEnd, params: SamplingParams) -> None:
        ids, ended = self.model.continuation(end.prompt_ids, params)
        left = CONTEXT_TOKENS - len(end.prompt_ids)
        if len(ids) >= left:  # the context ended it
            ids, ended = ids[:left], EndedBy.LENGTH
        assert (end.ids, end.finish_reason) == (ids, FINISH[ended]), end
        report = end.report
        assert report.computed_tokens + report.resident_tokens + report.ram_tokens + report.disk_tokens == report.prompt_tokens
        self.outcomes["right"] += 1
        self.outcomes["restored"] += bool(report.ram_tokens or report.disk_tokens)

    async def cancel(self) -> None:
        turn = self.turn()
        stop_after = self.rng.randrange(3)
        ends = []
        read = 0
        if stop_after == 0:
            turn.cancel()
        async for item in turn:
            read += 1
            if read == stop_after:
                turn.cancel()
            if isinstance(item, TurnEnd):
                ends.append(item.reason)
        assert len(ends) == 1
        self.outcomes[f"cancelled: {ends[0]}"] += 1

    async def drop(self) -> None:
        turn = self.turn()
        await anext(turn)
        del turn
        self.outcomes["dropped"] += 1

    async def be_cancelled(self) -> None:
        with anyio.move_on_after(self.rng.random() * 0.01):
            await self.turn().result()
        self.outcomes["task cancelled"] += 1

    async def fork(self) -> None:
        child = self.session.fork()
        await self.read(child)
        await child.close()


async def settled(engine: Engine) -> None:
    """Until no turn is open and nothing moves: what was dropped is cancelled by garbage collection, at the next ticks."""
    gc.collect()
    scheduler = engine._scheduler
    assert scheduler is not None

    def quiet() -> bool:
        state = scheduler.statistics()
        return not (state.open_turns or state.steps_in_flight or state.transfers_in_flight or state.waiting_postings)

    assert await scheduler._ticker.until(quiet, 30), scheduler.statistics()


@pytest.mark.anyio
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(4))
async def test_a_crowd_that_comes_and_goes(seed: int, lag: int) -> None:
    async with crowd(lag=lag) as (engine, made):
        clients = [Client(engine, made.model, name, random.Random(f"{seed}/{name}")) for name in range(14)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.live(8))
        await settled(engine)
        made.core.check()
        state = engine.statistics().scheduler
        assert state.violation is None, (seed, lag)
        assert state.totals.accepted == sum(state.totals.ended.values())
        assert state.totals.ended[EndReason.INTERNAL] == 0
        pages = state.core.pages
        assert pages.leased_only == 0
        assert pages.free + state.core.idle_pages == pages.total
        total: Counter[str] = sum((client.outcomes for client in clients), Counter())
        assert total["right"] >= 20, total
        assert total["restored"] >= 1, total
        assert total["dropped"] + total["task cancelled"] >= 5, total


@pytest.mark.anyio
async def test_the_pool_decides_what_can_never_fit() -> None:
    async with crowd() as (engine, _):
        with pytest.raises(ApiError, match="maximum context length is") as caught:
            await engine.session().turn([SYSTEM, {"role": "user", "content": "x" * 370}], max_tokens=1).result()
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.anyio
async def test_a_full_queue_is_a_429() -> None:
    async with crowd() as (engine, made):
        made.engine.gate.clear()
        waiting = [asyncio.ensure_future(engine.session().turn([SYSTEM], max_tokens=2).result()) for _ in range(40)]
        try:
            done, _ = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_EXCEPTION)
            refused = [task.exception() for task in done]
            assert refused
            assert all(isinstance(error, ApiError) and error.status == 429 and error.retry_after_s > 0 for error in refused)
        finally:
            made.engine.gate.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, (ApiError, TurnEnd)) for result in results)
        assert sum(isinstance(result, TurnEnd) for result in results) >= 16


@pytest.mark.anyio
async def test_a_device_that_fails_ends_every_turn_once() -> None:
    async with crowd() as (engine, made):
        lost: list[str] = []
        engine.on_device_lost = lost.append
        made.engine.gate.clear()
        made.engine.fail_at = 5
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        turns = [await engine.start_chat(ChatRequest((SYSTEM, {"role": "user", "content": str(n)}), params)) for n in range(5)]
        made.engine.gate.set()
        ends = await asyncio.gather(*(turn.result() for turn in turns))
        assert {end.reason for end in ends} == {EndReason.DEVICE_ERROR}
        assert engine.ready()[0] is False
        assert len(lost) == 1
        with pytest.raises(ApiError) as caught:
            await engine.session().turn([SYSTEM], max_tokens=1).result()
        assert (caught.value.status, caught.value.code) == (503, "device_lost")


@pytest.mark.anyio
async def test_drained_sessions_are_on_the_disk() -> None:
    async with crowd() as (engine, made):
        client = Client(engine, made.model, 1, random.Random(1))
        await client.read()
        report = await engine.drain(10)
        assert (report.finished, report.left_behind) == (True, 0)
        assert made.store.keys()
        assert engine.ready() == (False, "draining")
        with pytest.raises(ApiError) as caught:
            await client.read()
        assert caught.value.status == 503
