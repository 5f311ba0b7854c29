"""Turns through the loop, the real core and the fakes: right answers, one end each, whatever readers and callers do."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from fake_house import House, fake_house, read
from kvalet.sched.errors import Refused
from kvalet.sched.turns import Ended, EndReason, Piece, Refusal

pytestmark = pytest.mark.anyio

SHAPES = [(0, True), (1, True), (0, False), (1, False)]
shapes = pytest.mark.parametrize(("lag", "synchronous"), SHAPES, ids=["lag0", "lag1", "lag0-queued", "lag1-queued"])


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def prompt(seed: int, n: int = 20) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 97) for _ in range(n))


@shapes
async def test_one_turn_after_another(lag: int, synchronous: bool) -> None:
    async with fake_house(lag=lag, synchronous=synchronous) as house:
        for seed in range(10):
            await house.ask(prompt(seed), 12, ignore_eos=True, seed=seed)
        await house.quiet()
        house.all_pages_are_back()
        totals = house.scheduler.statistics().totals
        assert totals.tokens_out == 120
        assert totals.gap_ms.count == 110
        assert totals.ended[EndReason.LENGTH] == 10


@shapes
async def test_200_turns_at_once(lag: int, synchronous: bool) -> None:
    async with fake_house(lag=lag, synchronous=synchronous) as house:
        async with anyio.create_task_group() as tasks:
            for seed in range(200):
                tasks.start_soon(house.ask, prompt(seed, 5 + seed % 40), 3 + seed % 12)
        await house.quiet()
        house.all_pages_are_back()
        assert house.scheduler.statistics().totals.accepted == 200


@shapes
@pytest.mark.parametrize("first", [0, 1])
async def test_callers_cancelled_after_any_number_of_turns_of_the_loop(lag: int, synchronous: bool, first: int) -> None:
    """In submit, in the queue, while its pages are restored, while it decodes: each turn ends, each page comes back."""

    async def ask(house: House, seed: int) -> None:
        async with await house.scheduler.submit(house.spec(prompt(seed, 40), 30)) as stream:
            await read(stream)

    async with fake_house(lag=lag, synchronous=synchronous) as house:
        for n_turns in range(first, 120, 2):
            async with anyio.create_task_group() as tasks:
                for seed in range(4):  # the same prompts again and again: some restore, some share
                    tasks.start_soon(ask, house, (n_turns + seed) % 9)
                for _ in range(n_turns):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        await house.quiet()
        house.all_pages_are_back()
        await house.ask(prompt(1, 40), 30)
        assert house.scheduler.statistics().totals.ended[EndReason.CANCELLED] > 0


async def test_a_stream_that_is_dropped_unread_ends_its_turn() -> None:
    async with fake_house() as house:
        for seed in range(8):
            stream = await house.scheduler.submit(house.spec(prompt(seed), 900, ignore_eos=True))
            assert stream.ended is None
            del stream
        gc.collect()
        await house.quiet()
        house.all_pages_are_back()
        assert house.scheduler.statistics().totals.ended[EndReason.CANCELLED] == 8


@shapes
async def test_a_slow_reader_pauses_and_everybody_else_goes_on(lag: int, synchronous: bool) -> None:
    async with fake_house(lag=lag, synchronous=synchronous) as house:
        spec = house.spec(prompt(99), 60, ignore_eos=True, stream_pieces=4)
        slow = await house.scheduler.submit(spec)
        await house.scheduler._ticker.until(lambda: house.scheduler.statistics().blocked_turns == 1, 10)
        for seed in range(6):
            await house.ask(prompt(seed), 20)
        state = slow.statistics()
        assert state.blocked
        assert state.waiting_pieces == 4
        assert state.merged <= 20  # what was in flight when the channel was full; all that is left would be 56
        assert house.core.statistics().turns["paused"] + house.core.statistics().turns["queued"] == 1
        ids, ended = await read(slow)
        assert (ids, ended.reason) == house.right(spec)
        await house.quiet()
        house.all_pages_are_back()


async def test_nobody_reads_until_the_write_timeout() -> None:
    async with fake_house(write_timeout_s=0.05) as house:
        stalled = [await house.scheduler.submit(house.spec(prompt(i), 500, ignore_eos=True, stream_pieces=2)) for i in range(3)]
        await house.quiet()
        house.all_pages_are_back()
        assert house.scheduler.statistics().blocked_turns == 0
        for stream in stalled:
            assert (await read(stream))[1].reason is EndReason.WRITE_TIMEOUT


@shapes
async def test_leaving_with_work_in_flight_ends_everything_once(lag: int, synchronous: bool) -> None:
    async with fake_house(lag=lag, synchronous=synchronous) as house:
        streams = [
            await house.scheduler.submit(house.spec(prompt(seed, 30), 200, ignore_eos=True, stream_pieces=16))
            for seed in range(30)
        ]
    for stream in streams:
        items = [item async for item in stream]
        assert [item.reason for item in items if isinstance(item, Ended)] == [EndReason.SHUTDOWN]
        assert isinstance(items[-1], Ended)


@shapes
async def test_a_lost_device_ends_everything_once(lag: int, synchronous: bool) -> None:
    async with fake_house(lag=lag, synchronous=synchronous) as house:
        house.engine.fail_at = 12
        house.engine.gate.clear()
        told = asyncio.Event()
        house.scheduler.on_device_lost = lambda _: told.set()
        streams = [await house.scheduler.submit(house.spec(prompt(s, 30), 200, ignore_eos=True)) for s in range(20)]
        house.engine.gate.set()
        ends = Counter([(await read(stream))[1].reason for stream in streams])
        assert ends == {EndReason.DEVICE_ERROR: 20}
        await told.wait()
        assert "fell off the bus" in (house.scheduler.device_lost or "")
        with pytest.raises(Refused) as refused:
            await house.scheduler.submit(house.spec(prompt(0)))
        assert refused.value.refusal is Refusal.DEVICE_LOST
        report = await house.scheduler.drain(10)
        assert report.finished


async def test_drain_lets_turns_end_saves_them_and_refuses_new_ones() -> None:
    async with fake_house() as house:
        specs = [house.spec(prompt(seed, 30), 20, ignore_eos=True) for seed in range(5)]
        streams = [await house.scheduler.submit(spec) for spec in specs]
        async with anyio.create_task_group() as tasks:
            reports: list[Any] = []

            async def drain() -> None:
                reports.append(await house.scheduler.drain(20))

            tasks.start_soon(drain)
            for spec, stream in zip(specs, streams, strict=True):
                ids, ended = await read(stream)
                assert (ids, ended.reason) == house.right(spec)
        assert (reports[0].finished, reports[0].left_behind) == (True, 0)
        assert house.store is not None
        assert len(house.store.keys()) >= 5
        with pytest.raises(Refused) as refused:
            await house.scheduler.submit(house.spec(prompt(0)))
        assert refused.value.refusal is Refusal.CLOSING


async def test_drain_ends_what_does_not_end_by_itself_at_the_deadline() -> None:
    async with fake_house() as house:
        stream = await house.scheduler.submit(house.spec(prompt(0), 900, ignore_eos=True, stream_pieces=2))
        began = house.scheduler.now()
        report = await house.scheduler.drain(0.1)
        assert report.finished
        assert house.scheduler.now() - began >= 0.1
        assert (await read(stream))[1].reason is EndReason.SHUTDOWN


async def test_what_can_never_fit_and_a_full_queue_are_refused() -> None:
    async with fake_house(n_pages=9, queue_limit=3, max_rows=1) as house:
        with pytest.raises(Refused) as refused:
            await house.scheduler.submit(house.spec(prompt(0, 33)))
        assert refused.value.refusal is Refusal.NEVER_FITS
        house.engine.gate.clear()
        streams = [await house.scheduler.submit(house.spec(prompt(seed, 25), 4)) for seed in range(4)]
        with pytest.raises(Refused) as refused:
            await house.scheduler.submit(house.spec(prompt(9, 25), 4))
        assert refused.value.refusal is Refusal.QUEUE_FULL
        assert refused.value.retry_after_s > 0
        house.engine.gate.set()
        for stream in streams:
            assert (await read(stream))[1].reason in (EndReason.STOP, EndReason.LENGTH)


async def test_closing_a_session_ends_its_turns_and_a_fork_shares_its_pages() -> None:
    async with fake_house() as house:
        first, _ = await house.ask(prompt(0, 32), 8, session="parent", ignore_eos=True)
        house.scheduler.fork_session("parent", "child")
        _, report = await house.ask(prompt(0, 32) + first, 8, session="child", ignore_eos=True)
        assert report.resident_tokens >= 32
        stream = await house.scheduler.submit(house.spec(prompt(1), 900, session="child", ignore_eos=True))
        house.scheduler.close_session("child")
        assert (await read(stream))[1].reason is EndReason.CANCELLED


async def test_pieces_come_while_the_turn_runs() -> None:
    async with fake_house() as house:
        stream = await house.scheduler.submit(house.spec(prompt(0), 500, ignore_eos=True, stream_pieces=8))
        item = await anext(stream)
        assert isinstance(item, Piece)
        assert len(item.ids) == 1
        assert stream.ended is None
        stream.close()
        items = [item async for item in stream]
        assert [type(item) for item in items] == [Ended]
