"""Frozen answers of the scheduler about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvalet.sched.lag_meter import LagStatistics
from kvalet.sched.stats import Totals


@dataclass(frozen=True, slots=True)
class DrainReport:
    """``finished``: the core said that nothing is left to do or its deadline has passed. ``left_behind``: chunks that did
    not reach the disk; None where the core did not say (it failed, or was not heard in time). ``records_left``: branches of
    named sessions whose record does not say all of them. ``lost_pages``, ``lost_chunks``: what went with a lost device
    (``Counters.lost_device_pages``)."""

    finished: bool
    left_behind: int | None
    records_left: int = 0
    lost_pages: int = 0
    lost_chunks: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """``device_lost``, ``violation``: what broke, None while all is well. ``core``: the core's own ``statistics()``.
    ``transfers_in_flight``: copies, reads and writes without an answer yet. ``stalled_s``: seconds without a step while
    turns are open that could go on."""

    open_turns: int
    blocked_turns: int
    waiting_postings: int
    steps_in_flight: int
    transfers_in_flight: int
    duplicate_answers: int
    closing: bool
    device_lost: str | None
    violation: str | None
    totals: Totals
    lag: LagStatistics
    stalled_s: float
    core: Any
