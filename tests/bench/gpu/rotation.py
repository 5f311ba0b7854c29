"""The agent rotation: more sessions than the pool holds, each coming back in turn. Random weights, Qwen3-8B shape.

S sessions of 16,384 private tokens, a device pool for 9 of them, 8 at a time in a fixed order; each turn adds 256 prompt tokens
and takes 128 (greedy, end of text ignored). Round 0 fills, then two return rounds. Tier "none" recomputes, "ram" has a slab,
"disk" a store below the staging slots alone, "all" a pool that holds every session; "decode" measures steady decode through the
scheduler instead. In process, or with --http against a `kvalet serve` of its own. Reports per round wall s, sessions/s, TTFT,
gaps, tokens computed and restored.

Run: python tests/bench/gpu/rotation.py --tier ram --sessions 32 [--http] [--store DIR] [--out FILE].
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
from http_turns import HttpSide, served
from kvalet.api.build import Parts, build
from kvalet.api.collector import calm
from kvalet.api.config import EngineConfig
from kvalet.runtime.plan import SamplingParams
from kvalet.sched.loop import Scheduler
from kvalet.sched.turns import Ended, TurnSpec
from qwen3 import SPEC, write_folder

KV = SPEC.geometry("bf16")
GIB = 1 << 30
DECODE_CELLS = [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024)]
DECODE_CELLS += [(1, 8192), (8, 8192), (32, 8192), (64, 8192)]


@dataclass(frozen=True)
class Job:
    """Sizes of the rotation. ``ids``: prompts are drawn from this range."""

    sessions: int = 32
    context: int = 16_384
    new_prompt: int = 256
    new: int = 128
    rounds: int = 2
    at_a_time: int = 8
    pool_sessions: int = 9
    ids: tuple[int, int] = (1000, 150_000)

    @property
    def session_tokens(self) -> int:
        """What one session takes in the end, rounded to pages with two to spare."""
        most = self.context + self.new + self.rounds * (self.new_prompt + self.new)
        return (KV.pages_for(most) + 2) * KV.page_tokens

    def first(self, i: int) -> list[int]:
        return random.Random(1_000_000 + i).choices(range(*self.ids), k=self.context)

    def more(self, number: int, i: int) -> list[int]:
        """What session ``i`` adds in return round ``number`` (from 1)."""
        return random.Random(2_000_000 + 10_000 * (number - 1) + i).choices(range(*self.ids), k=self.new_prompt)


class Side(Protocol):
    """Where turns go: the scheduler of this process, or a server."""

    async def turn(self, history: list[int], session: str, new: int) -> tuple[list[float], dict[str, int]]:
        """Extends ``history`` by the answer; (when each token came, the turn's KV record)."""
        ...

    def lag(self) -> dict[str, float]:
        """Of the event loop since it was asked last, ms."""
        ...


class InProcess:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def turn(self, history: list[int], session: str, new: int) -> tuple[list[float], dict[str, int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        number, now = self._scheduler.next_turn_id(), time.monotonic()
        stamps: list[float] = []
        report: Any = None
        async for item in await self._scheduler.submit(
            TurnSpec(number, tuple(history), params, bytes(32), session=session, received_at=now)
        ):
            if isinstance(item, Ended):
                assert item.reason.value == "length", item
                report = item.report
            elif item.ids:
                history.extend(item.ids)
                stamps += [time.monotonic()] * len(item.ids)
        names = ("prompt_tokens", "computed_tokens", "resident_tokens", "ram_tokens", "disk_tokens", "preemptions")
        return stamps, {name: getattr(report, name) for name in names}

    def lag(self) -> dict[str, float]:
        window = self._scheduler.statistics().lag.window
        seen = {"lag_p50_ms": window.quantile(0.5), "lag_p99_ms": window.quantile(0.99), "lag_max_ms": window.maximum}
        self._scheduler.lag_meter.reset_window()
        return seen


@asynccontextmanager
async def in_process(config: EngineConfig, kit: Any = None) -> AsyncIterator[InProcess]:
    parts: Parts = await anyio.to_thread.run_sync(partial(build, config, lambda step, of, what: print(what, flush=True), kit))
    for line in parts.banner:
        print(line, flush=True)
    calm()
    scheduler = Scheduler(parts.core, parts.step_engine, parts.copier, parts.store, parts.slot_view, write_timeout_s=60.0)
    try:
        async with scheduler:
            yield InProcess(scheduler)
    finally:
        parts.close()


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else 0.0


async def one_round(side: Side, job: Job, histories: list[list[int]], number: int) -> dict[str, Any]:
    ttfts: list[float] = []
    gaps: list[float] = []
    reports: list[dict[str, int]] = []
    side.lag()
    limit = anyio.Semaphore(job.at_a_time)
    began = time.monotonic()

    async def run(i: int) -> None:
        try:
            asked = time.monotonic()
            stamps, report = await side.turn(histories[i], f"s{i}", job.new)
            assert len(stamps) == job.new
            ttfts.append(stamps[0] - asked)
            gaps.extend(b - a for a, b in itertools.pairwise(stamps))
            reports.append(report)
        finally:
            limit.release()

    async with anyio.create_task_group() as group:
        for i, history in enumerate(histories):
            if number:
                history.extend(job.more(number, i))
            await limit.acquire()
            group.start_soon(run, i)
    wall = time.monotonic() - began
    sums = {name: sum(report[name] for report in reports) for name in reports[0]}
    return {
        "round": number, "wall_s": wall, "sessions_per_s": len(reports) / wall, "ttft_p50": percentile(ttfts, 0.5),
        "ttft_p99": percentile(ttfts, 0.99), "ttft_mean": sum(ttfts) / len(ttfts), "gap_p50_ms": percentile(gaps, 0.5) * 1e3,
        "gap_p99_ms": percentile(gaps, 0.99) * 1e3, "gap_max_ms": max(gaps) * 1e3, **sums, **side.lag(),
    }  # fmt: skip


async def rotate(side: Side, job: Job) -> list[dict[str, Any]]:
    histories = [job.first(i) for i in range(job.sessions)]
    rounds = []
    for number in range(job.rounds + 1):
        rounds.append(await one_round(side, job, histories, number))
        show(rounds[-1])
    return rounds


def engine_config(options: argparse.Namespace, job: Job, folder: Path) -> EngineConfig:
    """The same engine in process and behind HTTP."""
    sessions = job.sessions if options.tier == "all" else job.pool_sessions
    decode = options.tier == "decode"
    return EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cuda",
        pool_tokens=34_000 * KV.page_tokens if decode else sessions * job.session_tokens,
        ram_bytes=int(options.ram_gib * GIB) if options.tier == "ram" else 0,
        store_dir=options.store if options.tier == "disk" else "",
        store_bytes=int(options.disk_gib * GIB) if options.tier == "disk" else 0,
        max_rows=256 if decode else 16,
        step_tokens=options.piece + (256 if decode else 16),
        idle_step_tokens=options.piece + (256 if decode else 16),
        queue_limit=512,
    )


async def decode(side: Side) -> list[dict[str, Any]]:
    """Steady decode through the scheduler and the token streams: ``rows`` sessions of one context each, 160 new tokens; counted
    from the moment all have their first token to the moment the first one ends."""
    cells = []
    for rows, context in DECODE_CELLS:
        stamps: list[list[float]] = []
        side.lag()

        async def read(i: int, context: int = context, stamps: list[list[float]] = stamps) -> None:
            history = random.Random(7 + i).choices(range(1000, 150_000), k=context)
            stamps.append((await side.turn(history, "", 160))[0])

        async with anyio.create_task_group() as group:
            for i in range(rows):
                group.start_soon(read, i)
        begin, end = max(own[0] for own in stamps), min(own[-1] for own in stamps)
        gaps = [b - a for own in stamps for a, b in itertools.pairwise(own) if begin <= a and b <= end]
        tokens = sum(1 for own in stamps for at in own if begin < at <= end)
        cell = {"rows": rows, "context": context, "tokens_per_s": tokens / (end - begin), **side.lag()}
        cells.append(cell | {"gap_p50_ms": percentile(gaps, 0.5) * 1e3, "gap_p99_ms": percentile(gaps, 0.99) * 1e3})
        show(cells[-1])
    return cells


def show(row: dict[str, Any]) -> None:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


async def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    job = Job(sessions=options.sessions)
    config = engine_config(options, job, folder)
    side: Callable[[], Any] = partial(served, config) if options.http else partial(in_process, config)
    async with side() as made:
        assert isinstance(made, InProcess | HttpSide)
        return await (decode(made) if options.tier == "decode" else rotate(made, job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=("none", "ram", "disk", "all", "decode"), default="ram")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--ram-gib", type=float, default=78)
    parser.add_argument("--disk-gib", type=float, default=56)
    parser.add_argument("--store", default="", help="folder of the disk tier, for --tier disk")
    parser.add_argument("--piece", type=int, default=8192)
    parser.add_argument("--http", action="store_true", help="over HTTP, against a server of its own")
    parser.add_argument("--out", default="gpu-rotation.json")
    options = parser.parse_args()
    if options.tier == "disk" and not options.store:
        parser.error("--tier disk needs --store DIR")
    with tempfile.TemporaryDirectory() as folder:
        rounds = anyio.run(
            measure, options, write_folder(Path(folder) / "qwen3-8b-shape"), backend_options={"use_uvloop": True}
        )
    Path(options.out).write_text(json.dumps({"options": vars(options), "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
