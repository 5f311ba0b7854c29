"""Case P35: a pool of 2.2 sessions, eight sessions, a slow disk. Something always moves, everybody ends, nobody is preempted
without end; and a stall would be seen."""

from __future__ import annotations

import random
import threading
import time
from queue import SimpleQueue

import anyio
import pytest
from fake_house import House, fake_house
from kvalet.sched.turns import EndReason
from kvalet.store.fake import FakeJob

pytestmark = pytest.mark.anyio

N_SESSIONS = 8
SYSTEM = tuple(range(1, 21))
PAGES_OF_2_2_SESSIONS = 66
"""A long session ends with about 120 tokens: 30 pages of 4 tokens."""

BEAT_S = 0.05


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


def words(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 97) for _ in range(n))


async def talk(house: House, number: int, n_turns: int, most_pause_s: float) -> int:
    """One agent with tool pauses; two of them begin large. The most preemptions that a turn of it had."""
    rng = random.Random(number)
    history = SYSTEM + words(rng, 60 if number < 2 else 10)
    most = 0
    for _ in range(n_turns):
        answer, report = await house.ask(history, 6, ignore_eos=True, session=f"agent-{number}")
        most = max(most, report.preemptions)
        if len(history) < 110:
            history += answer + words(rng, 2)
        await anyio.sleep(rng.random() * most_pause_s)
    return most


async def watch(house: House, over: anyio.Event) -> None:
    """Tokens + ended turns grow within 2 s; pages on their way to the disk are not free. Counted in beats of this task, not by
    the clock: where the whole machine pauses, nothing has stalled."""
    last, beats = -1, 0
    while not over.is_set():
        totals = house.scheduler.statistics().totals
        moved = totals.tokens_out + sum(totals.ended.values())
        last, beats = moved, beats + 1 if moved == last else 0
        assert beats * BEAT_S < 2.0, house.core.tell()[-4000:]
        pages = house.core.statistics().pages
        assert pages.free + pages.held + pages.leased_only == pages.total
        with anyio.move_on_after(BEAT_S):
            await over.wait()


class SlowWriter:
    """Before the fake store's queue: one writer that takes its time for each chunk, in order; reads do not wait behind it."""

    def __init__(self, jobs: SimpleQueue[FakeJob | None], delays_s: tuple[float, float]) -> None:
        self._jobs = jobs
        self._delays_s = delays_s
        self._rng = random.Random(35)
        self._free_at = 0.0
        self.get = jobs.get

    def put(self, job: FakeJob | None) -> None:
        if job is None or job.kind != "write":
            self._jobs.put(job)
            return
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + self._rng.uniform(*self._delays_s)
        timer = threading.Timer(self._free_at - now, self._jobs.put, (job,))
        timer.daemon = True
        timer.start()


async def pressure(n_turns: int, delays_s: tuple[float, float], most_pause_s: float, seconds: float, ram_slots: int) -> None:
    async with fake_house(n_pages=PAGES_OF_2_2_SESSIONS + 1, ram_slots=ram_slots, lag=1, seconds=seconds) as house:
        assert house.store is not None
        house.store._jobs = SlowWriter(house.store._jobs, delays_s)  # type: ignore[assignment]
        over, most = anyio.Event(), list[int]()

        async def one(number: int) -> None:
            most.append(await talk(house, number, n_turns, most_pause_s))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, house, over)
            async with anyio.create_task_group() as agents:
                for number in range(N_SESSIONS):
                    agents.start_soon(one, number)
            over.set()
        assert len(most) == N_SESSIONS
        assert max(most) <= 5
        totals = house.scheduler.statistics().totals
        assert totals.ended[EndReason.LENGTH] == totals.accepted == N_SESSIONS * n_turns
        assert totals.sums["ram_tokens"] + totals.sums["disk_tokens"] > 0
        assert totals.transfers["ram_to_disk"].done > 0
        await house.quiet()
        house.all_pages_are_back()


@pytest.mark.parametrize("ram_slots", [1, 4, 12])
async def test_pressure_on_a_slow_disk_is_no_stall(ram_slots: int) -> None:
    """P35 scaled: delays of 5 to 50 ms, pauses to 50 ms, 8 turns each."""
    await pressure(8, (0.005, 0.05), 0.05, 60, ram_slots)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ram_slots", [1, 12])
async def test_pressure_on_a_slow_disk_at_full_length(ram_slots: int) -> None:
    """P35: delays of 50 to 500 ms, pauses to 500 ms, 20 turns each, and again until ten minutes could have passed."""
    await pressure(20 * 12, (0.05, 0.5), 0.5, 800, ram_slots)


async def test_a_stall_would_be_seen() -> None:
    """P35: no step while a turn could go on is told in seconds; slow readers, idle times and running steps are none."""
    async with fake_house() as house:
        await house.ask(SYSTEM, 3, ignore_eos=True)
        with anyio.move_on_after(0.2):
            await anyio.Event().wait()
        assert house.scheduler.stalled_s() == 0.0
        house.engine.gate.clear()
        began = anyio.current_time()
        stream = await house.scheduler.submit(house.spec(SYSTEM, 3, ignore_eos=True))
        while house.scheduler.stalled_s() < 0.2:
            assert anyio.current_time() - began < 30
            await anyio.sleep(0.01)
        assert house.scheduler.stalled_s() <= anyio.current_time() - began + 0.1
        assert house.scheduler.statistics().stalled_s >= 0.2
        house.engine.gate.set()
        async for _ in stream:
            pass
        await house.quiet()
        assert house.scheduler.stalled_s() == 0.0
