"""Who has asked about a session and waits for the core's answer."""

from __future__ import annotations

import asyncio
import itertools

from kvalet.sched.commands import TellSession
from kvalet.sched.errors import Refused
from kvalet.sched.events import AskSession
from kvalet.sched.inbox import Inbox
from kvalet.sched.session_state import SessionState
from kvalet.sched.turns import Refusal

MAX_WAITING = 1024
"""Questions without an answer; one more is refused as ``queue_full``."""


class Questions:
    """Loop thread only. Each question gets one answer, or ``Refused`` when there is no room for the session or the scheduler
    ends. A caller cancelled while it waits leaves nothing behind; what it wished for happens all the same."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: Inbox) -> None:
        self._loop = loop
        self._inbox = inbox
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[SessionState | None]] = {}
        self._ended = ""

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, session: str, tenant: str, pinned: bool | None) -> SessionState:
        """``pinned`` None: only a question."""
        if self._ended:
            raise Refused(Refusal.CLOSING, self._ended)
        if len(self._waiting) >= MAX_WAITING:
            raise Refused(Refusal.QUEUE_FULL, f"{MAX_WAITING} questions wait for an answer", 1.0)
        number = next(self._numbers)
        future: asyncio.Future[SessionState | None] = self._loop.create_future()
        self._waiting[number] = future
        self._inbox.post_local(lambda now: AskSession(now, number, session, tenant, pinned))
        try:
            state = await future
        finally:
            self._waiting.pop(number, None)
        if self._ended:
            raise Refused(Refusal.CLOSING, self._ended)
        if state is None:
            raise Refused(Refusal.SESSIONS_FULL, "no session can be forgotten to make room for one more")
        return state

    def tell(self, command: TellSession, _now: float) -> None:
        future = self._waiting.pop(command.request, None)
        if future is not None and not future.done():
            future.set_result(command.state)

    def end_all(self, why: str) -> None:
        """The core answers no more."""
        self._ended = self._ended or why
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)

    def __repr__(self) -> str:
        return f"<Questions waiting={len(self)}>"
