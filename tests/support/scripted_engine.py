"""An engine that plays scripts, for tests of the HTTP surface: what the routes see of the real one, with every step in the
test's hands. Text is one byte per token id, so ids, bytes and text are easy to compare."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
from kvalet.api.errors import ApiError
from kvalet.api.requests import ChatRequest, CompletionRequest, Delta, TextDelta, TurnEnd
from kvalet.runtime.plan import TokenLogprob
from kvalet.sched.status import DrainReport
from kvalet.sched.turns import EndReason, TurnReport

VOCAB = 300


@dataclass(frozen=True)
class Model:
    id: str = "m"
    context_tokens: int = 1000
    vocab_size: int = VOCAB
    created: int = 1_700_000_000


def text_deltas(text: str, *, logprobs: bool = False, k: int = 0) -> list[TextDelta]:
    """One delta per character; ids are its UTF-8 bytes."""
    deltas = []
    for character in text:
        ids = tuple(character.encode())
        values = tuple(TokenLogprob(i, -0.5, tuple((i + n, -0.5 - n) for n in range(k))) for i in ids) if logprobs else ()
        deltas.append(TextDelta(character, ids, values))
    return deltas


def ended(finish: str = "stop", reason: EndReason = EndReason.STOP, **fields: Any) -> TurnEnd:
    report = TurnReport(prompt_tokens=10, completion_tokens=3, computed_tokens=4, resident_tokens=6)
    return replace(TurnEnd(finish, reason, report), **fields)


Step = Delta | TurnEnd | asyncio.Event | Callable[[], None]


class ScriptedTurn:
    """Plays its steps: deltas are given, events are waited for, callables are called. Without an end of its own it goes on
    until it is cancelled. Once it was cancelled only the end comes."""

    def __init__(self, turn_id: str, steps: Iterable[Step]) -> None:
        self.id = turn_id
        self.cancels = 0
        self.over = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._forced: TurnEnd | None = None
        self._steps = iter(steps)

    @property
    def cancelled(self) -> bool:
        """Cancelled before it had ended."""
        return self._forced is not None and self._forced.reason is EndReason.CANCELLED

    def __aiter__(self) -> AsyncIterator[Delta | TurnEnd]:
        return self

    async def __anext__(self) -> Delta | TurnEnd:
        if self.over.is_set():
            raise StopAsyncIteration
        while self._forced is None:
            step = next(self._steps, self._interrupted)
            if isinstance(step, asyncio.Event):
                await self._wait_for(step)
            elif callable(step):
                step()
            else:
                if isinstance(step, TurnEnd):
                    self.over.set()
                return step
        self.over.set()
        return self._forced

    async def _wait_for(self, event: asyncio.Event) -> None:
        async with anyio.create_task_group() as group:

            async def first(one: asyncio.Event) -> None:
                await one.wait()
                group.cancel_scope.cancel()

            group.start_soon(first, event)
            group.start_soon(first, self._interrupted)

    def cancel(self) -> None:
        self.cancels += 1
        self.end(EndReason.CANCELLED)

    def end(self, reason: EndReason) -> None:
        """The turn ends with ``reason`` unless it has ended."""
        if not self.over.is_set() and self._forced is None:
            self._forced = ended("error", reason)
            self._interrupted.set()


@dataclass
class ScriptedEngine:
    """``script`` makes the steps of each turn, or raises ApiError. ``before`` is awaited first, as tokenising would be."""

    script: Callable[[ChatRequest | CompletionRequest], Iterable[Step]] = lambda request: [*text_deltas("hi"), ended()]
    model: Model = field(default_factory=Model)
    before: asyncio.Event | None = None
    is_ready: tuple[bool, str] = (True, "")
    statistics_value: Any = None
    on_device_lost: Callable[[str], None] | None = None
    requests: list[ChatRequest | CompletionRequest] = field(default_factory=list)
    turns: list[ScriptedTurn] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    drains: list[float] = field(default_factory=list)

    async def start_chat(self, request: ChatRequest) -> ScriptedTurn:
        return await self._start(request, "chatcmpl")

    async def start_completion(self, request: CompletionRequest) -> ScriptedTurn:
        return await self._start(request, "cmpl")

    async def _start(self, request: ChatRequest | CompletionRequest, kind: str) -> ScriptedTurn:
        self.requests.append(request)
        self.asked.set()
        if self.before is not None:
            await self.before.wait()
        turn = ScriptedTurn(f"{kind}-{len(self.turns)}", self.script(request))
        self.turns.append(turn)
        self.started.set()
        return turn

    @property
    def running(self) -> int:
        return sum(not turn.over.is_set() and not turn.cancelled for turn in self.turns)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def ready(self) -> tuple[bool, str]:
        return self.is_ready

    def statistics(self) -> Any:
        if isinstance(self.statistics_value, Exception):
            raise self.statistics_value
        return self.statistics_value

    def banner(self) -> list[str]:
        return ["scripted engine"]

    async def drain(self, seconds: float) -> Any:
        """Turns still running after ``seconds`` end with ``shutdown``."""
        self.drains.append(seconds)
        with anyio.move_on_after(seconds):
            for turn in self.turns:
                await turn.over.wait()
        for turn in self.turns:
            turn.end(EndReason.SHUTDOWN)
        return DrainReport(True, 0)


def refused(message: str, **fields: Any) -> Callable[[Any], Iterable[Step]]:
    """A script that refuses."""

    def script(request: Any) -> Iterable[Step]:
        raise ApiError(message, **fields)

    return script
