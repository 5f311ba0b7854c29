"""A scheduler around a core that is a script, for tests of the shell alone: defects, bounds, closing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from kvalet.runtime.plan import SamplingParams, StepPlan, StepResult
from kvalet.sched import commands, events
from kvalet.sched.config import SchedConfig
from kvalet.sched.loop import Scheduler
from kvalet.sched.turns import Ended, TurnReport, TurnSpec

CONFIG = SchedConfig(page_tokens=16, chunk_tokens=64, n_pages=9, context_tokens=128, identity=b"i" * 32)
Reply = Callable[[Any], list[commands.Command]]


def accept(event: events.Submit) -> list[commands.Command]:
    return [commands.Accept(event.spec.turn)]


def end_cancelled(event: events.Cancel) -> list[commands.Command]:
    return [commands.End(event.turn, Ended(event.reason, TurnReport()))]


class Script:
    """A core that answers events by a table and hands out the plans it was given."""

    def __init__(self, replies: dict[type[events.Event], Reply] | None = None) -> None:
        self.replies: dict[type[events.Event], Reply] = {events.Submit: accept, events.Cancel: end_cancelled, **(replies or {})}
        self.config = CONFIG
        self.seen: list[events.Event] = []
        self.plans: list[StepPlan] = []
        self.checks = 0
        self.slices = 1
        self.checked_all = anyio.Event()
        self.check_error: Exception | None = None
        self._out: list[commands.Command] = []

    def measure_with(self, stopwatch: Callable[[], float]) -> None:
        self.stopwatch = stopwatch

    def take_in(self, event: events.Event) -> None:
        self._out += self.handle(event)

    def decide(self) -> list[commands.Command]:
        out, self._out = self._out, []
        return out

    def handle(self, event: events.Event) -> list[commands.Command]:
        self.seen.append(event)
        return self.replies.get(type(event), lambda _: [])(event)

    def plan(self) -> StepPlan | None:
        return self.plans.pop(0) if self.plans else None

    def check_some(self) -> bool:
        self.checks += 1
        if self.check_error is not None:
            raise self.check_error
        if self.checks < self.slices:
            return False
        self.checked_all.set()
        return True

    def statistics(self) -> Counter[str]:
        return Counter(type(event).__name__ for event in self.seen)


class Engine:
    """Computes nothing; can raise or wait."""

    synchronous = True

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def launch(self, plan: StepPlan) -> StepPlan:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return plan

    def finish(self, launched: StepPlan) -> StepResult:
        return StepResult(launched.step, ())


class NoCopies:
    def __init__(self) -> None:
        self.closed = 0

    def copy_out(self, *_: object) -> None: ...

    def copy_in(self, *_: object) -> None: ...

    def close(self) -> None:
        self.closed += 1


@asynccontextmanager
async def running(core: Script, engine: Engine | None = None, **options: Any) -> AsyncIterator[Scheduler]:
    copier = NoCopies()
    with anyio.fail_after(20):
        async with Scheduler(
            core, engine or Engine(), copier, None, lambda _: memoryview(b""), write_timeout_s=60.0, **options
        ) as scheduler:
            yield scheduler
    assert copier.closed == 1
    assert scheduler.statistics().open_turns == 0


def spec(scheduler: Scheduler) -> TurnSpec:
    return TurnSpec(scheduler.next_turn_id(), (1, 2, 3), SamplingParams(), b"s" * 32)


async def only_end(stream: Any) -> Ended:
    items = [item async for item in stream]
    assert len(items) == 1
    assert isinstance(items[0], Ended)
    return items[0]
