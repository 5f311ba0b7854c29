"""Waiting for time: many wishes to be woken, one timer of the loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from heapq import heappop, heappush

GRID_MS = 1
"""Wishes within one millisecond are one wake-up, so the number kept is bounded by the horizon, whoever asks how often."""


class Wakeups:
    """Calls ``due`` at or after each time asked for, never before it by ``clock``. Loop thread only.

    Event loops round timers, and may fire early: an early timer is set again for what is left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], due: Callable[[], None]) -> None:
        self._loop = loop
        self._clock = clock
        self._due = due
        self._heap: list[int] = []
        self._waiting: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when: float) -> None:
        """``when``: seconds of the clock; in the past means soon."""
        ms = math.ceil(when * 1e3 / GRID_MS) * GRID_MS
        if ms not in self._waiting:
            self._waiting.add(ms)
            heappush(self._heap, ms)
            self._arm()

    def close(self) -> None:
        self._heap.clear()
        self._waiting.clear()
        self._arm()

    def _arm(self) -> None:
        first_ms = self._heap[0] if self._heap else None
        if self._timer is not None:
            if first_ms == self._timer_ms:
                return
            self._timer.cancel()
            self._timer = None
        if first_ms is not None:
            self._timer_ms = first_ms
            self._timer = self._loop.call_later(max(0.0, first_ms / 1e3 - self._clock()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_ms = self._clock() * 1e3
        is_due = False
        while self._heap and self._heap[0] <= now_ms:
            self._waiting.remove(heappop(self._heap))
            is_due = True
        self._arm()
        if is_due:
            self._due()

    def __repr__(self) -> str:
        return f"<Wakeups waiting={len(self)}>"
