"""The scheduler's mind: events in, commands out, and ``plan() -> StepPlan``. Synchronous and deterministic.

No clock (time arrives in events), no await, no file, no torch. The caller hands some of its inbox to ``take_in``, carries out
the commands of ``decide`` in order, then calls ``plan`` until it answers None. All decisions are made in ``decide``; ``plan``
only lays out what turns own already. The same calls in the same order give the same commands. ``handle`` does both for one
event.

Seams left open on purpose: ``policy.rank_*`` (learned waits, pins, supersession, tenants' shares), ``matching.find_match``
(restore or recompute, running state), ``session.Branch`` (transcripts).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvalet.runtime.plan import StepPlan
from kvalet.sched import (
    admission,
    checkpoint,
    drain,
    growth,
    invariants,
    lifecycle,
    persist,
    planner,
    records,
    restore,
    results,
    resume,
    spill,
)
from kvalet.sched import events as ev
from kvalet.sched.board import Board
from kvalet.sched.commands import Command
from kvalet.sched.config import SchedConfig
from kvalet.sched.core_statistics import statistics
from kvalet.sched.counters import CoreStatistics
from kvalet.sched.patrol import Patrol
from kvalet.sched.ports import DiskView
from kvalet.sched.session import Turn
from kvalet.sched.states import TurnCause, TurnState
from kvalet.sched.transfer_record import Transfer, TransferKind
from kvalet.sched.turns import EndReason

Answer = ev.CopyDone | ev.CopyFailed | ev.ReadDone | ev.ReadFailed | ev.WriteDone | ev.WriteFailed


class Core:
    """Any exception out of ``handle``, ``plan`` or ``check`` is a defect (``story.CoreDefect`` where the core noticed it
    itself): the state is not to be trusted any more, the loop ends all turns with ``internal``."""

    def __init__(self, config: SchedConfig, disk: DiskView) -> None:
        self.config = config
        self._board = board = Board(config, disk)
        self._patrol = Patrol(board)
        board.sessions.may_forget = partial(records.may_forget, board)
        board.sessions.on_forget = partial(records.forget, board)
        self._handlers: dict[type[ev.Event], Callable[[Any], bool | None]] = {
            ev.Submit: self._submit,
            ev.Cancel: self._cancel,
            ev.Blocked: self._blocked,
            ev.Unblocked: self._unblocked,
            ev.CloseSession: self._close_session,
            ev.ForkSession: self._fork_session,
            ev.AskSession: self._ask_session,
            ev.StepDone: self._step_done,
            ev.DeviceFailed: self._device_failed,
            ev.CopyDone: self._copy_done,
            ev.CopyFailed: self._copy_failed,
            ev.ReadDone: self._read_done,
            ev.ReadFailed: self._read_failed,
            ev.WriteDone: self._write_done,
            ev.WriteFailed: self._write_failed,
            ev.RecordDone: self._record_done,
            ev.RecordFailed: self._record_failed,
            ev.RecordsRead: self._records_read,
            ev.DiskGone: self._disk_gone,
            ev.Tick: self._tick,
            ev.BeginDrain: self._begin_drain,
        }

    def __repr__(self) -> str:
        return f"Core({self.statistics()})"

    def handle(self, event: ev.Event) -> list[Command]:
        """Take in one event, decide everything that follows from it, and return what is to be done, in order."""
        self.take_in(event)
        return self.decide()

    def take_in(self, event: ev.Event) -> None:
        """What the event says becomes the state; what follows from it waits for ``decide``. Times must not run backwards.

        A handler that answers True says that nothing can follow (a chunk among many has come in): ``decide`` looks at nothing
        but the transfers that wait then."""
        board = self._board
        board.now = event.now
        board.counters.events += 1
        board.story.add("event", event)
        if not self._handlers[type(event)](event):
            board.unsettled = True

    def decide(self) -> list[Command]:
        """Decide everything that follows from the events taken in since the last call: many cost little more than one."""
        board = self._board
        if board.unsettled:
            board.victims_left = spill.MAX_VICTIMS
            self._expire()
            admission.settle(board)
        restore.pump(board)
        if board.unsettled:
            persist.pump(board)
            checkpoint.pump(board)
            records.pump(board)
            drain.pump(board)
            board.unsettled = False
        commands, board.out = board.out, []
        for command in commands:
            board.story.add("command", command)
        return commands

    def plan(self) -> StepPlan | None:
        """The next step; None when there is nothing to do or ``lag`` + 1 steps are in flight."""
        plan = planner.plan(self._board)
        if plan is not None:
            self._board.story.add("plan", plan)
        return plan

    def check(self) -> None:
        """All invariants (see ``invariants``). Raises ``CoreDefect`` with the story."""
        invariants.check(self._board)

    def check_some(self) -> bool:
        """The next slice of the invariants, in about a millisecond. True: since the last event, all were looked at."""
        return self._patrol.step()

    def measure_with(self, stopwatch: Callable[[], float]) -> None:
        """Seconds by which the record says how long a turn's history was looked for (``lookup_ms``); 0 without one."""
        self._board.stopwatch = stopwatch

    def tell(self) -> str:
        """The story so far."""
        return self._board.story.tell()

    def statistics(self) -> CoreStatistics:
        return statistics(self._board)

    # turns

    def _submit(self, event: ev.Submit) -> None:
        admission.submit(self._board, event.spec)

    def _cancel(self, event: ev.Cancel) -> None:
        turn = self._board.turns.get(event.turn)
        if turn is not None:
            lifecycle.end(self._board, turn, event.reason)

    def _blocked(self, event: ev.Blocked) -> None:
        turn = self._board.turns.get(event.turn)
        if turn is None or turn.blocked:
            return
        turn.blocked = True
        if turn.running:
            self._board.move(turn, TurnCause.BLOCKED)
        elif turn.state is TurnState.QUEUED:
            lifecycle.forget_want(self._board, turn)

    def _unblocked(self, event: ev.Unblocked) -> None:
        turn = self._board.turns.get(event.turn)
        if turn is None or not turn.blocked:
            return
        turn.blocked = False
        if turn.state is TurnState.PAUSED:
            decoding = len(turn.ids) > turn.feed_end
            self._board.move(turn, TurnCause.UNBLOCKED_DECODE if decoding else TurnCause.UNBLOCKED_PREFILL)
        elif turn.state is TurnState.QUEUED:
            lifecycle.remember_want(self._board, turn)

    def _close_session(self, event: ev.CloseSession) -> None:
        board = self._board
        session = board.sessions.close(event.tenant, event.session)
        records.close(board, session, event.tenant, event.session)
        if session is None:
            return
        for turn_id in sorted(session.turns):
            lifecycle.end(board, board.turns[turn_id], EndReason.CANCELLED, "its session was closed")
        for branch in session.branches:
            root = board.index.roots.get(branch.secret)
            if root is not None and not board.sessions.claimed(branch):
                path = board.index.walk(root, branch.ids, branch.kv_len)
                if path:
                    board.index.demote(path[-1])

    def _fork_session(self, event: ev.ForkSession) -> None:
        resume.fork(self._board, event)

    def _ask_session(self, event: ev.AskSession) -> None:
        resume.ask(self._board, event)

    # the device

    def _step_done(self, event: ev.StepDone) -> None:
        if not self._board.device_lost:
            results.on_step_done(self._board, event.result)

    def _device_failed(self, event: ev.DeviceFailed) -> None:
        """Every turn ends, every page is worthless. RAM and disk stay; transfers with the device still answer."""
        board = self._board
        if board.device_lost:
            return
        board.device_lost = event.message or "the device is lost"
        for record in board.steps:
            board.ledger.unlease_all(record.leases)
        board.steps.clear()
        for turn in sorted(board.turns.values(), key=lambda t: t.order):
            lifecycle.end(board, turn, EndReason.DEVICE_ERROR, event.message)
        board.closes.clear()
        spill.lose_all(board)

    def _transfer(self, event: Answer) -> Transfer:
        transfer = self._board.transfers.get(event.transfer)
        if transfer is None:
            raise self._board.story.defect(f"an answer for transfer {event.transfer}, which is over: {event}")
        return transfer

    def _copy_done(self, event: ev.CopyDone) -> bool:
        transfer = self._transfer(event)
        if transfer.kind is TransferKind.RESTORE:
            return restore.on_copy_done(self._board, transfer, event)
        if transfer.kind is TransferKind.SPILL:
            spill.on_copy_done(self._board, transfer, event)
        else:
            persist.on_copy_done(self._board, transfer)
        return False

    def _copy_failed(self, event: ev.CopyFailed) -> None:
        transfer = self._transfer(event)
        if transfer.kind is TransferKind.RESTORE:
            self._requeue(restore.on_copy_failed(self._board, transfer))
        elif transfer.kind is TransferKind.SPILL:
            spill.on_copy_failed(self._board, transfer, event.message)
        else:
            persist.on_failed(self._board, transfer, "copy")

    # the disk

    def _read_done(self, event: ev.ReadDone) -> None:
        self._requeue(restore.on_read_done(self._board, self._transfer(event), event))

    def _read_failed(self, event: ev.ReadFailed) -> None:
        self._board.counters.read_failures[event.reason] += 1
        self._requeue(restore.fail(self._board, self._transfer(event), event.reason))

    def _write_done(self, event: ev.WriteDone) -> None:
        persist.on_write_done(self._board, self._transfer(event), event)

    def _write_failed(self, event: ev.WriteFailed) -> None:
        persist.on_failed(self._board, self._transfer(event), event.reason)

    def _record_done(self, event: ev.RecordDone) -> None:
        records.on_done(self._board, event)

    def _record_failed(self, event: ev.RecordFailed) -> None:
        records.on_failed(self._board, event)

    def _records_read(self, event: ev.RecordsRead) -> None:
        for turn in resume.on_read(self._board, event):
            admission.go_on(self._board, turn)

    def _disk_gone(self, event: ev.DiskGone) -> None:
        board = self._board
        for key in event.keys:
            chunk = board.chunks.get(key)
            if chunk is not None:
                board.chunks.set_on_disk(chunk, board.disk.has(key))
        growth.on_gone(board, event.keys)

    def _requeue(self, turns: list[Turn]) -> None:
        for turn in turns:
            lifecycle.requeue(self._board, turn, preempted=False)

    # time

    def _tick(self, event: ev.Tick) -> None:
        """Nothing of its own: what time decides is looked at after every event."""

    def _expire(self) -> None:
        board = self._board
        for turn in board.rows.values():
            if turn.restores and board.now >= turn.restore_until:
                restore.cut_short(board, turn, 0, "deadline")
        if board.lines.loads:
            for turn in resume.expire(board):
                admission.go_on(board, turn)

    def _begin_drain(self, event: ev.BeginDrain) -> None:
        drain.begin(self._board, event.deadline)
