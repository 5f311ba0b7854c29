"""`make bench-cpu`: kvalet and llama.cpp (xllamacpp) on this machine, through the same client, in one run.

Both servers are up all the time and take turns, repeat by repeat; medians over the repeats. Prompts are token ids (the same
for both), greedy, end of text ignored, one fresh connection per request.

Two passes per batch: the first on prompts never seen before (TTFT, end to end), the second on the same prompts again (steady
tokens/s: with the prompts cached all sessions decode at once from the beginning, in either engine).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from kvalet.api.demo_server import ServerError, ServerProcess, serve_command
from kvalet.api.fetch_model import fetch
from kvalet.loadtest.__main__ import first_model
from kvalet.loadtest.client import Call, complete
from kvalet.loadtest.outcome import Outcome
from kvalet.loadtest.steady import Batch, measure, medians

ROOT = Path(__file__).resolve().parent.parent.parent
PEER_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
PROMPT_TOKENS, NEW_TOKENS, LONG_TOKENS = 256, 64, 2048
SESSIONS = (1, 4, 16)
FIRST_ID, LAST_ID = 1000, 45_000
PEER_CONTEXT = 2560
"""Tokens per session of the peer: the long prompt and its answer must fit."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="make bench-cpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--model", type=Path, default=None)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--json", type=Path, default=Path("bench-cpu.json"))
    p.add_argument("--serve", nargs="*", default=[], help="more arguments for `kvalet serve`, such as weights=int4")
    p.add_argument("--only", choices=("kvalet", "xllamacpp"), default=None)
    return p


def prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(n)]


class Engine:
    """A running server and the name of its model."""

    def __init__(self, name: str, process: ServerProcess, model: str) -> None:
        self.name = name
        self.process = process
        self.model = model
        self.batches: dict[tuple[int, str], list[Batch]] = {}
        self.long_ms: dict[str, list[float]] = {"cold": [], "warm": []}

    async def ask(self, ids: Sequence[int], new: int) -> Outcome:
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await complete(self.process.endpoint, Call("/v1/completions", body))

    async def batch(self, prompts: Sequence[Sequence[int]], kind: str) -> None:
        outcomes = await asyncio.gather(*(self.ask(ids, NEW_TOKENS) for ids in prompts))
        try:
            self.batches.setdefault((len(prompts), kind), []).append(measure(outcomes))
        except ValueError as error:
            raise ServerError(f"{self.name}: {error}\n{self.process.log}") from error

    async def long(self, ids: Sequence[int], kind: str) -> None:
        outcome = await self.ask(ids, 4)
        if outcome.ttft_s is None:
            raise ServerError(f"{self.name}: {outcome.error or 'no content'}\n{self.process.log}")
        self.long_ms[kind].append(outcome.ttft_s * 1e3)

    async def repeat(self, number: int) -> None:
        """One round of everything. Repeat ``number`` has the same prompts for every engine."""
        rng = random.Random(f"bench/{number}")
        for sessions in SESSIONS:
            prompts = [prompt(rng, PROMPT_TOKENS) for _ in range(sessions)]
            await self.batch(prompts, "cold")
            await self.batch(prompts, "steady")
        ids = prompt(rng, LONG_TOKENS)
        await self.long(ids, "cold")
        await self.long(ids, "warm")

    def peak_mb(self) -> float:
        """Peak resident memory of the process so far, MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(kib) * 1024 / 1e6

    def as_json(self) -> dict[str, Any]:
        return {
            "batches": {
                str(sessions): {
                    "steady": asdict(medians(self.batches[sessions, "steady"])),
                    "cold": asdict(medians(self.batches[sessions, "cold"])),
                }
                for sessions in SESSIONS
            },
            "ttft_2048_ms": {kind: statistics.median(values) for kind, values in self.long_ms.items()},
            "peak_mb": self.peak_mb(),
        }


def commands(arguments: argparse.Namespace, model: Path) -> dict[str, list[str]]:
    threads = len(os.sched_getaffinity(0))
    more = [word for option in arguments.serve for word in (f"--{option.partition('=')[0]}", option.partition("=")[2]) if word]
    peer = [
        str(PEER_PYTHON),
        str(ROOT / "tests/bench/xllamacpp_server.py"),
        str(model),
        str(max(SESSIONS)),
        "2560",
        str(threads),
    ]
    ours = serve_command([str(model), "--pool-tokens", "32768", "--ram-bytes", "0", "--log-level", "warning", *more])
    both = {"kvalet": ours, "xllamacpp": peer}
    return {name: command for name, command in both.items() if arguments.only in (None, name)}


async def run(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        engines = []
        for name, command in commands(arguments, model).items():
            process = await stack.enter_async_context(ServerProcess(command))
            engines.append(Engine(name, process, await first_model(process.endpoint)))
        for engine in engines:
            await engine.ask(prompt(random.Random(0), 64), 8)  # what is made at first use is no part of the figures
        for number in range(arguments.repeats):
            for engine in engines if number % 2 == 0 else engines[::-1]:
                print(f"repeat {number + 1}/{arguments.repeats}: {engine.name}", flush=True)
                await engine.repeat(number)
        return {engine.name: engine.as_json() for engine in engines}


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "")
    extras = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in flags]
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {' '.join(extras)}"


def table(results: dict[str, Any]) -> str:
    head = f"{'':<12}" + "".join(f"{f'{n} sessions':>30}" for n in SESSIONS)
    sub = f"{'tokens/s':<12}" + f"{'steady':>10}{'gap ms':>10}{'end-end':>10}" * len(SESSIONS)
    lines = [head, sub + f"{'TTFT 2048 cold / warm ms':>28}{'peak MB':>10}"]
    for name, result in results.items():
        cells = ""
        for sessions in SESSIONS:
            batch = result["batches"][str(sessions)]
            cells += f"{batch['steady']['steady']:>10.1f}{batch['steady']['gap_ms']:>10.1f}{batch['cold']['end_to_end']:>10.1f}"
        long = result["ttft_2048_ms"]
        lines.append(f"{name:<12}{cells}{long['cold']:>18.0f} / {long['warm']:<7.0f}{result['peak_mb']:>10.0f}")
    return "\n".join(lines)


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """kvalet over the peer; below 1 is better for times."""
    ours, peer = results["kvalet"], results["xllamacpp"]
    steady = {
        f"steady_{n}": ours["batches"][str(n)]["steady"]["steady"] / peer["batches"][str(n)]["steady"]["steady"]
        for n in SESSIONS
    }
    long = {f"ttft_2048_{kind}": ours["ttft_2048_ms"][kind] / peer["ttft_2048_ms"][kind] for kind in ("cold", "warm")}
    return {name: round(value, 3) for name, value in (steady | long).items()}


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(words)
    model = arguments.model or fetch(quiet=True)
    try:
        results = asyncio.run(run(arguments, model))
    except ServerError as error:
        print(f"bench-cpu: {error}", file=sys.stderr)
        return 1
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    report = {"machine": machine(), "commit": commit, "repeats": arguments.repeats, "engines": results}
    if len(results) == 2:
        report["ratios"] = ratios(results)
    print(f"\n{report['machine']}, commit {commit}, {arguments.repeats} repeats\n{table(results)}")
    if "ratios" in report:
        print("kvalet / xllamacpp: " + ", ".join(f"{name} {value:g}x" for name, value in report["ratios"].items()))
    arguments.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
