"""The crossing point of two kinds of product: found on a clock of its own, kept by noise, moved by clear differences."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from kvalet.runtime.calibrate import CANDIDATES, PRIOR_ROWS, measured_switch_rows
from kvalet.runtime.linear import Switched


class Recorded:
    """A product that takes ``cost(rows)`` on a clock of its own."""

    def __init__(self, cost: Callable[[int], float], clock: list[float]) -> None:
        self.cost, self.clock, self.nbytes, self.calls = cost, clock, 0, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.clock[0] += self.cost(x.shape[0])
        return x


def crossing(few: Callable[[int], float], many: Callable[[int], float], layers: int = 3) -> int:
    clock = [0.0]
    a, b = ([Recorded(cost, clock) for _ in range(layers)] for cost in (few, many))
    found = measured_switch_rows(a, b, 32, clock=lambda: clock[0])
    assert all(product.calls == a[0].calls <= 6 * len(CANDIDATES) for product in [*a, *b])
    return found


@pytest.mark.parametrize(
    ("few", "many", "rows"),
    [
        ((1, 2), (9, 1), 6),  # equal at 8: not clearly faster there
        ((1, 2), (12, 1), 8),
        ((9, 1), (1, 1), 0),
        ((1, 1), (9, 9), 16),
        ((2, 2), (5, 1), 3),
        ((1, 3), (5, 1), 2),
        ((1, 1), (1, 1), PRIOR_ROWS),
    ],
)
def test_the_crossing_point_is_measured(few: tuple[float, float], many: tuple[float, float], rows: int) -> None:
    assert crossing(lambda n: few[0] + few[1] * n, lambda n: many[0] + many[1] * n) == rows


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_machine_changes_nothing(seed: int) -> None:
    """Half of all passes are disturbed by up to ten times their length; 4 % of difference are no reason to leave the prior."""
    rng = random.Random(seed)

    def disturbed(base: float) -> Callable[[int], float]:
        return lambda n: base * (rng.uniform(2, 10) if rng.random() < 0.3 else 1.0)

    assert crossing(disturbed(1.0), disturbed(1.04), layers=1) == PRIOR_ROWS, seed
    assert crossing(disturbed(1.04), disturbed(1.0), layers=1) == PRIOR_ROWS, seed


def test_the_first_pass_does_not_count() -> None:
    """What a product makes at its first call is no part of its time."""

    def costs(first: float, later: float) -> Iterator[float]:
        yield first
        while True:
            yield later

    clock = [0.0]
    slow_start = costs(1000.0, 1.0)
    a = Recorded(lambda n: next(slow_start), clock)
    assert measured_switch_rows([a], [Recorded(lambda n: 9.0, clock)], 32, clock=lambda: clock[0]) == CANDIDATES[-1]


def test_switched_starts_with_the_product_for_many() -> None:
    clock = [0.0]
    few, many = Recorded(lambda n: 1.0, clock), Recorded(lambda n: 1.0, clock)
    Switched(few, many)(torch.zeros(1, 4))
    assert (few.calls, many.calls) == (0, 1)
