"""Sessions of the Python API: turns on one conversation, forks of it, and its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from kvalet.api.errors import ApiError
from kvalet.api.requests import ChatRequest, Delta, TurnEnd
from kvalet.api.sampling_check import check_sampling
from kvalet.api.turn import Turn
from kvalet.runtime.plan import SamplingParams
from kvalet.sched.session_state import SessionState
from kvalet.sched.turns import EndReason, TurnReport


class SessionEngine(Protocol):
    """What a session needs of ``api.engine.Engine``."""

    async def start_chat(self, request: ChatRequest) -> Turn: ...

    def session(self, id: str = "", tenant: str = "") -> Session: ...

    def close_session(self, id: str, tenant: str = "") -> None: ...

    async def session_state(self, id: str, tenant: str = "") -> SessionState: ...

    async def pin_session(self, id: str, tenant: str = "", *, pinned: bool = True) -> SessionState: ...

    def fork_session(self, parent: str, child: str, tenant: str = "") -> None: ...


class SessionTurn:
    """A turn that starts when it is first read: ``async for piece in turn``, or ``await turn.result()``.

    The last item is a ``TurnEnd``, exactly once. What is refused raises ApiError at the first read. Leaving the loop early
    does not end the turn, ``cancel`` or the last reference going does.
    """

    def __init__(self, engine: SessionEngine, request: ChatRequest) -> None:
        self._engine = engine
        self._request = request
        self._turn: Turn | None = None
        self._cancelled = False
        self._over = False

    @property
    def id(self) -> str:
        """ "" until it has started."""
        return self._turn.id if self._turn is not None else ""

    def __aiter__(self) -> AsyncIterator[Delta | TurnEnd]:
        return self

    async def __anext__(self) -> Delta | TurnEnd:
        if self._over:
            raise StopAsyncIteration
        turn = await self._started()
        if turn is None:
            self._over = True
            return _never_started()
        return await turn.__anext__()

    async def result(self) -> TurnEnd:
        """Read to the end; text, tool calls and ids are in it."""
        turn = await self._started()
        return _never_started() if turn is None else await turn.result()

    def cancel(self) -> None:
        """Synchronous, idempotent; who goes on reading gets the ``TurnEnd``. Before the start: it never starts."""
        self._cancelled = True
        if self._turn is not None:
            self._turn.cancel()

    async def _started(self) -> Turn | None:
        if self._turn is None and not self._cancelled:
            self._turn = await self._engine.start_chat(self._request)
            if self._cancelled:
                self._turn.cancel()
        return self._turn


def _never_started() -> TurnEnd:
    return TurnEnd("error", EndReason.CANCELLED, TurnReport(), "cancelled before it started")


class Session:
    """One conversation. Every turn brings the whole history, as OpenAI's chat API does; what the session adds is that its KV
    is kept, parked and brought back under its name. Also an async context manager that closes at its end."""

    def __init__(self, engine: SessionEngine, id: str, tenant: str = "") -> None:
        self.id = id
        self.tenant = tenant
        self._engine = engine
        self._closed = False

    def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        cache_salt: str = "",
        **sampling: Any,
    ) -> SessionTurn:
        """``messages`` and ``tools`` in the shape of OpenAI's chat API. ``tool_choice``: "auto", "none", "required", or the
        name of a tool. ``max_tokens`` None: what the context leaves. ``sampling``: fields of
        ``runtime.plan.SamplingParams`` (temperature, top_p, seed, stop, ...); ApiError for values out of range."""
        if self._closed:
            raise ApiError(f"Session {self.id!r} is closed.", code="session_closed")
        named = tool_choice not in ("auto", "none", "required")
        given: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
        for name, value in sampling.items():
            given[name] = tuple(value) if isinstance(value, list) else value
        request = ChatRequest(
            messages=tuple(dict(message) for message in messages),
            params=check_sampling(SamplingParams(**given)),
            max_tokens_given=max_tokens is not None,
            tools=tuple(dict(tool) for tool in tools),
            tool_choice="named" if named else tool_choice,
            tool_name=tool_choice if named else "",
            parallel_tool_calls=parallel_tool_calls,
            response_format=None if response_format is None else dict(response_format),
            session=self.id,
            tenant=self.tenant,
            cache_salt=cache_salt,
        )
        return SessionTurn(self._engine, request)

    def fork(self, new_id: str = "") -> Session:
        """A session that begins with all that this one has; nothing is copied or read until it differs."""
        child = self._engine.session(new_id, self.tenant)
        self._engine.fork_session(self.id, child.id, self.tenant)
        return child

    async def pin(self) -> SessionState:
        """From now on its KV is never lost, though it may still leave the device and RAM: its branches are written to the disk
        tier now and after each turn, at the lowest class, and the disk does not evict them. Holds across restarts until
        ``unpin`` or ``close``. Idempotent. Returns at once; ``info`` tells how much is safe (``saved_tokens``), and why the
        disk refused if it did (``refused``): then the last copy above it stays, unless a turn could not go on otherwise.
        ApiError without a disk tier."""
        return await self._engine.pin_session(self.id, self.tenant)

    async def unpin(self) -> SessionState:
        """It is a session like any other again. Idempotent."""
        return await self._engine.pin_session(self.id, self.tenant, pinned=False)

    async def info(self) -> SessionState:
        """How it stands: pinned, how many tokens have KV, how many of them a crash would not lose."""
        return await self._engine.session_state(self.id, self.tenant)

    async def close(self) -> None:
        """Its turns end as cancelled; its KV is kept only as far as others share it or nothing else needs the room. What the
        disk tier knows of it by name is forgotten. Idempotent."""
        if not self._closed:
            self._closed = True
            self._engine.close_session(self.id, self.tenant)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
