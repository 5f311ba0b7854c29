"""The shell when the core, the device or a port is broken: turns end once, nobody hangs, everything is bounded.

The core is a script here: what it answers to each kind of event. The real core's behaviour is in the other loop tests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from kvalet.runtime.plan import SlotId, StepPlan
from kvalet.sched import commands, events, loop, open_turns, tick
from kvalet.sched.errors import Refused
from kvalet.sched.story import CoreDefect
from kvalet.sched.turns import Ended, EndReason, Piece, Refusal, TurnReport
from scripted_core import Engine, Script, only_end, running, spec

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def defect(_event: object = None) -> Any:
    raise CoreDefect("page 7 is free and owned\nstory, oldest first:\n  event the secret prompt of somebody")


def in_handle(core: Script) -> None:
    core.replies[events.CloseSession] = defect


def in_plan(core: Script) -> None:
    core.plan = defect  # type: ignore[method-assign]


def unknown_command(core: Script) -> None:
    core.replies[events.CloseSession] = lambda _: [commands.Command()]


def emit_after_end(core: Script) -> None:
    def late(_event: object) -> list[commands.Command]:
        turn = next(event.spec.turn for event in core.seen if isinstance(event, events.Submit))
        ended = commands.End(turn, Ended(EndReason.INTERNAL, TurnReport(), "page 7 ..."))
        return [ended, commands.Emit(turn, Piece((1,), "a"))]

    core.replies[events.CloseSession] = late


@pytest.mark.parametrize("breaks", [in_handle, in_plan, unknown_command, emit_after_end])
async def test_a_defect_ends_every_turn_once_as_internal(breaks: Callable[[Script], None], caplog: Any) -> None:
    core = Script()
    lost: list[str] = []
    async with running(core) as scheduler:
        scheduler.on_device_lost = lost.append
        streams = [await scheduler.submit(spec(scheduler)) for _ in range(3)]
        breaks(core)
        scheduler.close_session("any")
        for stream in streams:
            ended = await only_end(stream)
            assert ended.reason is EndReason.INTERNAL
            assert "secret" not in ended.message
        assert scheduler.statistics().violation is not None
        with pytest.raises(Refused) as refused:
            await scheduler.submit(spec(scheduler))
        assert refused.value.refusal is Refusal.DEVICE_LOST
        report = await scheduler.drain(30.0)
        assert (report.finished, report.left_behind) == (False, None)
        await anyio.wait_all_tasks_blocked()
        assert len(lost) == 1
        n_seen = len(core.seen)
        scheduler.close_session("other")
        await anyio.wait_all_tasks_blocked()
        assert len(core.seen) == n_seen  # the core is not asked again
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)
    assert scheduler.statistics().totals.ended[EndReason.INTERNAL] == 3


async def test_a_turn_that_waits_for_its_answer_is_refused_by_a_defect() -> None:
    core = Script({events.Submit: lambda _: []})
    async with running(core) as scheduler, anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(Refused, match="internal error"):
                await scheduler.submit(spec(scheduler))

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        in_handle(core)
        scheduler.close_session("any")


async def test_a_defect_found_by_the_idle_check_is_not_silent() -> None:
    core = Script()
    core.check_error = CoreDefect("books do not sum up")
    lost = asyncio.Event()
    async with running(core) as scheduler:
        scheduler.on_device_lost = lambda _: lost.set()
        scheduler.close_session("any")
        await lost.wait()
        assert scheduler.statistics().violation == "CoreDefect: books do not sum up"
        report = await scheduler.drain(30.0)
        assert not report.finished


async def test_the_idle_check_goes_on_until_all_was_looked_at() -> None:
    core = Script()
    core.slices = 3
    async with running(core) as scheduler:
        scheduler.close_session("any")
        with anyio.fail_after(10):
            await core.checked_all.wait()
    assert core.checks == 3


async def test_the_idle_check_comes_once_and_not_while_turns_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tick, "CHECK_INTERVAL_S", 60.0)
    core = Script()
    async with running(core) as scheduler:
        stream = await scheduler.submit(spec(scheduler))
        for _ in range(20):
            scheduler.close_session("any")
            await anyio.wait_all_tasks_blocked()
        assert core.checks == 0
        stream.close()
        await only_end(stream)
        for _ in range(20):
            scheduler.close_session("any")
            await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.05):
            await anyio.Event().wait()
        assert core.checks == 1  # the next one not before CHECK_INTERVAL_S
    silent = Script()
    async with running(silent, check_when_idle=False) as scheduler:
        scheduler.close_session("any")
        with anyio.move_on_after(0.05):
            await anyio.Event().wait()
    assert silent.checks == 0


async def test_a_failed_engine_ends_turns_and_lets_the_core_save_what_it_can() -> None:
    core, engine, lost = Script(), Engine(), []

    def fail(event: events.DeviceFailed) -> list[commands.Command]:
        turns = [seen.spec.turn for seen in core.seen if isinstance(seen, events.Submit)]
        return [commands.End(turn, Ended(EndReason.DEVICE_ERROR, TurnReport(), event.message)) for turn in turns]

    core.replies[events.DeviceFailed] = fail
    core.replies[events.BeginDrain] = lambda _: [commands.Drained(2)]
    engine.error = RuntimeError("device lost")
    async with running(core, engine) as scheduler:
        scheduler.on_device_lost = lost.append
        stream = await scheduler.submit(spec(scheduler))
        core.plans = [StepPlan(1, ())]
        scheduler.close_session("to wake the tick")
        ended = await only_end(stream)
        assert (ended.reason, ended.message) == (EndReason.DEVICE_ERROR, "RuntimeError: device lost")
        assert scheduler.device_lost == "RuntimeError: device lost"
        core.plans = [StepPlan(2, ())]  # nothing is planned for a lost device
        report = await scheduler.drain(5.0)
        assert (report.finished, report.left_behind) == (True, 2)
        assert core.plans == [StepPlan(2, ())]
        assert scheduler.statistics().violation is None
    assert lost == ["RuntimeError: device lost"]


@pytest.mark.parametrize("bound", ["postings", "time"])
async def test_more_events_than_a_tick_takes_leave_room_for_the_loop(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tick, "MAX_POSTINGS_PER_TICK", 10 if bound == "postings" else 1000)
    monkeypatch.setattr(tick, "MAX_TICK_S", 60.0 if bound == "postings" else 0.0)
    core = Script()
    in_between = 0

    def between() -> None:
        nonlocal in_between
        in_between += 1
        if len(core.seen) < 100:
            asyncio.get_running_loop().call_soon(between)

    async with running(core) as scheduler:
        for i in range(100):
            scheduler.close_session(str(i))
        between()
        while len(core.seen) < 100:
            await anyio.lowlevel.checkpoint()
        assert in_between >= (10 if bound == "postings" else 100)


async def test_times_never_run_backwards() -> None:
    times = iter([5.0, 3.0, 4.0, 9.0, 1.0])
    core = Script()
    async with running(core, clock=lambda: next(times, 9.5), check_when_idle=False) as scheduler:
        for i in range(4):
            scheduler.close_session(str(i))
        await anyio.wait_all_tasks_blocked()
        stamps = [event.now for event in core.seen]
        assert len(stamps) == 4
        assert stamps == sorted(stamps)


async def test_wake_at_becomes_a_tick_that_is_not_early() -> None:
    ticked = asyncio.Event()
    core = Script({events.Tick: lambda _: (ticked.set(), [])[1]})  # type: ignore[func-returns-value]
    async with running(core) as scheduler:
        at = scheduler.now() + 0.02
        core.replies[events.CloseSession] = lambda _: [commands.WakeAt(at), commands.WakeAt(at)]
        scheduler.close_session("any")
        await ticked.wait()
        ticks = [event for event in core.seen if isinstance(event, events.Tick)]
        assert len(ticks) == 1
        assert ticks[0].now >= at


async def test_refusals_are_told_with_their_retry_after() -> None:
    core = Script({events.Submit: lambda event: [commands.Refuse(event.spec.turn, Refusal.QUEUE_FULL, "full", 2.5)]})
    async with running(core) as scheduler:
        with pytest.raises(Refused, match="full") as refused:
            await scheduler.submit(spec(scheduler))
        assert (refused.value.refusal, refused.value.retry_after_s) == (Refusal.QUEUE_FULL, 2.5)
        assert scheduler.statistics().open_turns == 0
        assert scheduler.statistics().totals.refused[Refusal.QUEUE_FULL] == 1


async def test_the_door_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_turns, "MAX_UNANSWERED", 3)
    core = Script({events.Submit: lambda _: []})
    async with running(core) as scheduler, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(scheduler.submit, spec(scheduler))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(Refused) as refused:
            await scheduler.submit(spec(scheduler))
        assert refused.value.refusal is Refusal.QUEUE_FULL
        tasks.cancel_scope.cancel()


async def test_a_caller_cancelled_before_the_answer_cancels_its_turn_after_it() -> None:
    core = Script()
    async with running(core) as scheduler:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scheduler.submit, spec(scheduler))
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert [type(event) for event in core.seen] == [events.Submit, events.Cancel]
        assert scheduler.statistics().open_turns == 0


async def test_one_cancel_per_turn_and_the_first_reason_stands() -> None:
    core = Script()
    async with running(core) as scheduler:
        stream = await scheduler.submit(spec(scheduler))
        for reason in (EndReason.WRITE_TIMEOUT, EndReason.CANCELLED, EndReason.SHUTDOWN):
            scheduler.cancel(stream.turn, reason)
        stream.close()
        assert (await only_end(stream)).reason is EndReason.WRITE_TIMEOUT
        scheduler.cancel(stream.turn)  # ended: ignored
        await anyio.wait_all_tasks_blocked()
        assert [type(event) for event in core.seen] == [events.Submit, events.Cancel]


async def test_a_turn_id_is_used_once() -> None:
    async with running(Script()) as scheduler:
        one = spec(scheduler)
        await scheduler.submit(one)
        with pytest.raises(ValueError, match="open already"):
            await scheduler.submit(one)


async def test_drain_is_bounded_when_the_core_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DRAIN_GRACE_S", 0.02)
    async with running(Script()) as scheduler:
        report = await scheduler.drain(0.02)
        assert (report.finished, report.left_behind) == (False, None)


async def test_closing_is_bounded_when_nothing_ends_by_itself(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(loop, "CLOSE_S", 0.05)
    core, engine = Script({events.Cancel: lambda _: []}), Engine()
    engine.gate.clear()
    async with running(core, engine) as scheduler:
        stream = await scheduler.submit(spec(scheduler))
        core.replies[events.CloseSession] = lambda _: [commands.CopyOut(events.TransferId(1), (), SlotId(0))]
        core.plans = [StepPlan(1, ())]
        scheduler.close_session("any")
        await anyio.wait_all_tasks_blocked()
        assert scheduler.statistics().transfers_in_flight == 1
        assert scheduler.statistics().steps_in_flight == 1
    assert (await only_end(stream)).reason is EndReason.SHUTDOWN
    assert "engine thread did not end" in caplog.text
    engine.gate.set()
    assert scheduler._ticker.engine_thread.join(5)


async def test_submit_after_the_end_is_refused() -> None:
    async with running(Script()) as scheduler:
        pass
    with pytest.raises(Refused) as refused:
        await scheduler.submit(spec(scheduler))
    assert refused.value.refusal is Refusal.CLOSING


async def test_the_loop_beats_on_while_the_device_is_busy() -> None:
    core, engine = Script(), Engine()
    core.plans = [StepPlan(1, ())]
    engine.gate.clear()
    async with running(core, engine) as scheduler:
        scheduler.close_session("to wake the tick")
        await anyio.wait_all_tasks_blocked()
        scheduler.lag_meter.reset_window()
        with anyio.fail_after(30):
            while scheduler.statistics().lag.window.count < 20:
                with anyio.move_on_after(0.01):
                    await anyio.Event().wait()
        assert scheduler.statistics().steps_in_flight == 1
        engine.gate.set()
        await scheduler._ticker.until(lambda: scheduler.statistics().steps_in_flight == 0, 5)
