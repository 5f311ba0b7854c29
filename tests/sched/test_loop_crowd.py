"""Random crowds through loop, core and fakes: agents, impatient callers, slow readers, closed and forked sessions, disk faults,
every shape of pool. Answers are right, each turn ends once, all pages come back. The seed is the test's name."""

from __future__ import annotations

import random

import anyio
import pytest
from fake_house import House, fake_house, read
from kvalet.sched.turns import Ended, EndReason, Piece, TurnSpec

pytestmark = pytest.mark.anyio

NATURAL = (EndReason.STOP, EndReason.LENGTH)


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def words(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 97) for _ in range(n))


async def impatient(house: House, spec: TurnSpec, seconds: float) -> None:
    """A caller that goes away wherever it happens to be."""
    with anyio.move_on_after(seconds):
        await read(await house.scheduler.submit(spec))


async def patient(house: House, spec: TurnSpec, rng: random.Random) -> tuple[int, ...]:
    """Reads to the end, now and then slowly, now and then closing early; what a turn that ran to its end said is right."""
    stream = await house.scheduler.submit(spec)
    closed = rng.random() < 0.1
    if closed:
        stream.close()  # the turn may have come to its own end before that is heard
    ids: list[int] = []
    ends: list[Ended] = []
    async for item in stream:
        if isinstance(item, Piece):
            ids.extend(item.ids)
            if rng.random() < 0.02:
                with anyio.move_on_after(0.005):
                    await anyio.sleep_forever()
        else:
            ends.append(item)
    assert len(ends) == 1
    if ends[0].reason in NATURAL and not ends[0].message and not closed:  # a message says that the pool was too small for more
        assert (tuple(ids), ends[0].reason) == house.right(spec)
    return tuple(ids)


async def agent(house: House, rng: random.Random, name: str) -> None:
    history = tuple(range(1, 21)) + words(rng, rng.randrange(1, 40))
    for _ in range(rng.randrange(1, 6)):
        spec = house.spec(
            history,
            rng.randrange(1, 25),
            ignore_eos=rng.random() < 0.5,
            session=name if rng.random() < 0.7 else "",
            stream_pieces=rng.choice([1, 2, 4, 256]),
        )
        if rng.random() < 0.1:
            house.scheduler.close_session(name)
        if rng.random() < 0.1:
            house.scheduler.fork_session(name, f"{name}-child")
        if rng.random() < 0.2:
            await impatient(house, spec, rng.random() * 0.02)
        else:
            history += await patient(house, spec, rng) + words(rng, rng.randrange(1, 30))
        if len(history) > 100:
            history = history[:60] + words(rng, 4)  # a client that compacts its history


@pytest.mark.parametrize("seed", range(10))
async def test_a_crowd(seed: int) -> None:
    rng = random.Random(seed)
    disk = random.Random(seed + 1000)
    async with fake_house(
        n_pages=rng.choice([34, 40, 60]),
        ram_slots=rng.choice([0, 1, 3, 8]),
        lag=seed % 2,
        synchronous=bool(seed & 2),
        max_rows=rng.choice([1, 3, 8]),
        with_store=rng.random() < 0.8,
        write_timeout_s=rng.choice([0.05, 60.0]),
        deterministic=rng.random() < 0.2,
        deterministic_piece=8,
    ) as house:
        fault_rate = rng.choice([0.0, 0.0, 0.2])
        if house.store is not None:
            house.store.fault = lambda _: disk.choice(["io", "payload"]) if disk.random() < fault_rate else ""
        async with anyio.create_task_group() as tasks:
            for number in range(rng.randrange(1, 14)):
                tasks.start_soon(agent, house, random.Random(seed * 100 + number), f"agent-{number}")
        if rng.random() < 0.5:
            assert (await house.scheduler.drain(4)).finished
        else:
            await house.quiet()
            house.all_pages_are_back()
