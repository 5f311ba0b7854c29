"""How late the event loop is: a heartbeat that measures its own delay.

Whatever holds the loop for longer than a beat shows up here: a callback that computes, a blocking call, or another thread
that keeps the interpreter lock.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvalet.sched.histograms import LAG_MS, Histogram, HistogramSnapshot

BEAT_S = 0.005
"""A stall of x ms is measured as x - 5 .. x ms. 200 beats a second cost about 0.3 % of one core."""


@dataclass(frozen=True, slots=True)
class LagStatistics:
    """Lag in milliseconds since the start (``total``) and since the last ``reset_window`` (``window``)."""

    total: HistogramSnapshot
    window: HistogramSnapshot


class LagMeter:
    """Beats on ``loop`` from ``start`` to ``stop``. Loop thread only. Keeps no task: one timer at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, beat_s: float = BEAT_S) -> None:
        self._loop = loop
        self._beat_s = beat_s
        self._total = Histogram(LAG_MS)
        self._window = Histogram(LAG_MS)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    @property
    def beats(self) -> int:
        return self._total.count

    def start(self) -> None:
        if self._timer is None:
            self._arm(time.perf_counter())

    def stop(self) -> None:
        """Idempotent; figures stay readable."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reset_window(self) -> None:
        self._window.reset()

    def statistics(self) -> LagStatistics:
        return LagStatistics(self._total.snapshot(), self._window.snapshot())

    def _arm(self, now: float) -> None:
        self._due = now + self._beat_s
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    def _beat(self) -> None:
        now = time.perf_counter()
        lag_ms = (now - self._due) * 1e3
        self._total.add(lag_ms)
        self._window.add(lag_ms)
        self._arm(now)

    def __repr__(self) -> str:
        return f"<LagMeter beats={self.beats} {self._window!r}>"
