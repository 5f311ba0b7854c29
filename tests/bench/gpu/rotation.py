"""The agent rotation, in process: more sessions than the pool holds, each coming back in turn. Random weights, Qwen3-8B shape.

S sessions of 16,384 private tokens, a device pool for 9 of them, 8 at a time in a fixed order; each turn adds 256 prompt tokens
and takes 128 (greedy, end of text ignored). Round 0 fills, then two return rounds. Tier "none" recomputes, "ram" has a slab,
"all" has a pool that holds every session; "decode" measures steady decode through the scheduler instead. Reports per round wall
s, sessions/s, TTFT, gaps, tokens computed and restored.

Run: python tests/bench/gpu/rotation.py --tier ram --sessions 32 [--out FILE].
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from kvalet.api.collector import calm
from kvalet.runtime.cuda_engine import CudaEngine
from kvalet.runtime.cuda_ops import CudaOps
from kvalet.runtime.cuda_pool import CudaCopier, CudaPool
from kvalet.runtime.cuda_slab import CudaHostMemory, RegisteredSlab
from kvalet.runtime.plan import SamplingParams, SlotId
from kvalet.runtime.rows import TextContext
from kvalet.runtime.slab import Slab
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.loop import Scheduler
from kvalet.sched.turns import Ended, TurnSpec
from qwen3 import CONTEXT as MODEL_CONTEXT
from qwen3 import SPEC, cuda_device
from qwen3 import decoder as qwen3_decoder

CONTEXT, NEW_PROMPT, NEW = 16_384, 256, 128
AT_A_TIME = 8
ROUNDS = 2
KV = SPEC.geometry("bf16")
DECODE_CELLS = [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (1, 8192), (8, 8192), (32, 8192)]


class NoText:
    """A vocabulary without text: ids in, ids out, as the peers' rows were measured."""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


class NoDisk:
    def has(self, key: bytes) -> bool:
        return False

    def tails(self, parent: bytes) -> tuple[()]:
        return ()

    def accepts_writes(self) -> bool:
        return False

    def branches(self, tenant: str, session: str) -> tuple[()]:
        return ()


class NoCopies:
    """For "none" and "all": without slots no copy is ever asked for."""

    def copy_out(self, *args: Any) -> None:
        raise AssertionError("a copy without slots")

    copy_in = copy_out

    def close(self) -> None:
        pass


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else 0.0


async def one_turn(scheduler: Scheduler, history: list[int], session: str, rows: list[dict[str, Any]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    asked = time.monotonic()
    spec = TurnSpec(scheduler.next_turn_id(), tuple(history), params, bytes(32), session=session, received_at=asked)
    stamps: list[float] = []
    report: Any = None
    stream = await scheduler.submit(spec)
    async for item in stream:
        if isinstance(item, Ended):
            assert item.reason.value == "length", item
            report = item.report
        elif item.ids:
            history.extend(item.ids)
            stamps += [time.monotonic()] * len(item.ids)
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    rows.append({"ttft": stamps[0] - asked, "gaps": gaps, "report": report})


async def one_round(scheduler: Scheduler, histories: list[list[int]], number: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    scheduler.lag_meter.reset_window()
    limit = anyio.Semaphore(AT_A_TIME)
    began = time.monotonic()

    async def run(i: int) -> None:
        try:
            await one_turn(scheduler, histories[i], f"s{i}", rows)
        finally:
            limit.release()

    async with anyio.create_task_group() as group:
        for i, history in enumerate(histories):
            if number:
                rng = random.Random(2_000_000 + 10_000 * (number - 1) + i)
                history.extend(rng.choices(range(1000, 150_000), k=NEW_PROMPT))
            await limit.acquire()
            group.start_soon(run, i)
    wall = time.monotonic() - began
    gaps = [gap for row in rows for gap in row["gaps"]]
    ttfts = [row["ttft"] for row in rows]
    reports = [row["report"] for row in rows]
    lag = scheduler.statistics().lag.window
    return {
        "round": number, "wall_s": wall, "sessions_per_s": len(rows) / wall,
        "ttft_p50": percentile(ttfts, 0.5), "ttft_p99": percentile(ttfts, 0.99), "ttft_mean": sum(ttfts) / len(ttfts),
        "gap_p50_ms": percentile(gaps, 0.5) * 1e3, "gap_p99_ms": percentile(gaps, 0.99) * 1e3, "gap_max_ms": max(gaps) * 1e3,
        "prompt_tokens": sum(r.prompt_tokens for r in reports), "computed": sum(r.computed_tokens for r in reports),
        "resident": sum(r.resident_tokens for r in reports), "ram": sum(r.ram_tokens for r in reports),
        "disk": sum(r.disk_tokens for r in reports), "preemptions": sum(r.preemptions for r in reports),
        "lag_p50_ms": lag.quantile(0.5), "lag_p99_ms": lag.quantile(0.99), "lag_max_ms": lag.maximum,
    }  # fmt: skip


@dataclass
class House:
    """Engine, core and loop in one process, without HTTP. ``close`` after the scheduler has ended."""

    scheduler: Scheduler
    registered: RegisteredSlab | None

    def close(self) -> None:
        if self.registered is not None:
            self.registered.close()


def build(n_pages: int, ram_slots: int, max_rows: int, piece: int) -> House:
    ops = CudaOps(cuda_device())
    began = time.monotonic()
    pool = CudaPool(KV, n_pages, ops.device)
    decoder = qwen3_decoder(pool.pages, ops)
    text = TextContext(vocabulary=NoText(), vocab_size=SPEC.vocab, end_ids=frozenset())
    engine = CudaEngine(decoder, pool, text, max_rows=max_rows, max_step_tokens=piece + max_rows)
    slab = Slab(KV, ram_slots + 7, populate=False) if ram_slots else None
    registered = RegisteredSlab(slab, CudaHostMemory(), threads=8) if slab else None
    copier: Any = CudaCopier(pool, registered, ops) if registered else NoCopies()
    print(f"built in {time.monotonic() - began:.1f} s: {n_pages} pages, {ram_slots} RAM slots", flush=True)
    config = SchedConfig(
        page_bytes=KV.page_stride_bytes, page_tokens=KV.page_tokens, chunk_tokens=KV.chunk_tokens,
        n_pages=n_pages, context_tokens=MODEL_CONTEXT - 960, identity=bytes(32),
        ram_slots=ram_slots, staging_slots=7 if ram_slots else 0, max_rows=max_rows, step_tokens=piece + max_rows,
        idle_step_tokens=piece, queue_limit=512, lag=1,
    )  # fmt: skip
    no_disk: Any = NoDisk()

    def view(slot: SlotId) -> memoryview:
        assert slab is not None
        return slab.view(slot)

    calm()
    return House(Scheduler(Core(config, no_disk), engine, copier, None, view, write_timeout_s=60), registered)


async def rotation(options: argparse.Namespace) -> list[dict[str, Any]]:
    per_session = KV.pages_for(CONTEXT + NEW + ROUNDS * (NEW_PROMPT + NEW)) + 2
    n_pages = 1 + per_session * (options.sessions if options.tier == "all" else 9)
    ram_slots = int(options.ram_gib * (1 << 30) / KV.slot_bytes) if options.tier == "ram" else 0
    house = build(n_pages, ram_slots, 16, options.piece)
    histories = [random.Random(1_000_000 + i).choices(range(1000, 150_000), k=CONTEXT) for i in range(options.sessions)]
    rounds = []
    async with house.scheduler as scheduler:
        for number in range(ROUNDS + 1):
            rounds.append(await one_round(scheduler, histories, number))
            show(rounds[-1])
    house.close()
    return rounds


async def decode(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steady decode through the scheduler and the token streams: ``rows`` sessions of one context each, 160 new tokens; counted
    from the moment all have their first token to the moment the first one ends."""
    house = build(34_000, 0, 256, options.piece)
    cells = []
    async with house.scheduler as scheduler:
        for rows, context in DECODE_CELLS:
            histories = [random.Random(7 + i).choices(range(1000, 150_000), k=context) for i in range(rows)]
            stamps: list[list[float]] = [[] for _ in range(rows)]
            scheduler.lag_meter.reset_window()
            async with anyio.create_task_group() as group:
                for history, own in zip(histories, stamps, strict=True):
                    group.start_soon(read_all, scheduler, history, own)
            begin, end = max(own[0] for own in stamps), min(own[-1] for own in stamps)
            gaps = [b - a for own in stamps for a, b in itertools.pairwise(own) if begin <= a and b <= end]
            tokens = sum(1 for own in stamps for at in own if begin < at <= end)
            lag = scheduler.statistics().lag.window
            cell = {"rows": rows, "context": context, "tokens_per_s": tokens / (end - begin)}
            cell |= {"gap_p50_ms": percentile(gaps, 0.5) * 1e3, "gap_p99_ms": percentile(gaps, 0.99) * 1e3}
            cells.append(cell | {"lag_p99_ms": lag.quantile(0.99), "lag_max_ms": lag.maximum})
            show(cells[-1])
    house.close()
    return cells


async def read_all(scheduler: Scheduler, history: list[int], stamps: list[float]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    spec = TurnSpec(scheduler.next_turn_id(), tuple(history), params, bytes(32), received_at=time.monotonic())
    async for item in await scheduler.submit(spec):
        if not isinstance(item, Ended):
            stamps.extend([time.monotonic()] * len(item.ids))


def show(row: dict[str, Any]) -> None:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=("none", "ram", "all", "decode"), default="ram")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--ram-gib", type=float, default=78)
    parser.add_argument("--piece", type=int, default=8192)
    parser.add_argument("--out", default="gpu-rotation.json")
    options = parser.parse_args()
    job = decode if options.tier == "decode" else rotation
    rounds = anyio.run(job, options, backend_options={"use_uvloop": True})
    Path(options.out).write_text(json.dumps({"options": vars(options), "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
