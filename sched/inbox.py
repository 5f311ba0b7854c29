"""Where everything that happens waits for the tick, from whatever thread it comes.

Two queues: the results of steps go first, because the device waits for what follows from them; everything else keeps its
order. So an answer of a copy, a job or a client may be heard after the result of a step that ended later. That is safe: what
a transfer works on is leased until its answer is heard, and what a client asks for is asked from the next step on; the random
walks of tests/sched do it all the time. There are never more than lag + 1 results, so nothing starves.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable

from kvalet.sched.events import Event

Posting = Callable[[float], Event | None]
"""Runs on the loop's thread at its turn in the inbox, with the clock's time: the event to handle, or None if there is
nothing left to tell. So times never run backwards between events, and what must happen on the loop's thread does."""


class Inbox:
    """First in, first out, what is ``urgent`` before the rest. ``post`` from any thread, the rest on the loop's thread.

    One wake-up of the loop is pending at a time, however many postings come before it: ``wake`` runs soon after the first.
    Bounded by what can be outstanding: one answer per step, copy and store job in flight, one submission per waiting
    caller (the loop refuses more), a few signals per open turn. After ``close`` postings are dropped (late completions of a
    store that outlives the loop).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._context = contextvars.Context()  # an empty one: no request's context variables reach the tick
        self._urgent: deque[Posting] = deque()
        self._postings: deque[Posting] = deque()
        self._armed = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._urgent) + len(self._postings)

    @property
    def urgent(self) -> bool:
        """The next posting to ``take`` is an urgent one."""
        return bool(self._urgent)

    def post(self, posting: Posting, *, urgent: bool = False) -> None:
        # Without a lock: append first, then look at the flag; begin() clears the flag first, then takes. Whoever sees the
        # flag still set has appended before the taking starts. Two threads may both see it unset: one wake-up too many.
        if self._closed:
            return
        (self._urgent if urgent else self._postings).append(posting)
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._wake, context=self._context)
            except RuntimeError:  # the loop has closed meanwhile: nobody is left to tell
                self._closed = True

    def post_local(self, posting: Posting) -> None:
        """``post``, cheaper, for the loop's own thread."""
        if self._closed:
            return
        self._postings.append(posting)
        self.arm()

    def arm(self) -> None:
        """Have ``wake`` called again soon."""
        if not self._armed:
            self._armed = True
            self._loop.call_soon(self._wake, context=self._context)

    def begin(self) -> None:
        """To be called before the first ``take`` of a tick."""
        self._armed = False

    def take(self) -> Posting | None:
        waiting = self._urgent or self._postings
        return waiting.popleft() if waiting else None

    def close(self) -> None:
        self._closed = True
        self._urgent.clear()
        self._postings.clear()

    def __repr__(self) -> str:
        return f"<Inbox postings={len(self)} {'closed' if self._closed else 'armed' if self._armed else 'quiet'}>"
