"""Plays workloads against a server: agents in a closed loop, or arrivals at a fixed rate in an open one.

Open loop: request k is due at begin + k / rate, whatever became of those before it. Where a limit on concurrency makes one
wait, it is sent late and its latency still counts from the time it was due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from kvalet.loadtest.client import Call, Endpoint, complete
from kvalet.loadtest.outcome import Outcome
from kvalet.loadtest.workload import Conversation

Send = Callable[[Call, Callable[[float], None] | None], Awaitable[Outcome]]


def sender(endpoint: Endpoint) -> Send:
    """Requests to ``endpoint``."""

    async def send(call: Call, on_content: Callable[[float], None] | None) -> Outcome:
        return await complete(endpoint, call, on_content)

    return send


async def open_loop(send: Send, calls: Iterable[Call], rate: float, limit: int = 0) -> list[Outcome]:
    """Outcomes in the order of ``calls``. ``rate``: requests a second. ``limit``: most in flight, 0 = no limit; a request over
    it waits in the client, which its outcome shows as ``queued_s``. The intended time in ``calls`` is replaced."""
    gate = asyncio.Semaphore(limit) if limit else None
    begin = time.monotonic()

    async def one(call: Call, due: float) -> Outcome:
        await asyncio.sleep(due - time.monotonic())
        timed = Call(call.path, call.body, call.headers, due, call.timeout_s)
        if gate is None:
            return await send(timed, None)
        async with gate:
            return await send(timed, None)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(call, begin + number / rate)) for number, call in enumerate(calls)]
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn of an agent. ``number`` from 0. ``fault`` "" = the answer was what the turn asked for."""

    agent: str
    number: int
    outcome: Outcome
    fault: str


class Watcher:
    """What a caller may want to see while agents run. The methods do nothing here."""

    def waiting(self, conversation: Conversation, pause_s: float) -> None:
        """The agent's tool runs for ``pause_s``."""

    def sent(self, conversation: Conversation) -> None:
        """The coming turn was sent."""

    def content(self, conversation: Conversation, now_s: float) -> None:
        """A chunk with content arrived."""

    def finished(self, conversation: Conversation, turn: Turn) -> None:
        """The turn is over; the conversation has moved on unless there is a fault."""


async def play(send: Send, conversation: Conversation, turns: int, watcher: Watcher, extra: dict[str, object]) -> list[Turn]:
    """``turns`` turns of one agent with its tool pauses; ends early at the first fault. ``extra`` goes into every request."""
    done: list[Turn] = []
    for _ in range(turns):
        if pause := conversation.pause_s:
            watcher.waiting(conversation, pause)
            await asyncio.sleep(pause)
        headers = {"x-session-id": conversation.script.name, "x-kvalet-report": "1"}
        call = Call("/v1/chat/completions", conversation.body(**extra), headers)
        watcher.sent(conversation)
        outcome = await send(call, lambda now_s: watcher.content(conversation, now_s))
        number = conversation.turn
        turn = Turn(conversation.script.name, number, outcome, conversation.accept(outcome))
        done.append(turn)
        watcher.finished(conversation, turn)
        if turn.fault:
            break
    return done


async def play_all(
    send: Send,
    conversations: Iterable[Conversation],
    turns: int,
    watcher: Watcher,
    extra: dict[str, object],
    stagger_s: float = 0.0,
) -> list[Turn]:
    """All agents at once, agent k starting k x ``stagger_s`` later. Turns in the order of agents, then of turns."""

    async def one(conversation: Conversation, after_s: float) -> list[Turn]:
        await asyncio.sleep(after_s)
        return await play(send, conversation, turns, watcher, extra)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(c, number * stagger_s)) for number, c in enumerate(conversations)]
    return [turn for task in tasks for turn in task.result()]
