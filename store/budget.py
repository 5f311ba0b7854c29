"""How many bytes a day the store may write: a bucket that fills at that rate and holds one day's worth. Pure.

Background writes (class 2: checkpoints) are refused when the bucket is empty. Writes that make room (class 1) or that a turn
waits for (class 0) may overdraw it by OVERDRAFT of a day; beyond that they are refused, too, and the tier counts as one that
takes no writes, so that RAM makes room otherwise. So in any d days at most (d + 1 + OVERDRAFT) days' worth are written.
"""

from __future__ import annotations

import json

DAY_S = 86_400.0
BACKGROUND = 2
OVERDRAFT = 0.125
UNKNOWN_SHARE = 1 / 24
"""What a store that has no record of its spending begins with: an hour's worth."""
SAVE_SHARE = 1 / 64
"""Spending is written down when it has grown by so much of a day's worth: what a crash forgets at most."""
SAVE_EVERY_S = 60.0


class Budget:
    """``bytes_per_day`` 0: no limit, and nothing is counted. Not thread-safe: the owner holds its lock. ``now``: monotonic
    seconds."""

    def __init__(self, bytes_per_day: int, level: float, now: float) -> None:
        self.bytes_per_day = bytes_per_day
        self._level = min(level, float(bytes_per_day))
        self._at = now
        self._booked = 0
        self._saved_level = self._level
        self._saved_at = now

    def left(self, now: float) -> int:
        """Bytes that background writes may still take now; below 0 while overdrawn."""
        self._fill(now)
        return int(self._level) - self._booked

    def allows(self, n_bytes: int, klass: int, now: float) -> bool:
        if not self.bytes_per_day:
            return True
        overdraft = 0.0 if klass >= BACKGROUND else OVERDRAFT * self.bytes_per_day
        return self.left(now) + overdraft >= n_bytes

    def exhausted(self, now: float) -> bool:
        """Not even what waits is written."""
        return bool(self.bytes_per_day) and not self.allows(1, 0, now)

    def book(self, n_bytes: int) -> None:
        """A write that was allowed is on its way."""
        self._booked += n_bytes

    def settle(self, booked_bytes: int, written_bytes: int) -> None:
        """It is over. What it wrote in vain is not counted."""
        self._booked -= booked_bytes
        if self.bytes_per_day:
            self._level -= written_bytes

    def save_due(self, now: float) -> bool:
        if not self.bytes_per_day:
            return False
        self._fill(now)
        moved = abs(self._saved_level - self._level)
        return moved >= SAVE_SHARE * self.bytes_per_day or (now - self._saved_at >= SAVE_EVERY_S and moved >= 1.0)

    def save(self, now: float, wall_s: float) -> bytes:
        """What ``load`` reads after a restart."""
        self._fill(now)
        self._saved_level, self._saved_at = self._level, now
        return json.dumps({"at_s": int(wall_s), "level_bytes": int(self._level) - self._booked}, sort_keys=True).encode()

    def _fill(self, now: float) -> None:
        elapsed = max(now - self._at, 0.0)
        self._at = max(now, self._at)
        self._level = min(self._level + elapsed * self.bytes_per_day / DAY_S, float(self.bytes_per_day))


def load(data: bytes | None, bytes_per_day: int, *, created: bool, now: float, wall_s: float) -> Budget:
    """Goes on where ``save`` left off; a new store (``created``) has a day's worth, an unknown past an hour's. A clock that
    went back fills nothing."""
    level = bytes_per_day * (1.0 if created else UNKNOWN_SHARE)
    try:
        fields = json.loads(data) if data else None
        if isinstance(fields, dict):
            elapsed = min(max(wall_s - float(fields["at_s"]), 0.0), 2 * DAY_S)
            level = float(fields["level_bytes"]) + elapsed * bytes_per_day / DAY_S
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    if level != level or level < -OVERDRAFT * bytes_per_day:  # not a number, or more than can be owed (the limit was lowered)
        level = -OVERDRAFT * bytes_per_day
    return Budget(bytes_per_day, level, now)
