"""A decode step of the default model in process, with keys lying either way, in turns: milliseconds, best and median.

    python tests/bench/cpu_step.py [ROWS ...]

Rows of 300 tokens; no server, scheduler or sampler. ``runtime.arena.keys_lie_transposed`` chose by such figures.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

import torch
from kvalet.api.fetch_model import fetch
from kvalet.runtime.arena import Arena
from kvalet.runtime.batch import Segment
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import StepEngine, load_model

TOKENS, PAGES, ROUNDS, STEPS = 300, 24, 12, 4


def measure(rows: int) -> dict[bool, list[float]]:
    """Transposed or not -> milliseconds of a step, one figure per round."""
    config = EngineConfig(model=fetch(), n_pages=rows * PAGES + 1, arena_tokens=32_768)
    forward = StepEngine(config, load_model(replace(config, n_pages=2))).forward
    arenas = {order: Arena(forward._pool.geometry, config.arena_tokens, order) for order in (True, False)}
    tables = [tuple(range(1 + row * PAGES, 1 + (row + 1) * PAGES)) for row in range(rows)]
    found: dict[bool, list[float]] = {True: [], False: []}
    with torch.inference_mode():
        for row, pages in enumerate(tables):
            forward([Segment(row, 0, tuple(range(1000, 1000 + TOKENS)), pages, False, True)])
        step = [Segment(row, TOKENS, (1000 + row,), pages, True, True) for row, pages in enumerate(tables)]
        for _ in range(ROUNDS):
            for order, arena in arenas.items():
                forward.arena = arena
                forward(step)  # fills the copies
                began = time.perf_counter()
                for _ in range(STEPS):
                    forward(step)
                found[order].append((time.perf_counter() - began) / STEPS * 1e3)
    return found


def main() -> None:
    for rows in [int(word) for word in sys.argv[1:]] or [1, 4, 16]:
        for order, times in measure(rows).items():
            kind = "transposed" if order else "untransposed"
            print(f"{rows:3} rows, keys {kind:12}: best {min(times):6.1f} ms, median {statistics.median(times):6.1f} ms")


if __name__ == "__main__":
    main()
