"""The demo's two runs of one workload: with a pool that holds everything, and on a machine too small for it, with a SIGKILL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvalet.api.demo_report import Moment
from kvalet.api.demo_server import Scrape, ServerError, ServerProcess, serve_command
from kvalet.api.demo_table import AgentTable
from kvalet.loadtest.runner import Turn, Watcher, play_all, sender
from kvalet.loadtest.workload import Conversation, WorkloadSpec, make_agents
from kvalet.runtime.geometry import KVGeometry, round_up

MODEL_NAME = "smollm2"
EXTRA: dict[str, object] = {"return_token_ids": True}
SCRAPE_EVERY_S = 0.8
"""Between two looks at the figures: parsing a page of metrics costs the client tens of milliseconds of a core it shares."""
SETTLE_S = 20.0
LEAST_SLOTS = 4


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """``pool_share``, ``ram_share``: parts of the agents' unique final KV that the small machine's pool and RAM tier hold.
    ``call_tokens``, ``answer_tokens``: bounds of a tool call and of an answer in text."""

    model: Path
    workload: WorkloadSpec = field(default_factory=WorkloadSpec)
    call_tokens: int = 96
    answer_tokens: int = 24
    decode_rows: int = 8
    pool_share: float = 1 / 3
    ram_share: float = 1 / 3
    reference_tokens_per_agent: int = 2560
    stagger_s: float = 0.25

    @property
    def turns(self) -> int:
        """Turns before the SIGKILL: those with a tool and the one that answers."""
        return self.workload.tool_turns + 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the small machine. ``unique_tokens``: KV of all agents after their last turn, shared prefixes counted once."""

    unique_tokens: int
    shared_tokens: int
    pool_tokens: int
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a server: what its clients saw, and its figures at the end, when no turn was open."""

    turns: tuple[Turn, ...]
    moments: tuple[Moment, ...]
    end: Scrape


def sizes_for(plan: DemoPlan, reference: Sequence[Turn], geometry: KVGeometry) -> Sizes:
    """From the reference run's last turn before the SIGKILL of each agent."""
    first = [turn.outcome.prompt_ids for turn in reference if turn.number == 0]
    last = [turn.outcome for turn in reference if turn.number == plan.turns - 1]
    shared = common_prefix(first)
    total = sum((o.prompt_tokens or 0) + (o.output_tokens or 0) for o in last)
    unique = total - shared * (len(last) - 1)
    slots = max(LEAST_SLOTS, int(unique * plan.ram_share) // geometry.chunk_tokens)
    pool = round_up(int(unique * plan.pool_share), geometry.page_tokens)
    return Sizes(unique, shared, pool, slots * geometry.slot_bytes)


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    """How many leading ids all sequences have in common; 0 of none."""
    if not sequences:
        return 0
    low, high = min(sequences), max(sequences)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def conversations(plan: DemoPlan) -> list[Conversation]:
    agents = make_agents(plan.workload)
    return [Conversation(script, MODEL_NAME, plan.call_tokens, plan.answer_tokens) for script in agents]


def command(plan: DemoPlan, *more: str) -> list[str]:
    fixed = ["--deterministic", "--decode-rows", str(plan.decode_rows), "--log-level", "warning"]
    return serve_command([str(plan.model), "--served-name", MODEL_NAME, *fixed, *more])


async def moved(server: ServerProcess, moments: list[Moment]) -> None:
    """Appends how many chunks have moved, again and again until cancelled."""
    while True:
        scrape = await server.scrape()
        moments.append(Moment(time.monotonic(), sum(scrape.by_label("kvalet_transfers_total").values())))
        await asyncio.sleep(SCRAPE_EVERY_S)


async def settled(server: ServerProcess) -> Scrape:
    """The figures once every accepted turn has ended. Raises ServerError if that takes longer than SETTLE_S."""
    async with asyncio.timeout(SETTLE_S) as limit:
        while True:
            scrape = await server.scrape()
            if sum(scrape.by_label("kvalet_turns_ended_total").values()) == scrape.value("kvalet_turns_accepted_total"):
                limit.reschedule(None)
                return scrape
            await asyncio.sleep(SCRAPE_EVERY_S)


@contextmanager
def shown(talks: Sequence[Conversation], title: str) -> Iterator[Watcher]:
    with AgentTable([talk.script.name for talk in talks], title) as table:
        yield table


async def live(plan: DemoPlan, server: ServerProcess, talks: Sequence[Conversation], turns: int, title: str) -> Life:
    """``turns`` turns of every agent against a running server, and the figures after them."""
    moments: list[Moment] = []
    watching = asyncio.create_task(moved(server, moments), name="kvalet demo: figures")
    try:
        with shown(talks, title) as watcher:
            done = await play_all(sender(server.endpoint), talks, turns, watcher, EXTRA, plan.stagger_s)
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    try:
        end = await settled(server)
    except TimeoutError:
        raise ServerError(f"turns are still open {SETTLE_S:g} s after their answers were complete\n{server.log}") from None
    return Life(tuple(done), tuple(moments), end)


async def run_reference(plan: DemoPlan) -> Life:
    """All turns, the one after the SIGKILL included, on a pool that holds everything."""
    tokens = plan.workload.agents * plan.reference_tokens_per_agent
    talks = conversations(plan)
    async with ServerProcess(command(plan, "--pool-tokens", str(tokens), "--ram-bytes", "0")) as server:
        title = f"1/4 the reference: {len(talks)} agents on a pool that holds everything"
        life = await live(plan, server, talks, plan.turns + 1, title)
        await server.terminate()
    return life


async def run_small(plan: DemoPlan, sizes: Sizes, store: Path) -> tuple[Life, Life]:
    """The same on the small machine: all turns, SIGKILL, restart, one more turn of every agent."""
    more = ["--pool-tokens", str(sizes.pool_tokens), "--ram-bytes", str(sizes.ram_bytes), "--store", str(store)]
    more += ["--drain-seconds", "5"]
    talks = conversations(plan)
    async with ServerProcess(command(plan, *more)) as server:
        title = (
            f"2/4 a small machine: {sizes.unique_tokens} tokens of KV, a pool for {sizes.pool_tokens}, "
            f"RAM for {sizes.ram_bytes / 1e6:.0f} MB, the rest on disk"
        )
        before = await live(plan, server, talks, plan.turns, title)
        await server.kill()
    if any(turn.fault for turn in before.turns):
        return before, Life((), (), before.end)
    async with ServerProcess(command(plan, *more)) as server:
        after = await live(plan, server, talks, 1, "3/4 after SIGKILL and restart: one more turn of every agent")
        await server.terminate()
    return before, after
