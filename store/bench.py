"""``kvalet store bench``: the store beside the raw disk it stands on, in one run. Needs no torch.

Bars: ``restore_of_raw`` >= 0.90 and ``spill_of_raw`` >= 0.85, each the lower one of the two chunk sizes. ``bench_disk`` says
what is compared; ``bench_open`` and ``bench_lag`` have the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.store.bench_disk import QWEN, SMOLLM, Plan, Shape, measure_shape
from kvalet.store.bench_lag import measure_lag
from kvalet.store.bench_open import measure_open, measure_staging

RESTORE_BAR, SPILL_BAR = 0.90, 0.85
ROOM_BYTES = 1 << 30
"""Beyond the files: names of 100,000 sparse files, and something for everybody else."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything. ``shapes``: measured one after another; the first also carries staging and lag."""

    shapes: tuple[Shape, ...] = (SMOLLM, QWEN)
    open_files: int = 100_000


def main(arguments: Sequence[str]) -> int:
    """0: measured (whether or not the bars were met). 2: it cannot be measured here, with one sentence."""
    parser = argparse.ArgumentParser(prog="kvalet store bench", description="The store's speed beside the raw disk's.")
    parser.add_argument("--dir", default=".", help="a directory on the disk to measure; a folder in it is made and removed")
    parser.add_argument("--json", action="store_true", help="JSON on stdout instead of the table")
    parser.add_argument("--rounds", type=int, default=Plan.__dataclass_fields__["rounds"].default, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        report = run(Plan(args.dir, rounds=max(args.rounds, 1)), Size(), _say)
    except (OSError, RuntimeError) as error:
        print(f"kvalet store bench: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1) if args.json else table(report))
    return 0


def run(plan: Plan, size: Size, progress: Callable[[str], None]) -> dict[str, Any]:
    """All of it, in a new folder below ``plan.directory`` that is removed again. OSError or RuntimeError if it cannot be."""
    first = size.shapes[0]
    room = max(*(plan.room(shape) for shape in size.shapes), 2 * 143_000 // first.tokens * first.file_bytes) + ROOM_BYTES
    free = shutil.disk_usage(plan.directory).free
    if free < room:
        raise OSError(f"{plan.directory!r} has {free / 1e9:.1f} GB free; {room / 1e9:.1f} GB are needed")
    home = tempfile.mkdtemp(prefix="kvalet-bench-", dir=plan.directory)
    load = [os.getloadavg()[0]]
    try:
        chunks = [measure_shape(plan, shape, _folder(home, shape.model), progress) for shape in size.shapes]
        lag = measure_lag(plan, first, home, progress)
        staging = measure_staging(plan, first, home, progress)
        opened = measure_open(plan, first, home, size.open_files, progress)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    load.append(os.getloadavg()[0])
    return {
        "restore_of_raw": min(chunk["restore_share"]["median"] for chunk in chunks),
        "spill_of_raw": min(chunk["spill_share"]["median"] for chunk in chunks),
        "bars": {"restore": RESTORE_BAR, "spill": SPILL_BAR},
        "chunks": chunks,
        "open": opened,
        "staging": staging,
        "loop_lag": lag,
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(), "load": load},
    }


def _folder(home: str, name: str) -> str:
    path = os.path.join(home, name)
    os.mkdir(path, 0o700)
    return path


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    """For people: one line per figure."""
    bars, lag, opened = report["bars"], report["loop_lag"], report["open"]
    lines = [
        f"restore_of_raw {report['restore_of_raw']:.2f} ({_met(report['restore_of_raw'], bars['restore'])})",
        f"spill_of_raw   {report['spill_of_raw']:.2f} ({_met(report['spill_of_raw'], bars['spill'])})",
    ]
    for chunk in report["chunks"]:
        rates, cpu = chunk["gb_per_s"], chunk["cpu_s_per_gb"]
        lines += [
            f"{chunk['model']}, {chunk['file_bytes'] / 1e6:.1f} MB per chunk of {chunk['chunk_tokens']} tokens:",
            f"  read  GB/s: raw {rates['raw_read']:.2f}, restore {rates['restore']:.2f} ({_share(chunk['restore_share'])})",
            f"  write GB/s: raw {rates['raw_write']:.2f}, raw with fdatasync {rates['raw_write_flushed']:.2f}, "
            f"spill {rates['spill']:.2f} ({_share(chunk['spill_share'])}; of the flushed "
            f"{_share(chunk['spill_share_of_flushed_writes'])})",
            f"  CPU s/GB: raw read {cpu['raw_read']:.3f}, restore {cpu['restore']:.3f}, raw write {cpu['raw_write']:.3f}, "
            f"spill {cpu['spill']:.3f}",
        ]
    for name in ("idle", "busy"):
        at = lag[f"{name}_ms"]
        lines.append(f"loop lag {name} ({lag['loop']}): p50 {at['p50']:.2f}, p99 {at['p99']:.2f}, max {at['max']:.2f} ms")
    for name, found in report["staging"].items():
        lines.append(
            f"staging at {name} tokens: {found['slots_bytes'] / 1e6:.1f} MB of slots, +{found['grown_bytes'] / 1e6:.1f} MB"
        )
    lines.append(f"open with {opened['files']} chunks: {opened['seconds']:.2f} s, index {opened['index_bytes'] / 1e6:.0f} MB")
    load = report["machine"]["load"]
    lines.append(f"load of the machine: {load[0]:.1f} before, {load[1]:.1f} after, {report['machine']['cores']} cores")
    return "\n".join(lines)


def _met(value: float, bar: float) -> str:
    return f"bar {bar:.2f}: {'met' if value >= bar else 'MISSED'}"


def _share(share: dict[str, float]) -> str:
    return f"{share['median']:.2f}, quartiles {share['low']:.2f}-{share['high']:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
