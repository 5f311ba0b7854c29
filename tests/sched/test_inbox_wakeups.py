"""Inbox, wake-ups and lag meter, on both event loops."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import anyio
import anyio.lowlevel
import pytest
from kvalet.sched.events import Event, Tick
from kvalet.sched.inbox import Inbox
from kvalet.sched.lag_meter import LagMeter
from kvalet.sched.wakeups import Wakeups

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


class Ticks:
    """Takes everything from its inbox at each wake-up, at most ``bound`` at a time."""

    def __init__(self, bound: int = 1_000_000) -> None:
        self.bound = bound
        self.count = 0
        self.events: list[Event] = []
        self.changed = asyncio.Event()
        self.inbox = Inbox(asyncio.get_running_loop(), self.tick)

    def tick(self) -> None:
        self.count += 1
        self.inbox.begin()
        for _ in range(self.bound):
            posting = self.inbox.take()
            if posting is None:
                break
            event = posting(float(self.count))
            if event is not None:
                self.events.append(event)
        if len(self.inbox):
            self.inbox.arm()
        self.changed.set()

    async def until(self, n_events: int) -> None:
        with anyio.fail_after(10):
            while len(self.events) < n_events:
                self.changed.clear()
                await self.changed.wait()


async def test_many_postings_one_wake_up() -> None:
    ticks = Ticks()
    for _ in range(100):
        ticks.inbox.post_local(Tick)
        ticks.inbox.post(Tick)
    await ticks.until(200)
    assert ticks.count == 1


async def test_urgent_postings_go_first_and_the_rest_keeps_its_order() -> None:
    inbox = Inbox(asyncio.get_running_loop(), lambda: None)
    said: list[int] = []
    for number, urgent in ((1, False), (2, True), (3, False), (4, True)):
        inbox.post(lambda now, number=number: said.append(number), urgent=urgent)  # type: ignore[misc]
    assert len(inbox) == 4
    urgent_ones = 0
    while (posting := inbox.take()) is not None:
        posting(0.0)
        urgent_ones += inbox.urgent
    assert said == [2, 4, 1, 3]
    assert urgent_ones == 1
    inbox.post(lambda now: None, urgent=True)
    inbox.close()
    assert len(inbox) == 0


async def test_a_bounded_tick_lets_the_loop_run_in_between() -> None:
    ticks = Ticks(bound=10)
    others = 0

    def other() -> None:
        nonlocal others
        others += 1
        if len(ticks.events) < 100:
            asyncio.get_running_loop().call_soon(other)

    for _ in range(100):
        ticks.inbox.post_local(Tick)
    other()
    await ticks.until(100)
    assert ticks.count == 10
    assert others >= 9


async def test_threads_lose_nothing_and_each_keeps_its_order() -> None:
    ticks = Ticks()
    n_threads, n_each = 8, 2000

    def work(thread: int) -> None:
        for i in range(n_each):
            ticks.inbox.post(lambda _now, i=i: Tick(thread * n_each + i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    await ticks.until(n_threads * n_each)
    for thread in threads:
        thread.join(5)
    numbers = [int(event.now) for event in ticks.events]
    assert sorted(numbers) == list(range(n_threads * n_each))
    for thread_no in range(n_threads):
        own = [number for number in numbers if number // n_each == thread_no]
        assert own == sorted(own)


async def test_a_request_leaves_no_context_in_the_tick() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    seen: list[str] = []
    ticks = Ticks()

    def look(_now: float) -> None:
        seen.append(variable.get())

    variable.set("a request's")
    ticks.inbox.post_local(look)
    ticks.inbox.post_local(Tick)
    await ticks.until(1)
    assert seen == ["none"]


async def test_a_closed_inbox_takes_nothing() -> None:
    ticks = Ticks()
    ticks.inbox.post_local(Tick)
    ticks.inbox.close()
    ticks.inbox.post(Tick)
    ticks.inbox.post_local(Tick)
    assert len(ticks.inbox) == 0
    assert "closed" in repr(ticks.inbox)


@pytest.mark.parametrize("how", ["post", "post after the wake-up was refused"])
def test_posting_to_a_loop_that_has_gone_is_no_error(how: str) -> None:
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop, lambda: None)
    loop.close()
    inbox.post(Tick)
    inbox.post(Tick)
    assert "closed" in repr(inbox)


async def test_wake_ups_come_in_order_and_never_early() -> None:
    woken: list[float] = []
    asked: list[float] = []
    done = asyncio.Event()

    def due() -> None:
        woken.append(time.monotonic())
        if len(wakeups) == 0:
            done.set()

    wakeups = Wakeups(asyncio.get_running_loop(), time.monotonic, due)
    for delay in (0.05, 0.01, 0.03, 0.01, 0.0, -1.0):
        asked.append(time.monotonic() + delay)
        wakeups.at(asked[-1])
    with anyio.fail_after(5):
        await done.wait()
    assert 1 <= len(woken) <= len(asked)
    for moment in asked:  # each wish was followed by a wake-up at or after it
        assert any(time_woken >= moment for time_woken in woken)
    assert woken[-1] >= asked[0]


async def test_wishes_are_bounded_by_the_horizon() -> None:
    wakeups = Wakeups(asyncio.get_running_loop(), time.monotonic, lambda: None)
    base = time.monotonic() + 10
    for i in range(10_000):
        wakeups.at(base + i * 1e-6)
    assert len(wakeups) <= 12
    wakeups.close()
    assert len(wakeups) == 0


async def test_an_early_timer_is_set_again() -> None:
    now = 0.0
    fired = asyncio.Event()
    wakeups = Wakeups(asyncio.get_running_loop(), lambda: now, fired.set)
    wakeups.at(0.02)
    with anyio.move_on_after(0.06):
        await fired.wait()
    assert not fired.is_set()  # the loop's timers fired, but the clock says that it is not time yet
    now = 0.02
    with anyio.fail_after(5):
        await fired.wait()


async def test_the_lag_meter_sees_a_blocked_loop_and_forgets_on_request() -> None:
    meter = LagMeter(asyncio.get_running_loop())
    meter.start()
    meter.start()

    async def beats(n: int) -> None:
        seen = meter.beats
        with anyio.fail_after(10):
            while meter.beats < seen + n:
                await anyio.lowlevel.checkpoint()

    await beats(3)
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:  # what a careless callback does
        pass
    await beats(3)
    assert 90 <= meter.statistics().window.maximum <= 10_000
    assert meter.statistics().total.maximum == meter.statistics().window.maximum
    meter.reset_window()
    assert meter.statistics().window.count == 0
    assert meter.statistics().total.maximum >= 90
    await beats(3)
    assert meter.statistics().window.count >= 3
    meter.stop()
    meter.stop()
