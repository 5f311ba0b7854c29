"""The channel of a turn: bounded, one end, blocked and unblocked, write timeout, abandoned readers."""

from __future__ import annotations

import asyncio
import gc
import random
import time

import anyio
import pytest
from kvalet.runtime.plan import TokenLogprob
from kvalet.sched.errors import StreamBusy
from kvalet.sched.streams import Channel, Item, TurnStream, join
from kvalet.sched.turns import Ended, EndReason, Piece, TurnId, TurnReport

pytestmark = pytest.mark.anyio

END = Ended(EndReason.STOP, TurnReport())


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


class Told:
    """What the channel told the scheduler, in order."""

    def __init__(self) -> None:
        self.signals: list[str] = []
        self.heard = asyncio.Event()

    def _note(self, word: str) -> None:
        self.signals.append(word)
        self.heard.set()

    def blocked(self, turn: TurnId) -> None:
        self._note("blocked")

    def unblocked(self, turn: TurnId) -> None:
        self._note("unblocked")

    def cancel(self, turn: TurnId, reason: EndReason) -> None:
        self._note(f"cancel {reason}")

    def abandoned(self, channel: Channel) -> None:
        self._note("abandoned")


def piece(i: int) -> Piece:
    return Piece((i,), f"<{i}>", (TokenLogprob(i, -0.5),))


def open_channel(capacity: int = 4, timeout_s: float = 60.0) -> tuple[Channel, Told]:
    told = Told()
    return Channel(TurnId(1), capacity, timeout_s, asyncio.get_running_loop(), time.monotonic, told), told


async def read_all(stream: TurnStream) -> list[Item]:
    return [item async for item in stream]


async def test_pieces_in_order_then_exactly_one_end() -> None:
    channel, told = open_channel()
    stream = TurnStream(channel)
    channel.put(piece(1))
    channel.put(piece(2))
    channel.finish(END)
    channel.finish(Ended(EndReason.INTERNAL, TurnReport()))  # the first end stands
    channel.put(piece(3))  # nothing comes after the end
    assert await read_all(stream) == [piece(1), piece(2), END]
    assert await read_all(stream) == []
    assert told.signals == []
    assert channel.statistics().discarded == 1


async def test_a_waiting_reader_gets_each_piece_as_it_comes() -> None:
    channel, _ = open_channel()
    stream = TurnStream(channel)
    got: list[Item] = []
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                async for item in stream:
                    got.append(item)

            tasks.start_soon(read)
            for i in range(3):
                await anyio.wait_all_tasks_blocked()
                assert len(got) == i
                channel.put(piece(i))
            await anyio.wait_all_tasks_blocked()
            channel.finish(END)
    assert got == [piece(0), piece(1), piece(2), END]


async def test_surplus_is_merged_and_nothing_is_lost() -> None:
    channel, told = open_channel(capacity=4)
    stream = TurnStream(channel)
    for i in range(100):
        channel.put(piece(i))
        assert channel.statistics().waiting_pieces <= 4
    assert told.signals == ["blocked"]
    channel.finish(END)
    items = await read_all(stream)
    assert len(items) == 5
    assert items[-1] == END
    whole = Piece((), "")
    for item in items[:-1]:
        assert isinstance(item, Piece)
        whole = join(whole, item)
    assert whole.ids == tuple(range(100))
    assert whole.text == "".join(f"<{i}>" for i in range(100))
    assert [entry.token_id for entry in whole.logprobs] == list(range(100))


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 7, 256])
async def test_unblocked_below_half_and_blocked_again_when_full(capacity: int) -> None:
    channel, told = open_channel(capacity)
    for i in range(capacity):
        assert told.signals == []
        channel.put(piece(i))
    assert told.signals == ["blocked"]
    for left in range(capacity - 1, -1, -1):
        assert channel.take() == piece(capacity - 1 - left)
        assert told.signals == (["blocked", "unblocked"] if 2 * left < capacity else ["blocked"]), left
    for i in range(capacity):
        channel.put(piece(i))
    assert told.signals == ["blocked", "unblocked", "blocked"]


@pytest.mark.parametrize("seed", range(20))
async def test_any_interleaving_of_put_and_take_keeps_the_text(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([1, 2, 5, 16])
    channel, told = open_channel(capacity)
    put = taken = 0
    for _ in range(500):
        if rng.random() < 0.5:
            channel.put(piece(put))
            put += 1
        else:
            item = channel.take()
            if isinstance(item, Piece):
                assert item.ids == tuple(range(taken, taken + len(item.ids))), f"{seed=}"
                taken += len(item.ids)
        assert channel.statistics().waiting_pieces <= capacity
    assert [word for word in told.signals if word == "blocked"] or capacity == 16
    for before, after in zip(told.signals, told.signals[1:], strict=False):
        assert {before, after} == {"blocked", "unblocked"}, f"{seed=}"


async def test_the_end_of_a_full_channel_is_not_lost_and_unblocks_nobody() -> None:
    channel, told = open_channel(capacity=2)
    channel.put(piece(0))
    channel.put(piece(1))
    channel.finish(END)
    assert await read_all(TurnStream(channel)) == [piece(0), piece(1), END]
    assert told.signals == ["blocked"]


async def test_a_cancelled_read_takes_nothing() -> None:
    channel, told = open_channel()
    stream = TurnStream(channel)
    for _ in range(3):
        with anyio.move_on_after(0.01):
            await anext(stream)
    channel.put(piece(0))
    with anyio.CancelScope() as scope:
        scope.cancel()
        assert await anext(stream) == piece(0)
    got: list[Item] = []

    async def read() -> None:
        got.append(await anext(stream))

    with anyio.fail_after(5):
        reader = asyncio.ensure_future(read())
        await anyio.wait_all_tasks_blocked()
        channel.put(piece(1))
        reader.cancel()  # in the very moment in which the piece wakes the reader
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert got == []
        assert await anext(stream) == piece(1)
    assert told.signals == []


async def test_two_readers_at_once_are_an_error_and_the_first_keeps_its_place() -> None:
    channel, _ = open_channel()
    stream = TurnStream(channel)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            first: list[Item] = []

            async def read() -> None:
                first.append(await anext(stream))

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(StreamBusy):
                await anext(stream)
            channel.put(piece(0))
    assert first == [piece(0)]


async def test_nobody_reads_for_the_write_timeout() -> None:
    channel, told = open_channel(capacity=1, timeout_s=0.05)
    stream = TurnStream(channel)
    began = time.monotonic()
    channel.put(piece(0))
    told.heard.clear()
    with anyio.fail_after(5):
        await told.heard.wait()
    assert told.signals == ["blocked", "cancel write_timeout"]
    assert time.monotonic() - began >= 0.05
    channel.finish(Ended(EndReason.WRITE_TIMEOUT, TurnReport()))
    items = await read_all(stream)
    assert isinstance(items[-1], Ended)
    assert items[-1].reason is EndReason.WRITE_TIMEOUT


async def test_each_read_puts_the_write_timeout_off() -> None:
    now = 100.0
    told = Told()
    channel = Channel(TurnId(1), 8, 0.02, asyncio.get_running_loop(), lambda: now, told)
    for i in range(8):
        channel.put(piece(i))
    now += 0.019
    channel.take()  # seven of eight wait: still blocked, but the reader lives
    now += 0.019
    told.heard.clear()
    with anyio.move_on_after(0.06):  # the timer fires, sees that the time since the last read is too short, and waits on
        await told.heard.wait()
    assert told.signals == ["blocked"]
    now += 1.0
    with anyio.fail_after(5):
        await told.heard.wait()
    assert told.signals == ["blocked", "cancel write_timeout"]


async def test_no_timeout_after_unblock_close_or_end() -> None:
    for way in ("unblock", "close", "end"):
        channel, told = open_channel(capacity=1, timeout_s=0.01)
        channel.put(piece(0))
        if way == "unblock":
            channel.take()
        elif way == "close":
            channel.close()
        else:
            channel.finish(END)
        told.heard.clear()
        with anyio.move_on_after(0.05):
            await told.heard.wait()
        assert "cancel write_timeout" not in told.signals, way


async def test_close_is_idempotent_drops_what_waits_and_the_end_still_comes() -> None:
    channel, told = open_channel()
    stream = TurnStream(channel)
    channel.put(piece(0))
    channel.put(piece(1))
    stream.close()
    stream.close()
    assert told.signals == ["cancel cancelled"]
    channel.put(piece(2))
    assert channel.statistics().waiting_pieces == 0
    assert channel.statistics().discarded == 3
    channel.finish(Ended(EndReason.CANCELLED, TurnReport()))
    assert await read_all(stream) == [Ended(EndReason.CANCELLED, TurnReport())]


async def test_close_after_the_end_cancels_nothing() -> None:
    channel, told = open_channel()
    async with TurnStream(channel) as stream:
        channel.finish(END)
        assert stream.ended == END
    assert told.signals == []


async def test_leaving_the_context_closes() -> None:
    channel, told = open_channel()
    async with TurnStream(channel):
        channel.put(piece(0))
    assert told.signals == ["cancel cancelled"]


async def test_a_stream_that_nobody_holds_any_more_is_told() -> None:
    channel, told = open_channel()
    stream = TurnStream(channel)
    channel.put(piece(0))
    del stream
    gc.collect()
    assert told.signals == ["abandoned"]


async def test_a_stream_read_to_its_end_goes_without_a_word() -> None:
    channel, told = open_channel()
    channel.finish(END)
    assert await read_all(TurnStream(channel)) == [END]
    gc.collect()
    assert told.signals == []


async def test_a_reader_task_that_is_cancelled_abandons_its_stream() -> None:
    channel, told = open_channel()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_all, TurnStream(channel))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    gc.collect()
    assert told.signals == ["abandoned"]


async def test_repr_says_how_it_stands() -> None:
    channel, _ = open_channel(capacity=1)
    stream = TurnStream(channel)
    assert repr(stream) == "<TurnStream turn=1 open waiting=0/1>"
    channel.put(piece(0))
    assert repr(stream) == "<TurnStream turn=1 blocked waiting=1/1>"
    channel.finish(END)
    assert repr(stream) == "<TurnStream turn=1 ended waiting=1/1>"
