"""Counts of values in fixed buckets: constant memory, constant time per value, mergeable, printable by any exporter."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


def geometric_bounds(first: float, last: float, factor: float) -> tuple[float, ...]:
    """Upper bounds first, first * factor, ... up to the first one that is >= last. All in the unit of ``first``.

    A quantile read from such buckets is off by less than ``factor`` - 1 of its value.
    """
    if not (0.0 < first <= last and factor > 1.0):
        raise ValueError(f"need 0 < first <= last and factor > 1, not {first}, {last}, {factor}")
    bounds = [first]
    while bounds[-1] < last:
        bounds.append(bounds[-1] * factor)
    return tuple(bounds)


LAG_MS = geometric_bounds(0.05, 60_000.0, 1.1)
"""For event-loop lag and Python time: fine, because limits are set on their p99."""
LATENCY_MS = geometric_bounds(0.1, 600_000.0, 1.3)
"""For what a client can feel: time to first token, gaps between tokens, reads, copies."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """``counts[i]`` values lay in (bounds[i - 1], bounds[i]]; the last count, one more than there are bounds, holds what
    was larger than the last bound. ``count``, ``total`` and ``maximum`` are exact."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    total: float
    maximum: float

    def quantile(self, q: float) -> float:
        """The value below which a share ``q`` (0..1) of all values lies, interpolated inside its bucket, never above the
        largest value seen; 0.0 of no values."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"a quantile is in 0..1, not {q}")
        wanted = q * self.count
        below = 0
        for index, n_here in enumerate(self.counts):
            if n_here and below + n_here >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                high = self.bounds[index] if index < len(self.bounds) else self.maximum
                return min(low + (high - low) * (wanted - below) / n_here, self.maximum)
            below += n_here
        return self.maximum

    def cumulative(self) -> tuple[tuple[float, int], ...]:
        """(upper bound, values at or below it), as exporters print them; the values beyond the last bound are in ``count``
        only."""
        total = 0
        pairs = []
        for bound, n_here in zip(self.bounds, self.counts, strict=False):
            total += n_here
            pairs.append((bound, total))
        return tuple(pairs)


class Histogram:
    """A growing ``HistogramSnapshot``. One thread at a time."""

    __slots__ = ("_bounds", "_counts", "count", "maximum", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """``bounds``: strictly growing upper bounds; values above the last one are counted apart, so that no value is lost."""
        self._bounds = bounds
        self.reset()

    def reset(self) -> None:
        self._counts = [0] * (len(self._bounds) + 1)
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0

    def add(self, value: float) -> None:
        """Values below 0 (clocks read on two threads) count as 0."""
        if value < 0.0:
            value = 0.0
        self._counts[bisect_left(self._bounds, value)] += 1
        self.count += 1
        self.total += value
        if value > self.maximum:
            self.maximum = value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self.count, self.total, self.maximum)

    def __repr__(self) -> str:
        snap = self.snapshot()
        return f"<Histogram n={snap.count} p50={snap.quantile(0.5):.3g} p99={snap.quantile(0.99):.3g} max={snap.maximum:.3g}>"
