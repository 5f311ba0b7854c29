"""Sessions that leave the device and come back, through loop, core and fakes: right answers from RAM and disk, whatever the
disk does; turns that need no disk do not wait for it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import anyio
import pytest
from fake_house import House, fake_house, read
from kvalet.sched.stats import Tier
from kvalet.sched.turns import EndReason
from kvalet.store.fake import FakeJob

pytestmark = pytest.mark.anyio

SYSTEM = tuple(range(1, 21))
"""What all sessions begin with."""


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def words(seed: int, n: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 97) for _ in range(n))


async def converse(house: House, number: int, n_turns: int, grow: int = 6) -> None:
    """One agent: each turn sends the whole history and a little more."""
    history = SYSTEM + words(1000 + number, 10)
    for turn in range(n_turns):
        answer, report = await house.ask(history, 8, ignore_eos=True, session=f"agent-{number}")
        assert report.prompt_tokens == len(history)
        assert report.computed_tokens + report.resident_tokens + report.ram_tokens + report.disk_tokens == len(history)
        history += answer + words(10 * number + turn, grow)


@pytest.mark.parametrize("lag", [0, 1])
async def test_twelve_sessions_of_five_turns_on_a_tiny_pool(lag: int) -> None:
    """The main job, small: 12 agents whose history is about 100 tokens each on a pool of 160 tokens and 6 slots of RAM."""
    async with fake_house(n_pages=41, ram_slots=6, lag=lag) as house:
        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(converse, house, number, 5)
        await house.quiet()
        house.all_pages_are_back()
        totals = house.scheduler.statistics().totals
        assert totals.ended[EndReason.LENGTH] == totals.accepted == 60
        assert totals.sums["ram_tokens"] > 0
        assert totals.sums["disk_tokens"] > 0
        assert totals.tiers[Tier.DISK] > 0
        assert totals.ttft_ms[Tier.DISK].count == totals.tiers[Tier.DISK]
        assert totals.transfers["ram_to_disk"].n_bytes > 0
        # with nothing kept, every turn would have computed its whole prompt
        assert totals.sums["computed_tokens"] < 0.7 * totals.sums["prompt_tokens"]


async def test_what_was_drained_is_found_by_the_next_process() -> None:
    """The same store behind a new scheduler with an empty pool and empty RAM."""
    history = SYSTEM + words(7, 30)
    async with fake_house() as first:
        answer, _ = await first.ask(history, 8, ignore_eos=True, session="s")
        report = await first.scheduler.drain(20)
        assert (report.finished, report.left_behind) == (True, 0)
        assert first.store is not None
        entries = dict(first.store.entries)
    async with fake_house() as second:
        assert second.store is not None
        second.store.entries.update(entries)
        _, kv = await second.ask(history + answer + (5, 6), 8, ignore_eos=True, session="s")
        assert kv.disk_tokens >= len(history)
        assert kv.computed_tokens <= 4
        assert kv.bytes_from_disk > 0


async def test_without_disk_and_without_ram_everything_is_still_right() -> None:
    for ram_slots, with_store in ((0, False), (0, True), (4, False)):
        async with fake_house(ram_slots=ram_slots, with_store=with_store) as house:
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(converse, house, number, 3)
            await house.quiet()
            house.all_pages_are_back()


@pytest.mark.parametrize("who", ["a new conversation", "a resident one that goes on"])
async def test_a_turn_that_needs_no_disk_does_not_wait_for_a_slow_one(who: str) -> None:
    async with fake_house(ram_slots=2, n_pages=41) as house:
        assert house.store is not None
        history = SYSTEM + words(1, 60)
        answer, _ = await house.ask(history, 8, ignore_eos=True, session="parked")
        for seed in range(4):  # pushes the first session out of the device and out of RAM
            await house.ask(words(50 + seed, 90), 4, ignore_eos=True)
        resident = words(70, 22)
        resident += (await house.ask(resident, 4, ignore_eos=True))[0]
        await house.quiet()
        house.store.gate.clear()
        spec = house.spec(history + answer + (3,), 8, ignore_eos=True, session="parked")
        parked = await house.scheduler.submit(spec)
        await house.scheduler._ticker.until(lambda: house.core.statistics().turns["restoring"] == 1, 10)
        house.scheduler.lag_meter.reset_window()
        with anyio.fail_after(10):
            for seed in range(5):
                prompt = words(200 + seed, 20) if who == "a new conversation" else resident + words(seed, 3)
                _, report = await house.ask(prompt, 4, ignore_eos=True)
                assert report.disk_tokens == 0
                assert report.resident_tokens > 20 or who == "a new conversation"
        assert parked.ended is None
        assert house.scheduler.statistics().lag.window.maximum < 500
        house.store.gate.set()
        ids, ended = await read(parked)
        assert (ids, ended.reason) == house.right(spec)
        assert ended.report.disk_tokens > 0


def faults(seed: int, rate: float) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield rng.choice(["io", "payload", "missing", "resources"]) if rng.random() < rate else ""


@pytest.mark.parametrize("seed", range(4))
async def test_a_faulty_disk_costs_recomputing_and_never_an_error(seed: int) -> None:
    async with fake_house(ram_slots=3, n_pages=41) as house:
        assert house.store is not None
        reads, rng = faults(seed, 0.3), random.Random(seed)

        def fault(job: FakeJob) -> str:
            if job.kind != "write":
                return next(reads)
            return rng.choice(["", "", "full", "io"])

        house.store.fault = fault
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(converse, house, number, 4)
        await house.quiet()
        house.all_pages_are_back()
        failed = house.scheduler.statistics().totals.transfers["ram_to_disk"].failed
        assert set(failed) <= {"full", "io", "ancestor"}, f"{seed=}"


async def test_damaged_files_are_recomputed() -> None:
    for damage in ("corrupt", "tear", "vanish"):
        history = SYSTEM + words(3, 50)
        async with fake_house() as house:
            assert house.store is not None
            answer, _ = await house.ask(history, 8, ignore_eos=True)
            await house.scheduler.drain(20)
            entries = dict(house.store.entries)
        async with fake_house() as house:
            assert house.store is not None
            house.store.entries.update(entries)
            third = sorted(entries.values(), key=lambda entry: entry.meta.ordinal)[2].meta
            getattr(house.store, damage)(third.key)
            _, kv = await house.ask(history + answer + (4, 5), 8, ignore_eos=True)
            assert kv.disk_tokens == third.first_token, damage
            assert sum(kv.lost.values()) > 0, damage


@pytest.mark.parametrize("lag", [0, 1])
async def test_clients_that_go_while_their_session_is_restored(lag: int) -> None:
    async with fake_house(ram_slots=2, n_pages=41, lag=lag) as house:
        assert house.store is not None
        history = SYSTEM + words(1, 60)
        await house.ask(history, 8, ignore_eos=True)
        for seed in range(4):
            await house.ask(words(50 + seed, 90), 4, ignore_eos=True)
        await house.quiet()
        for _ in range(5):
            house.store.gate.clear()
            streams = [await house.scheduler.submit(house.spec((*history, n), 8)) for n in range(3)]  # one read, three askers
            await house.scheduler._ticker.until(lambda: house.core.statistics().turns["restoring"] >= 1, 10)
            for stream in streams:
                stream.close()
            house.store.gate.set()
            await house.quiet()
            house.all_pages_are_back()
        await house.ask((*history, 9), 8)


async def test_a_hung_disk_stalls_nobody_who_can_go_on() -> None:
    """Writes are taken and never answered: RAM cannot drain, so victims are dropped in time and everybody finishes."""
    async with fake_house(ram_slots=2, n_pages=25) as house:
        assert house.store is not None
        house.store.gate.clear()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(converse, house, number, 3)
        house.store.gate.set()
        await house.quiet()
        house.all_pages_are_back()
