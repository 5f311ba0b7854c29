"""Up to how many rows one kind of product is the faster one. Measured at start, on all layers, so that weights come from memory
as they do in a step; a single matrix would stay in the cache and flatter the kind that reads more.

A busy machine must not decide: both kinds take turns, each counts with its fastest pass, and the crossing point leaves
``PRIOR_ROWS`` only for a difference that is clear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from kvalet.runtime.linear import Linear

CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Row counts that are tried."""

PRIOR_ROWS = 4
"""Where int4 and bf16 meet on the processors measured (docs/numbers.md), with AMX and without."""

MARGIN = 1.08
"""A kind is clearly slower when it takes so many times as long."""


def measured_switch_rows(
    few: Sequence[Linear],
    many: Sequence[Linear],
    columns: int,
    *,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """The largest of CANDIDATES up to which ``few`` serves at least about as well as ``many``; 0 if it never does.

    ``few`` and ``many``: the same matrices [out, columns] as two kinds of product. Takes ``repeats`` + 1 passes over both per
    row count tried, and tries 2 to 5 of them: about 0.1 s for 135M weights.
    """
    place = CANDIDATES.index(PRIOR_ROWS)
    if _ratio(few, many, CANDIDATES[place], columns, repeats, clock) > MARGIN:
        while place >= 0 and _ratio(few, many, CANDIDATES[place], columns, repeats, clock) > 1.0:
            place -= 1
        return CANDIDATES[place] if place >= 0 else 0
    while place + 1 < len(CANDIDATES):
        if _ratio(few, many, CANDIDATES[place + 1], columns, repeats, clock) * MARGIN > 1.0:
            break
        place += 1
    return CANDIDATES[place]


def _ratio(
    few: Sequence[Linear], many: Sequence[Linear], rows: int, columns: int, repeats: int, clock: Callable[[], float]
) -> float:
    """Time of ``few`` over time of ``many`` for so many rows, each at its best of ``repeats``, taken in turns."""
    x = torch.zeros(rows, columns, dtype=torch.bfloat16)
    best = [float("inf"), float("inf")]
    for number in range(repeats + 1):
        for kind, products in enumerate((few, many)):
            start = clock()
            for product in products:
                product(x)
            if number:  # the first pass of each kind makes what is made once
                best[kind] = min(best[kind], clock() - start)
    return best[0] / max(best[1], 1e-9)
