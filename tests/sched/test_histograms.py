"""Buckets count everything once, and quantiles are near the true ones."""

from __future__ import annotations

import random

import pytest
from kvalet.sched.histograms import LAG_MS, LATENCY_MS, Histogram, geometric_bounds


def test_bounds_grow_by_the_factor_and_reach_the_last() -> None:
    bounds = geometric_bounds(1.0, 100.0, 2.0)
    assert bounds == (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@pytest.mark.parametrize(("first", "last", "factor"), [(0.0, 1.0, 2.0), (2.0, 1.0, 2.0), (1.0, 2.0, 1.0)])
def test_bad_bounds_are_refused(first: float, last: float, factor: float) -> None:
    with pytest.raises(ValueError, match="factor"):
        geometric_bounds(first, last, factor)


def test_every_value_is_counted_once_wherever_it_lies() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (-3.0, 0.0, 1.0, 1.5, 2.0, 4.0, 4.1, 1e9):
        histogram.add(value)
    snap = histogram.snapshot()
    assert snap.counts == (3, 2, 1, 2)
    assert snap.count == 8
    assert snap.maximum == 1e9
    assert snap.total == pytest.approx(0.0 + 0.0 + 1.0 + 1.5 + 2.0 + 4.0 + 4.1 + 1e9)
    assert snap.cumulative() == ((1.0, 3), (2.0, 5), (4.0, 6))


@pytest.mark.parametrize("bounds", [LAG_MS, LATENCY_MS])
@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_one_bucket_of_the_sorted_list(bounds: tuple[float, ...], seed: int) -> None:
    rng = random.Random(seed)
    values = sorted(rng.lognormvariate(2.0, 1.5) for _ in range(2000))
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    factor = bounds[1] / bounds[0]
    for q in (0.1, 0.5, 0.9, 0.99):
        true = values[int(q * (len(values) - 1))]
        assert true / factor <= histogram.snapshot().quantile(q) <= true * factor, f"{seed=} {q=}"
    assert histogram.snapshot().quantile(1.0) == values[-1]


def test_a_quantile_is_never_above_what_was_seen_and_zero_of_nothing() -> None:
    histogram = Histogram((10.0, 100.0))
    assert histogram.snapshot().quantile(0.99) == 0.0
    histogram.add(11.0)
    assert histogram.snapshot().quantile(0.5) <= 11.0
    with pytest.raises(ValueError, match=r"0\.\.1"):
        histogram.snapshot().quantile(1.1)


def test_a_snapshot_does_not_change_and_reset_forgets() -> None:
    histogram = Histogram((1.0,))
    histogram.add(0.5)
    before = histogram.snapshot()
    histogram.add(0.5)
    assert before.count == 1
    assert histogram.count == 2
    histogram.reset()
    assert histogram.snapshot().counts == (0, 0)
    assert histogram.maximum == 0.0
