"""The bars of the GPU's benchmarks, and a table that says for each row of the result files whether it keeps its bar.

Run: python tests/bench/gpu/bars.py gpu-decode.json gpu-rotation-*.json. Exit status 1 if a bar is missed. Rows of other engines
were measured on a machine that copied 4.24 TB/s on the device; machines differ by some percent, so their figures are scaled by
this run's copy rate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE_COPY = 4.24e12
"""Bytes per second of the device copy (read + written) where the other engine was measured."""
VLLM_DECODE = {
    (1, 1024): 190, (8, 1024): 1381, (32, 1024): 4744, (64, 1024): 7751, (128, 1024): 10810, (256, 1024): 12736,
    (1, 8192): 180, (8, 8192): 1034, (32, 8192): 2210, (64, 8192): 2715,
}  # fmt: skip
VLLM_PREFILL = {4096: 39_500, 16_384: 32_000, 32_768: 25_800}
"""Tokens per second of vLLM 0.24 (docs/numbers.md)."""
BESIDE = 0.97
OF_FLOOR = {(64, 8192): 0.85, (64, 1024): 0.80, (128, 1024): 0.80, (256, 1024): 0.75}


@dataclass(frozen=True, slots=True)
class Bar:
    """``at_least`` False: the value must not be above the bar."""

    name: str
    value: float
    bar: float
    unit: str
    at_least: bool = True

    @property
    def kept(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def bars_of(result: dict[str, Any], copy_rate: float = REFERENCE_COPY) -> Iterator[Bar]:
    """Bars of one result file: of ``decode.py`` ("decode", "prefill") or of ``rotation.py`` ("options", "rounds")."""
    scale = copy_rate / REFERENCE_COPY
    for row in result.get("decode", ()):
        cell = (row["rows"], row["context"])
        if cell in OF_FLOOR:
            yield Bar(f"decode {cell[0]} x {cell[1]} of the floor", row["of_floor"], OF_FLOOR[cell], "")
    for row in result.get("prefill", ()):
        if row["prefill_tokens"] in VLLM_PREFILL:
            bar = BESIDE * scale * VLLM_PREFILL[row["prefill_tokens"]]
            yield Bar(f"prefill {row['prefill_tokens']}", row["tokens_per_s"], bar, "tokens/s")
    if "rounds" in result:
        yield from _rotation_bars(result["options"], result["rounds"], scale)


def _rotation_bars(options: dict[str, Any], rounds: Sequence[dict[str, Any]], scale: float) -> Iterator[Bar]:
    where = " over HTTP" if options.get("http") else ""
    if options["tier"] == "decode":
        for row in rounds:
            cell = (row["rows"], row["context"])
            if cell in VLLM_DECODE:
                bar = BESIDE * scale * VLLM_DECODE[cell]
                yield Bar(f"decode {cell[0]} x {cell[1]} through the scheduler{where}", row["tokens_per_s"], bar, "tokens/s")
        return
    last = rounds[-1]
    if options["tier"] == "ram":
        yield Bar(f"rotation, RAM tier{where}", last["sessions_per_s"], 5.0, "sessions/s")
        yield Bar(f"rotation, RAM tier{where}: TTFT p50", last["ttft_p50"], 0.30, "s", at_least=False)
    if "lag_p99_ms" in last:
        yield Bar(f"rotation, {options['tier']}{where}: loop lag p99", last["lag_p99_ms"], 5.0, "ms", at_least=False)


def gap_bars(results: Iterable[dict[str, Any]]) -> Iterator[Bar]:
    """Gaps of the RAM tier's last round beside those of a pool that holds all, where both were measured."""
    found = {(r["options"]["tier"], bool(r["options"].get("http"))): r["rounds"][-1] for r in results if "rounds" in r}
    for http in (False, True):
        if ("ram", http) in found and ("all", http) in found:
            bar = 1.15 * found["all", http]["gap_p99_ms"]
            name = f"rotation, RAM tier{' over HTTP' if http else ''}: gap p99"
            yield Bar(name, found["ram", http]["gap_p99_ms"], bar, "ms", at_least=False)


def table(bars: Sequence[Bar]) -> str:
    lines = ["| | measured | bar | |", "|---|---|---|---|"]
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        lines.append(f"| {bar.name} | {bar.value:,.3g} {bar.unit} | {sign} {bar.bar:,.3g} | {'' if bar.kept else 'MISSED'} |")
    return "\n".join(lines)


def main(files: Sequence[str]) -> int:
    results = [json.loads(Path(file).read_text()) for file in files]
    copy_rate = next((r["copy_bytes_per_s"] for r in results if "copy_bytes_per_s" in r), REFERENCE_COPY)
    bars = [bar for result in results for bar in bars_of(result, copy_rate)] + list(gap_bars(results))
    print(table(bars))
    return int(not all(bar.kept for bar in bars))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
