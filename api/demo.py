"""`kvalet demo`: many tool-calling agents on a machine too small for them, killed and restarted, and their answers compared.

    kvalet demo [MODEL] [--report FILE] [--agents N] [--seed N] [--store DIR]

Exit status 0 only if the answers equal those of a run whose pool holds everything, something came back from RAM, from disk and
after the restart, and every request ended exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from kvalet.api.demo_check import PlainModel, check
from kvalet.api.demo_report import Comparison, by_kind, longest_gap_s, moving_windows, summary, verdict
from kvalet.api.demo_run import DemoPlan, Life, Sizes, run_reference, run_small, sizes_for
from kvalet.api.demo_server import Scrape, ServerError
from kvalet.api.fetch_model import FetchError, fetch
from kvalet.loadtest.workload import WorkloadSpec
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.spec import read_spec

RESULT_CHARS = 700
"""Length of a tool's result: some 200 tokens of history a turn."""
QUANTILES = {"loop_lag_p50_ms": "0.5", "loop_lag_p99_ms": "0.99", "loop_lag_max_ms": "1"}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="kvalet demo", description="Many agents on one small machine, spilled and restored.")
    p.add_argument("model", nargs="?", default="", help="path of a GGUF file; none = the default model, fetched if need be")
    p.add_argument("--report", type=Path, default=Path("demo-report.json"), help="where the figures go")
    p.add_argument("--agents", type=int, default=12)
    p.add_argument("--seed", type=int, default=1, help="of the agents' tasks, tool results and pauses")
    p.add_argument("--store", type=Path, default=None, help="folder of the disk tier; none = a temporary one")
    return p


async def play(plan: DemoPlan, store: Path) -> tuple[Life, Sizes, Life, Life]:
    """The reference run, what follows for the small machine, and its two lives. Raises ServerError."""
    reference = await run_reference(plan)
    faults = [f"{turn.agent} turn {turn.number + 1}: {turn.fault}" for turn in reference.turns if turn.fault]
    if faults:
        raise ServerError("the reference run went wrong: " + "; ".join(faults))
    file = GgufFile(plan.model)
    try:
        geometry = read_spec(file).geometry("bf16")
    finally:
        file.close()
    sizes = sizes_for(plan, reference.turns, geometry)
    return reference, sizes, *await run_small(plan, sizes, store)


def moved_bytes(lives: Sequence[Life]) -> dict[str, int]:
    """Bytes of KV spilled and restored over the lives of the small machine."""
    names = {"spilled_to": "kvalet_spilled_bytes_total", "restored_from": "kvalet_restored_bytes_total"}
    return {
        f"{word}_{tier}": int(sum(life.end.value(name, tier) for life in lives))
        for word, name in names.items()
        for tier in ("ram", "disk")
    }


def requests(lives: Sequence[Life]) -> dict[str, Any]:
    """Requests sent and how they ended, by the servers' own count and by the clients'."""
    ended: Counter[str] = Counter()
    once = True
    for life in lives:
        reasons = {reason: int(n) for reason, n in life.end.by_label("kvalet_turns_ended_total").items() if n}
        ended.update(reasons)
        once &= sum(reasons.values()) == len(life.turns)
        once &= all(turn.outcome.ok for turn in life.turns)
    return {"sent": sum(len(life.turns) for life in lives), "ended": dict(ended), "ended_once": once}


def lag_ms(scrapes: Sequence[Scrape]) -> dict[str, float]:
    """Event loop lag, the worse of the lives for each quantile."""
    name = "kvalet_loop_lag_seconds"
    return {key: round(max(s.value(name, q) for s in scrapes) * 1e3, 3) for key, q in QUANTILES.items()}


def assemble(plan: DemoPlan, sizes: Sizes, lives: Sequence[Life], compared: Comparison, seconds: float) -> dict[str, Any]:
    """``lives``: reference, before the SIGKILL, after it."""
    _, before, after = lives
    turns = (*before.turns, *after.turns)
    windows = [*moving_windows(before.moments), *moving_windows(after.moments)]
    report: dict[str, Any] = {
        **by_kind(before.turns, after.turns),
        "bytes": moved_bytes([before, after]),
        "longest_gap_ms_while_moving": round(longest_gap_s(turns, windows) * 1e3, 1),
        **lag_ms([before.end, after.end]),
        "requests": requests(lives),
        "answers_equal": compared.equal,
        "compared": compared.as_json(),
        "faults": [f"{turn.agent} turn {turn.number + 1}: {turn.fault}" for turn in turns if turn.fault],
        "agents": plan.workload.agents,
        "turns_per_agent": plan.turns + 1,
        "seed": plan.workload.seed,
        "unique_tokens": sizes.unique_tokens,
        "shared_tokens": sizes.shared_tokens,
        "pool_tokens": sizes.pool_tokens,
        "ram_bytes": sizes.ram_bytes,
        "seconds": round(seconds, 1),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}",
    }
    report["failed_because"] = verdict(report)
    return report


def run(arguments: argparse.Namespace) -> int:
    begin = time.monotonic()
    model = Path(arguments.model) if arguments.model else fetch(quiet=True)
    plan = DemoPlan(model, WorkloadSpec(seed=arguments.seed, agents=arguments.agents, result_chars=RESULT_CHARS))
    with tempfile.TemporaryDirectory(prefix="kvalet-demo-") as folder:
        reference, sizes, before, after = asyncio.run(play(plan, arguments.store or Path(folder) / "store"))
    print("\n4/4 comparing the answers", flush=True)
    compared = check((*before.turns, *after.turns), reference.turns, plan.workload.tool_turns, PlainModel(model))
    report = assemble(plan, sizes, (reference, before, after), compared, time.monotonic() - begin)
    arguments.report.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    print(f"\n{summary(report)}\n\nfigures in {arguments.report}; {report['seconds']:.0f} s")
    for difference in compared.differences:
        print(difference)
    for why in report["failed_because"]:
        print(f"FAILED: {why}")
    return 1 if report["failed_because"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 as above, 1 the demo failed (it says why), 2 it could not begin."""
    try:
        return run(parser().parse_args(arguments))
    except (FetchError, ModelError) as error:
        print(f"kvalet demo: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"kvalet demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
