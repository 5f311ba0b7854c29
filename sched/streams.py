"""A turn's way out: a bounded channel between the scheduler, which never waits, and one reader, which may be slow or gone.

The scheduler holds the ``Channel``, the reader the ``TurnStream``. Both live on the loop's thread. The reader being slow
is a fact for the scheduler (``Blocked``, ``Unblocked``), and so is its disappearance: when the last reference to a
``TurnStream`` goes before the turn has ended, the turn is cancelled, whether or not anybody called ``close``.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from kvalet.sched.errors import StreamBusy
from kvalet.sched.turns import Ended, EndReason, Piece, TurnId

Item = Piece | Ended


class Signals(Protocol):
    """Whom a channel tells. ``abandoned`` may be called on any thread (garbage collection), the others on the loop's."""

    def blocked(self, turn: TurnId) -> None: ...

    def unblocked(self, turn: TurnId) -> None: ...

    def cancel(self, turn: TurnId, reason: EndReason) -> None: ...

    def abandoned(self, channel: Channel) -> None: ...


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """``merged``: pieces that found the channel full and were joined to its last piece."""

    turn: TurnId
    capacity_pieces: int
    waiting_pieces: int
    blocked: bool
    merged: int
    discarded: int
    closed: bool
    ended: bool


def join(first: Piece, second: Piece) -> Piece:
    """One piece that says what the two said, in order."""
    return Piece(first.ids + second.ids, first.text + second.text, first.logprobs + second.logprobs)


class Channel:
    """The scheduler's end. No method waits; all run on the loop's thread.

    At the bound: the piece that fills the channel raises ``blocked``; what still comes (steps in flight) is joined to the
    last piece, so the number of pieces never exceeds ``capacity_pieces``. Below half full it raises ``unblocked``.
    When nothing was taken for ``write_timeout_s`` while blocked, the turn is cancelled with ``write_timeout``.
    The end is kept beside the pieces: it always fits, and it is taken last.
    """

    __slots__ = (
        "_blocked", "_capacity", "_clock", "_closed", "_discarded", "_end_taken", "_ended", "_loop", "_merged", "_pieces",
        "_signals", "_taken_at", "_timer", "_waiter", "_write_timeout_s", "put_at", "turn",
    )  # fmt: skip

    def __init__(
        self,
        turn: TurnId,
        capacity_pieces: int,
        write_timeout_s: float,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        signals: Signals,
    ) -> None:
        self.turn = turn
        self.put_at: float | None = None
        """Clock time of the last piece with tokens; None at first and after a pause, so that gaps count only what the
        scheduler is to blame for."""
        self._capacity = max(1, capacity_pieces)
        self._write_timeout_s = write_timeout_s
        self._loop = loop
        self._clock = clock
        self._signals = signals
        self._pieces: deque[Piece] = deque()
        self._ended: Ended | None = None
        self._end_taken = False
        self._closed = False
        self._blocked = False
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._merged = 0
        self._discarded = 0

    @property
    def ended(self) -> Ended | None:
        return self._ended

    @property
    def over(self) -> bool:
        """The end has been taken: nothing will come any more."""
        return self._end_taken

    def put(self, piece: Piece) -> None:
        """Pieces after ``close`` or after the end are counted and dropped."""
        if self._closed or self._ended is not None:
            self._discarded += 1
            return
        if len(self._pieces) >= self._capacity:
            self._pieces[-1] = join(self._pieces[-1], piece)
            self._merged += 1
        else:
            self._pieces.append(piece)
            if len(self._pieces) == self._capacity and not self._blocked:
                self._block()
        self._wake()

    def finish(self, ended: Ended) -> None:
        """The turn's end. The first one stands; more than one would be a defect and changes nothing."""
        if self._ended is None:
            self._ended = ended
            self._stop_timer()
            self._wake()

    def take(self) -> Item | None:
        """The oldest item, or None when there is none now (ask ``over`` whether there ever will be)."""
        if self._pieces:
            piece = self._pieces.popleft()
            if self._blocked:
                self._taken_at = self._clock()
                if 2 * len(self._pieces) < self._capacity:
                    self._unblock()
            return piece
        if self._ended is not None and not self._end_taken:
            self._end_taken = True
            return self._ended
        return None

    async def wait(self) -> None:
        """Until ``take`` has something. Cancelling the wait loses nothing. ``StreamBusy`` if somebody waits already."""
        if self._waiter is not None:
            raise StreamBusy(f"two readers wait for turn {self.turn}")
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """The reader wants no more. What was not read is dropped; a turn that has not ended is cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._discarded += len(self._pieces)
        self._pieces.clear()
        self._stop_timer()
        if self._ended is None:
            self._signals.cancel(self.turn, EndReason.CANCELLED)

    def abandon(self) -> None:
        """The reader's end was garbage collected, on whatever thread."""
        if not self._closed and self._ended is None:
            self._signals.abandoned(self)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(
            self.turn, self._capacity, len(self._pieces), self._blocked, self._merged, self._discarded, self._closed,
            self._ended is not None,
        )  # fmt: skip

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _block(self) -> None:
        self._blocked = True
        self.put_at = None
        self._taken_at = self._clock()
        self._signals.blocked(self.turn)
        self._timer = self._loop.call_later(self._write_timeout_s, self._check_write_timeout)

    def _unblock(self) -> None:
        self._blocked = False
        self._stop_timer()
        if self._ended is None:
            self._signals.unblocked(self.turn)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_write_timeout(self) -> None:
        left_s = self._taken_at + self._write_timeout_s - self._clock()
        if left_s > 0.0:  # something was taken since the timer was set, or the timer fired early
            self._timer = self._loop.call_later(left_s, self._check_write_timeout)
            return
        self._timer = None
        self._signals.cancel(self.turn, EndReason.WRITE_TIMEOUT)


class TurnStream:
    """The reader's end: ``async for item in stream`` gives ``Piece`` items and, last, exactly one ``Ended``.

    One reader at a time. A read that is cancelled (a timeout for keep-alive comments, say) has taken nothing. Items that
    already wait are given without suspending: at most ``TurnSpec.stream_pieces`` in a row. Also an async context manager
    that closes at its end.
    """

    __slots__ = ("__weakref__", "_channel")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        weakref.finalize(self, channel.abandon).atexit = False

    @property
    def turn(self) -> TurnId:
        return self._channel.turn

    @property
    def ended(self) -> Ended | None:
        """The turn's end as soon as the scheduler knows it, even if pieces still wait to be read."""
        return self._channel.ended

    def close(self) -> None:
        """The reader wants no more pieces: synchronous, never waits, idempotent. If the turn runs it ends as
        ``cancelled`` at the next tick; who goes on reading gets that ``Ended``."""
        self._channel.close()

    def statistics(self) -> ChannelStatistics:
        return self._channel.statistics()

    def __aiter__(self) -> TurnStream:
        return self

    async def __anext__(self) -> Item:
        while True:
            item = self._channel.take()
            if item is not None:
                return item
            if self._channel.over:
                raise StopAsyncIteration
            await self._channel.wait()

    async def __aenter__(self) -> TurnStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.statistics()
        word = "ended" if state.ended else "closed" if state.closed else "blocked" if state.blocked else "open"
        return f"<TurnStream turn={state.turn} {word} waiting={state.waiting_pieces}/{state.capacity_pieces}>"
