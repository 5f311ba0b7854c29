"""The tick: postings in, commands out, steps to the engine thread. Synchronous from end to end.

A tick takes a bounded number of postings from the inbox, hands their events to the core, lets it decide once, carries out its
commands, asks for plans until there is none, and hands them to the engine thread. A step's result goes before all else, and so
does the plan that follows from it: the device waits for it. Ticks are plain callbacks of the loop: nothing in
them awaits, so no task can be cancelled in the middle of one, no request's cancel scope contains them, and no task has to
be kept alive. Nobody polls: a completion wakes the loop, time by ``WakeAt``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import anyio
from kvalet.runtime.plan import SlotId, StepPlan, StepResult
from kvalet.sched import commands, events
from kvalet.sched.config import SchedConfig
from kvalet.sched.engine_thread import EngineThread
from kvalet.sched.in_flight import InFlight
from kvalet.sched.inbox import Inbox
from kvalet.sched.open_turns import OpenTurns
from kvalet.sched.ports import CopierPort, EnginePort, StorePort
from kvalet.sched.questions import Questions
from kvalet.sched.record_jobs import RecordJobs
from kvalet.sched.stats import Stats
from kvalet.sched.turns import EndReason, Refusal
from kvalet.sched.wakeups import Wakeups

log = logging.getLogger(__name__)

MAX_POSTINGS_PER_TICK = 256
MAX_TICK_S = 0.002
"""After so many postings, or so long, the loop gets its turn before the next tick; one posting is never cut short."""
CHECK_INTERVAL_S = 0.1
"""The core checks itself when nothing runs: a slice at most this often and at most 1 % of the time, until all was looked at."""


class DecisionCore(Protocol):
    """What the loop needs of ``sched.core.Core``."""

    @property
    def config(self) -> SchedConfig: ...

    def take_in(self, event: events.Event) -> None: ...

    def decide(self) -> list[commands.Command]: ...

    def plan(self) -> StepPlan | None: ...

    def check_some(self) -> bool: ...

    def measure_with(self, stopwatch: Callable[[], float]) -> None: ...

    def statistics(self) -> Any: ...


class Ticker:
    """Owns the inbox and everything that posts to it. Loop thread only; the posting callbacks excepted.

    After ``retire``, and after the core has raised, postings still run (books below are settled, transfers are answered)
    but the core hears nothing and plans nothing.
    """

    def __init__(
        self,
        core: DecisionCore,
        engine: EnginePort,
        copier: CopierPort,
        store: StorePort | None,
        slot_view: Callable[[SlotId], memoryview],
        *,
        write_timeout_s: float,
        clock: Callable[[], float],
        check_when_idle: bool,
        on_device_lost: Callable[[str], None],
        stats: Stats,
    ) -> None:
        """To be made on the loop's thread, while the loop runs. Nothing runs before ``start``."""
        self._loop = loop = asyncio.get_running_loop()
        self._core = core
        core.measure_with(time.perf_counter)
        self._clock = clock
        self._check_when_idle = check_when_idle
        self._on_device_lost = on_device_lost
        self._stats = stats
        self.inbox = inbox = Inbox(loop, self._tick)
        self.turns = OpenTurns(loop, clock, write_timeout_s, inbox, stats)
        self.transfers = InFlight(copier, store, slot_view, inbox.post, stats, self._copy_lost_device)
        self.records = RecordJobs(store, inbox.post)
        self.questions = Questions(loop, inbox)
        self.engine_thread = EngineThread(
            engine,
            core.config.lag,
            lambda result: inbox.post(partial(self._step_done, result), urgent=True),
            lambda message: inbox.post(partial(self._engine_failed, message)),
            lambda: inbox.post(self._engine_has_exited),
        )
        self.engine_exited = False
        self.device_lost: str | None = None
        self.violation: str | None = None
        self.retired = False
        self.left_behind: int | None = None
        self.records_left = 0
        self.lost_with_device = (0, 0)
        """What the core's ``Drained`` said."""
        self._wakeups = Wakeups(loop, clock, lambda: inbox.post_local(events.Tick))
        self._actions = self._action_table()
        self._latest = self._moved = clock()
        self._at_rest = True
        self._ticked: asyncio.Event | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._next_check = 0.0
        if store is not None:
            store.on_gone = self.transfers.gone

    def _action_table(self) -> dict[type[commands.Command], Callable[[Any, float], None]]:
        turns, transfers, records = self.turns, self.transfers, self.records
        return {
            commands.Accept: turns.accept,
            commands.Refuse: turns.refuse,
            commands.Emit: turns.emit,
            commands.End: turns.end,
            commands.CopyOut: lambda command, _: transfers.copy(command),
            commands.CopyIn: lambda command, _: transfers.copy(command),
            commands.ReadChunk: lambda command, _: transfers.store_job(command),
            commands.ReadTail: lambda command, _: transfers.store_job(command),
            commands.WriteChunk: lambda command, _: transfers.store_job(command),
            commands.WriteRecord: lambda command, _: records.write(command),
            commands.ReadRecords: lambda command, _: records.read(command),
            commands.DropRecord: lambda command, _: records.drop(command),
            commands.TellSession: self.questions.tell,
            commands.CancelTransfer: lambda command, _: transfers.cancel(command),
            commands.PinDisk: lambda command, _: transfers.disk_order(command),
            commands.UnpinDisk: lambda command, _: transfers.disk_order(command),
            commands.TouchDisk: lambda command, _: transfers.disk_order(command),
            commands.WakeAt: lambda command, _: self._wakeups.at(command.at),
            commands.Drained: self._drained,
        }

    def start(self) -> None:
        self.engine_thread.start()

    def retire(self) -> None:
        """The core is not asked again."""
        self.retired = True

    def stop(self) -> None:
        """No timer, no posting, no tick from now on."""
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None
        self._wakeups.close()
        self.inbox.close()

    def stalled_s(self) -> float:
        """Seconds without a step while turns are open that could go on; 0.0 without such turns. Turns whose readers are slow
        do not count. Transfers are no progress: a pool that turns restores over and over moves many bytes and no token."""
        return 0.0 if self._at_rest else max(0.0, self._clock() - self._moved)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether ``condition``, looked at after each tick, came true in time."""
        with anyio.move_on_after(timeout_s):
            while not condition():
                if self._ticked is None or self._ticked.is_set():
                    self._ticked = asyncio.Event()
                await self._ticked.wait()
        return condition()

    def _tick(self) -> None:
        began = time.perf_counter()
        self.inbox.begin()
        if self._at_rest:
            self._moved = self._clock()
        try:
            self._take_postings(began + MAX_TICK_S)
            self._plan_steps()
        except Exception as error:  # noqa: BLE001 - the scheduler's boundary: whatever it was, the turns must end
            self._violated(error)
        self._at_rest = len(self.turns) == self.turns.n_blocked
        if len(self.inbox):
            self.inbox.arm()
        elif self._is_idle():
            self._check_later()
        if self._ticked is not None:
            self._ticked.set()
        self._stats.tick_ms.add((time.perf_counter() - began) * 1e3)

    def _take_postings(self, until: float) -> None:
        """Results of steps first, and the plans that follow from them; then at least one other posting: nothing starves."""
        if self.inbox.urgent:
            self._hear(lambda: self.inbox.urgent)
            self._plan_steps()
        self._hear(lambda: not self.inbox.urgent and time.perf_counter() < until)

    def _hear(self, go_on: Callable[[], bool]) -> None:
        """Take a posting, and more while ``go_on`` says so; then have the core decide once for all of them."""
        heard = False
        for _ in range(MAX_POSTINGS_PER_TICK):
            posting = self.inbox.take()
            if posting is None:
                break
            self._latest = max(self._latest, self._clock())
            event = posting(self._latest)
            if event is not None and not self.retired:
                self._stats.events += 1
                self._core.take_in(event)
                heard = True
            if not go_on():
                break
        if heard and not self.retired:
            for command in self._core.decide():
                self._actions[type(command)](command, self._latest)

    def _plan_steps(self) -> None:
        if self.retired or self.device_lost is not None:
            return
        while self.engine_thread.has_room:
            plan = self._core.plan()
            if plan is None:
                self.engine_thread.nothing_after()
                return
            self.engine_thread.submit(plan)

    def _step_done(self, result: StepResult, now: float) -> events.Event:
        self.engine_thread.settle()
        self._stats.stepped(result)
        self._moved = now
        return events.StepDone(now, result)

    def _engine_failed(self, message: str, now: float) -> events.Event:
        log.error("the engine failed: %s", message)
        self.engine_thread.abandon()
        self._lose_device(message)
        return events.DeviceFailed(now, message)

    def _copy_lost_device(self, message: str) -> None:
        """A copy found the device lost, perhaps while no step runs: no plan goes to it any more. A step in flight may still
        fail, or never end; its result is not heard."""
        if self.device_lost is None:
            log.error("a copy failed, the device is lost: %s", message)
            self._lose_device(message)
            self.engine_thread.stop()
            self.inbox.post_local(lambda now: events.DeviceFailed(now, message))

    def _engine_has_exited(self, _now: float) -> None:
        self.engine_exited = True

    def _lose_device(self, message: str) -> None:
        if self.device_lost is None:
            self.device_lost = message
            self._loop.call_soon(self._on_device_lost, message)

    def _violated(self, error: Exception) -> None:
        """Last resort. The core is not asked again: what it says can no longer be trusted."""
        if self.violation is not None:
            log.error("after the violation: %s", error, exc_info=error)
            return
        headline = next(iter(str(error).splitlines()), "")  # what follows is the story: for the log, not for clients
        self.violation = f"{type(error).__name__}: {headline}"
        log.critical("the scheduler contradicts itself", exc_info=error)
        self.retired = True
        self.engine_thread.stop()
        self.turns.end_all(EndReason.INTERNAL, Refusal.DEVICE_LOST, f"internal error: {self.violation}")
        self.questions.end_all(f"internal error: {self.violation}")
        self._lose_device(self.violation)
        self.inbox.arm()  # for whoever waits for the next tick

    def _drained(self, command: commands.Drained, _now: float) -> None:
        self.left_behind, self.records_left = command.left_behind, command.records_left
        self.lost_with_device = (command.lost_pages, command.lost_chunks)

    def _is_idle(self) -> bool:
        return not len(self.turns) and not self.engine_thread.in_flight

    def _check_later(self) -> None:
        if self._check_when_idle and self._check_timer is None and not self.retired:
            self._check_timer = self._loop.call_later(max(0.0, self._next_check - time.monotonic()), self._check)

    def _check(self) -> None:
        self._check_timer = None
        if self.retired or not self._is_idle():
            return  # the tick that makes it idle again asks again
        began = time.monotonic()
        done = True
        try:
            done = self._core.check_some()
        except Exception as error:  # noqa: BLE001 - as in _tick
            self._violated(error)
        ended = time.monotonic()
        self._next_check = ended + max(CHECK_INTERVAL_S, 100.0 * (ended - began))
        if not done:
            self._check_later()
