"""When the disk misbehaves: stop reading for a while, or stop writing until a probe succeeds. Pure; times are passed in."""

from __future__ import annotations

from collections import deque


class ReadBreaker:
    """``errors`` failures within ``window_s`` open it for ``open_s`` seconds; then it is closed with a clean record."""

    def __init__(self, errors: int, window_s: float, open_s: float) -> None:
        self._limit = errors
        self._window_s = window_s
        self._open_s = open_s
        self._failures: deque[float] = deque(maxlen=errors)
        self._open_until = float("-inf")
        self.opened = 0

    def failed(self, now: float) -> None:
        self._failures.append(now)
        if len(self._failures) == self._limit and now - self._failures[0] <= self._window_s:
            self._open_until = now + self._open_s
            self._failures.clear()
            self.opened += 1

    def is_open(self, now: float) -> bool:
        return now < self._open_until


class WriteBreaker:
    """The first failure opens it; it stays open until ``probe_passed``. ``why`` says what failed ("" = closed)."""

    def __init__(self, probe_every_s: float) -> None:
        self._every_s = probe_every_s
        self._next_probe = 0.0
        self.why = ""
        self.opened = 0

    @property
    def is_open(self) -> bool:
        return bool(self.why)

    def failed(self, now: float, why: str) -> None:
        if not self.why:
            self.opened += 1
        self.why = why
        self._next_probe = now + self._every_s

    def probe_due(self, now: float) -> bool:
        return self.is_open and now >= self._next_probe

    def probe_failed(self, now: float, why: str) -> None:
        self.why = why
        self._next_probe = now + self._every_s

    def probe_passed(self) -> None:
        self.why = ""
