"""Every turn from its submission to its end: who waits for the answer, and the channel its pieces go to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvalet.sched.commands import Accept, Emit, End, Refuse
from kvalet.sched.errors import Refused
from kvalet.sched.events import Blocked, Cancel, Submit, Unblocked
from kvalet.sched.inbox import Inbox
from kvalet.sched.stats import Stats
from kvalet.sched.streams import Channel, TurnStream
from kvalet.sched.turns import Ended, EndReason, Refusal, TurnId, TurnReport, TurnSpec

MAX_UNANSWERED = 4096
"""Submissions that wait for the core's answer; one more is refused as ``queue_full`` at the door."""


class OpenTurns:
    """Loop thread only (``abandoned`` excepted). A turn is here from ``submit`` until its ``Refuse`` or ``End``.

    Each turn gets at most one ``Cancel`` posted, whatever asks for it: the first reason stands.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        write_timeout_s: float,
        inbox: Inbox,
        stats: Stats,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._write_timeout_s = write_timeout_s
        self._inbox = inbox
        self._stats = stats
        self._channels: dict[TurnId, Channel] = {}
        self._waiters: dict[TurnId, asyncio.Future[Refuse | None]] = {}
        self._cancelled: set[TurnId] = set()
        self._blocked: set[TurnId] = set()

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def n_blocked(self) -> int:
        return len(self._blocked)

    async def submit(self, spec: TurnSpec) -> TurnStream:
        """Waits for the core's answer only. ``Refused`` if it is no. Cancelled while waiting: the turn, accepted or not, is
        cancelled with it."""
        turn = spec.turn
        if turn in self._channels:
            raise ValueError(f"turn {turn} is open already; ids come from next_turn_id() and are used once")
        if len(self._waiters) >= MAX_UNANSWERED:
            self._stats.refused(Refusal.QUEUE_FULL)
            raise Refused(Refusal.QUEUE_FULL, f"{MAX_UNANSWERED} requests wait to be looked at", 1.0)
        channel = Channel(turn, spec.stream_pieces, self._write_timeout_s, self._loop, self._clock, self)
        waiter: asyncio.Future[Refuse | None] = self._loop.create_future()
        self._channels[turn] = channel
        self._waiters[turn] = waiter
        self._inbox.post_local(lambda now: Submit(now, spec))
        try:
            refuse = await waiter
        except asyncio.CancelledError:
            channel.close()
            raise
        if refuse is not None:
            raise Refused(refuse.refusal, refuse.message, refuse.retry_after_s)
        return TurnStream(channel)

    def accept(self, command: Accept, _now: float) -> None:
        self._stats.accepted += 1
        self._answer(command.turn, None)

    def refuse(self, command: Refuse, _now: float) -> None:
        self._stats.refused(command.refusal)
        self._forget(command.turn)
        self._answer(command.turn, command)

    def emit(self, command: Emit, now: float) -> None:
        channel = self._channels[command.turn]
        gap_ms = None
        if command.piece.ids:
            if channel.put_at is not None:
                gap_ms = (now - channel.put_at) * 1e3
            channel.put_at = now
        channel.put(command.piece)
        self._stats.emitted(command.piece, gap_ms)

    def end(self, command: End, _now: float) -> None:
        channel = self._channels[command.turn]
        self._forget(command.turn)
        self._stats.ended(command.ended.reason, command.ended.report)
        channel.finish(command.ended)

    def cancel(self, turn: TurnId, reason: EndReason) -> None:
        """Unknown, ended and already cancelled turns are ignored."""
        if turn in self._channels and turn not in self._cancelled:
            self._cancelled.add(turn)
            self._inbox.post_local(lambda now: Cancel(now, turn, reason))

    def cancel_all(self, reason: EndReason) -> None:
        for turn in list(self._channels):
            self.cancel(turn, reason)

    def end_all(self, reason: EndReason, refusal: Refusal, message: str) -> None:
        """Without the core: what was accepted ends with ``reason``, what was not is refused."""
        for turn in list(self._channels):
            if turn in self._waiters:
                self.refuse(Refuse(turn, refusal, message), 0.0)
            else:
                self.end(End(turn, Ended(reason, TurnReport(), message)), 0.0)

    def blocked(self, turn: TurnId) -> None:
        self._blocked.add(turn)
        self._inbox.post_local(lambda now: Blocked(now, turn))

    def unblocked(self, turn: TurnId) -> None:
        self._blocked.discard(turn)
        self._inbox.post_local(lambda now: Unblocked(now, turn))

    def abandoned(self, channel: Channel) -> None:
        def close(_now: float) -> None:
            channel.close()

        self._inbox.post(close)

    def _forget(self, turn: TurnId) -> None:
        self._channels.pop(turn, None)
        self._cancelled.discard(turn)
        self._blocked.discard(turn)

    def _answer(self, turn: TurnId, answer: Refuse | None) -> None:
        waiter = self._waiters.pop(turn, None)
        if waiter is not None and not waiter.done():  # done: whoever asked was cancelled, and the Cancel is on its way
            waiter.set_result(answer)

    def __repr__(self) -> str:
        return f"<OpenTurns open={len(self)} unanswered={len(self._waiters)} blocked={self.n_blocked}>"
