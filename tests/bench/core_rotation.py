"""What the scheduler's decisions cost: the agent rotation of docs/numbers.md with the real scheduler on a modelled machine.

S sessions of 16,384 private tokens, a pool for 9 of them, 8 at a time; each turn adds 256 prompt tokens and takes 128. Real:
core, loop, shell, token streams, and the CPU time they take, which moves the clock. Modelled (``rotation_model``): steps,
copies, the interpreter lock. Prints CPU time per call of the core by event kind, and what follows for sessions/s, TTFT, gaps;
JSON with ``--out``. Run: python tests/bench/core_rotation.py [--sessions 32] [--pool 9] [--profile] [--out FILE].
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import json
import pstats
import random
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvalet.sched.lag_meter
import kvalet.sched.tick
from kvalet.api.collector import calm
from kvalet.runtime.plan import SamplingParams
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.loop import Scheduler
from kvalet.sched.turns import Ended, TurnSpec
from rotation_model import Costs, Machine, ModelCopier, ModelEngine, VirtualLoop

CONTEXT, NEW_PROMPT, NEW, AT_A_TIME, ROUNDS = 16_384, 256, 128, 8, 2
PAGE, CHUNK = 16, 128
BASE = Costs()
RAM_SLOTS = 4436
"""78 GiB of slots for 32 sessions; as many per session otherwise."""


class NoDisk:
    def has(self, key: bytes) -> bool:
        return False

    def tails(self, parent: bytes) -> tuple[()]:
        return ()

    def accepts_writes(self) -> bool:
        return False

    def branches(self, tenant: str, session: str) -> tuple[()]:
        return ()


class TimedCore(Core):
    """Counts its own CPU time by event kind; ``plan`` and ``decide`` are kinds of their own."""

    def __init__(self, config: SchedConfig) -> None:
        disk: Any = NoDisk()
        super().__init__(config, disk)
        self.spent: dict[str, list[float]] = defaultdict(list)

    def _timed(self, name: str, call: Any, *args: Any) -> Any:
        began = time.thread_time()
        result = call(*args)
        self.spent[name].append(time.thread_time() - began)
        return result

    def take_in(self, event: Any) -> None:
        self._timed(type(event).__name__, super().take_in, event)

    def decide(self) -> Any:
        return self._timed("decide", super().decide)

    def plan(self) -> Any:
        return self._timed("plan", super().plan)


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else 0.0


class Rotation:
    """One run; everything in virtual time."""

    def __init__(self, sessions: int, pool: int, costs: Costs, context: int = CONTEXT) -> None:
        self.sessions, self.context = sessions, context
        per_session = -(-(context + NEW + ROUNDS * (NEW_PROMPT + NEW)) // PAGE) + 2
        self.machine = Machine(costs)
        self.config = SchedConfig(
            page_tokens=PAGE, chunk_tokens=CHUNK, n_pages=1 + pool * per_session, context_tokens=context + 24_000,
            identity=bytes(32), ram_slots=RAM_SLOTS * sessions // 32 if pool < sessions else 0,
            staging_slots=7 if pool < sessions else 0, step_tokens=8208, idle_step_tokens=8192, lag=1, queue_limit=512,
            page_bytes=costs.page_bytes,
        )  # fmt: skip
        self.core = TimedCore(self.config)
        self.copier = ModelCopier(self.machine)
        self.histories = [random.Random(1_000_000 + i).choices(range(1000, 150_000), k=context) for i in range(sessions)]

    def run(self) -> dict[str, Any]:
        clock: Any = SimpleNamespace(perf_counter=self.machine.now, monotonic=self.machine.now)
        saved = kvalet.sched.tick.time, kvalet.sched.lag_meter.time, kvalet.sched.tick.EngineThread
        kvalet.sched.tick.time = kvalet.sched.lag_meter.time = clock
        kvalet.sched.tick.EngineThread = self._engine_thread  # type: ignore[assignment,misc]
        try:
            with asyncio.Runner(loop_factory=lambda: VirtualLoop(self.machine)) as runner:
                return runner.run(self._rotate())
        finally:
            kvalet.sched.tick.time, kvalet.sched.lag_meter.time, kvalet.sched.tick.EngineThread = saved  # type: ignore[misc]

    def _engine_thread(self, _engine: Any, lag: int, on_result: Any, _on_failed: Any, on_exit: Any) -> ModelEngine:
        self.engine = ModelEngine(self.machine, lag, on_result, on_exit)
        return self.engine

    async def _rotate(self) -> dict[str, Any]:
        engine: Any = SimpleNamespace(synchronous=False)
        rounds = []
        async with Scheduler(
            self.core, engine, self.copier, None, lambda _: memoryview(b""), write_timeout_s=60.0, clock=self.machine.now,
            check_when_idle=False,
        ) as scheduler:  # fmt: skip
            for number in range(ROUNDS + 1):
                rounds.append(await self._round(scheduler, number))
        return {"rounds": rounds, "core_us": self.core_us()}

    def core_us(self) -> dict[str, dict[str, float]]:
        """CPU microseconds of the core's calls."""
        return {
            name: {
                "calls": len(times), "total_ms": sum(times) * 1e3, "mean": sum(times) / len(times) * 1e6,
                "p99": percentile(times, 0.99) * 1e6, "max": max(times) * 1e6,
            }
            for name, times in sorted(self.core.spent.items())
        }  # fmt: skip

    async def _round(self, scheduler: Scheduler, number: int) -> dict[str, Any]:
        rows: list[tuple[float, list[float], Any]] = []
        limit = asyncio.Semaphore(AT_A_TIME)
        scheduler.lag_meter.reset_window()
        began, idle = self.machine.now(), self.engine.idle_s
        core_began = sum(map(sum, self.core.spent.values()))

        async def turn(i: int) -> None:
            try:
                rows.append(await self._turn(scheduler, i))
            finally:
                limit.release()

        async with asyncio.TaskGroup() as group:
            for i, history in enumerate(self.histories):
                if number:
                    rng = random.Random(2_000_000 + 10_000 * (number - 1) + i)
                    history.extend(rng.choices(range(1000, 150_000), k=NEW_PROMPT))
                await limit.acquire()
                group.create_task(turn(i))
        wall = self.machine.now() - began
        gaps = [gap * 1e3 for _, own, _ in rows for gap in own]
        ttfts = [ttft for ttft, _, _ in rows]
        lag = scheduler.lag_meter.statistics().window
        return {
            "round": number, "sessions_per_s": len(rows) / wall, "wall_s": wall,
            "ttft_p50": percentile(ttfts, 0.5), "ttft_p99": percentile(ttfts, 0.99), "ttft_mean": sum(ttfts) / len(ttfts),
            "gap_p50_ms": percentile(gaps, 0.5), "gap_p99_ms": percentile(gaps, 0.99), "gap_max_ms": max(gaps),
            "lag_p99_ms": lag.quantile(0.99), "lag_max_ms": lag.maximum, "device_idle_s": self.engine.idle_s - idle,
            "core_s": sum(map(sum, self.core.spent.values())) - core_began,
            "computed": sum(r.computed_tokens for _, _, r in rows), "ram": sum(r.ram_tokens for _, _, r in rows),
        }  # fmt: skip

    async def _turn(self, scheduler: Scheduler, i: int) -> tuple[float, list[float], Any]:
        history = self.histories[i]
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        asked = self.machine.now()
        spec = TurnSpec(scheduler.next_turn_id(), tuple(history), params, bytes(32), session=f"s{i}", received_at=asked)
        stamps: list[float] = []
        report: Any = None
        async for item in await scheduler.submit(spec):
            if isinstance(item, Ended):
                assert item.reason.value == "length", item
                report = item.report
            elif item.ids:
                history.extend(item.ids)
                stamps += [self.machine.now()] * len(item.ids)
        return stamps[0] - asked, [b - a for a, b in itertools.pairwise(stamps)], report


def show(result: dict[str, Any]) -> None:
    for row in result["rounds"]:
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))
    for name, row in result["core_us"].items():
        print(f"  {name:12s}" + "".join(f" {k} {v:10.1f}" for k, v in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--pool", type=int, default=9, help="sessions that the pool holds; as many as sessions: nothing moves")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--handovers", type=int, default=BASE.handovers)
    parser.add_argument("--prefill-handovers", type=int, default=BASE.prefill_handovers)
    parser.add_argument("--switch-ms", type=float, default=BASE.switch_s * 1e3)
    parser.add_argument("--in-flight-mib", type=int, default=BASE.in_flight_bytes >> 20)
    parser.add_argument(
        "--cpu-scale", type=float, default=BASE.cpu_scale, help="this machine's CPU time x this = the modelled machine's"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    costs = replace(
        BASE, handovers=options.handovers, prefill_handovers=options.prefill_handovers,
        switch_s=options.switch_ms / 1e3, cpu_scale=options.cpu_scale, in_flight_bytes=options.in_flight_mib << 20,
    )  # fmt: skip
    rotation = Rotation(options.sessions, options.pool, costs, options.context)
    calm()
    if options.profile:
        with cProfile.Profile() as profile:
            result = rotation.run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    else:
        result = rotation.run()
    copier = rotation.copier
    result["runs_per_copy"] = {
        "in": copier.inward.runs / max(1, copier.inward.copies),
        "out": copier.out.runs / max(1, copier.out.copies),
    }
    result["options"], result["costs"] = vars(options), asdict(costs)
    show(result)
    print(result["runs_per_copy"])
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
