"""What a tick takes first, and that it decides once for all that it took."""

from __future__ import annotations

import pytest
from kvalet.runtime.plan import StepResult
from kvalet.sched import commands, events
from kvalet.sched.core import Core
from kvalet.sched.turns import EndReason, TurnId
from schedworld import NoDisk, config
from scripted_core import Script, running

pytestmark = pytest.mark.anyio


class Counting(Script):
    """Counts how often it was asked to decide, and what it had heard by then."""

    def __init__(self) -> None:
        super().__init__()
        self.decided: list[int] = []

    def decide(self) -> list[commands.Command]:
        self.decided.append(len(self.seen))
        return super().decide()


def ask(core: Script, n: int) -> bool:
    return len(core.seen) >= n


async def test_a_step_goes_before_everything_and_is_decided_alone() -> None:
    core = Counting()
    async with running(core) as scheduler:
        ticker = scheduler._ticker
        ticker.inbox.post_local(events.Tick)
        ticker.inbox.post_local(events.Tick)
        ticker.inbox.post(lambda now: events.StepDone(now, StepResult(0, ())), urgent=True)
        assert await ticker.until(lambda: ask(core, 3), 10.0)
        assert [type(event) for event in core.seen] == [events.StepDone, events.Tick, events.Tick]
        assert core.decided[0] == 1


async def test_many_events_are_decided_together() -> None:
    core = Counting()
    async with running(core) as scheduler:
        for _ in range(20):
            scheduler._ticker.inbox.post_local(events.Tick)
        assert await scheduler._ticker.until(lambda: ask(core, 20), 10.0)
        assert core.decided[-1] == 20
        assert len(core.decided) < 20


async def test_steps_that_never_end_to_come_starve_nobody() -> None:
    """A device faster than the loop: each result brings the next one before the tick is over."""
    core = Counting()
    async with running(core) as scheduler:
        inbox = scheduler._ticker.inbox

        def result(now: float) -> events.Event:
            if len(core.seen) < 2000:
                inbox.post(result, urgent=True)
            return events.StepDone(now, StepResult(0, ()))

        inbox.post(result, urgent=True)
        turn = TurnId(7)
        for _ in range(5):
            inbox.post_local(lambda now: events.Blocked(now, turn))
        assert await scheduler._ticker.until(lambda: any(isinstance(e, events.Blocked) for e in core.seen), 10.0)
        assert await scheduler._ticker.until(lambda: sum(isinstance(e, events.Blocked) for e in core.seen) == 5, 10.0)
        assert await scheduler._ticker.until(lambda: ask(core, 2000), 10.0)


async def test_an_event_of_which_nothing_follows_is_settled_later() -> None:
    """``handle`` is ``take_in`` and ``decide``; without an event there is nothing to decide."""
    core = Core(config(), NoDisk())
    assert core.decide() == []
    core.take_in(events.Cancel(0.0, TurnId(1), EndReason.CANCELLED))
    assert core._board.unsettled
    assert core.decide() == []
    assert not core._board.unsettled
