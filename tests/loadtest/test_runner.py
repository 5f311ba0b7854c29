"""The open and the closed loop without sockets: when requests are sent, in what order outcomes come, who sees what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from kvalet.loadtest.client import Call
from kvalet.loadtest.outcome import Outcome, ToolCall
from kvalet.loadtest.runner import Turn, Watcher, open_loop, play, play_all
from kvalet.loadtest.workload import Conversation, WorkloadSpec, make_agents

pytestmark = pytest.mark.anyio
SPEC = WorkloadSpec(seed=5, agents=3, tool_turns=2, result_chars=50, pause_s=(0.001, 0.002), follow_ups=1)
OnContent = Callable[[float], None] | None


class Server:
    """Answers as ``tool_choice`` asks, once ``open`` is set. ``sent``: (call, time); ``peak``: most at once."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.sent: list[tuple[Call, float]] = []
        self.inside = 0
        self.peak = 0
        self.full = asyncio.Event()

    async def send(self, call: Call, on_content: OnContent) -> Outcome:
        now = time.monotonic()
        self.sent.append((call, now))
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        if self.inside >= 4:
            self.full.set()
        try:
            await self.open.wait()
        finally:
            self.inside -= 1
        if on_content is not None:
            on_content(now)
        calls = (ToolCall("c", "read_log", "{}"),) if (call.body or {}).get("tool_choice") == "required" else ()
        return Outcome(call.intended_s, now, time.monotonic(), 200, "", (now,), "fine", calls, ("stop",))


def calls(n: int) -> list[Call]:
    return [Call("/v1/completions", {"n": k}, {"x": str(k)}, intended_s=99.0, timeout_s=7.0) for k in range(n)]


async def test_requests_are_due_at_fixed_distances_and_sent_as_they_are() -> None:
    """The intended time in the calls is replaced; everything else of a call is sent as it is."""
    server = Server()
    before = time.monotonic()
    outcomes = await open_loop(server.send, calls(6), rate=100.0)
    due = [outcome.intended_s for outcome in outcomes]
    assert before <= due[0] < before + 1.0
    assert [b - a for a, b in pairwise(due)] == pytest.approx([0.01] * 5)
    assert all(outcome.queued_s > -0.003 for outcome in outcomes), "never before it is due, but for the timers' millisecond"
    plain = [(call.path, call.body, call.headers, call.timeout_s) for call, _ in server.sent]
    assert plain == [(call.path, call.body, call.headers, call.timeout_s) for call in calls(6)]


async def test_outcomes_come_in_the_order_of_calls_whoever_ends_first() -> None:
    gates = [asyncio.Event() for _ in range(5)]
    ended: list[int] = []

    async def send(call: Call, on_content: OnContent) -> Outcome:
        number = int((call.body or {})["n"])
        if number == 4:
            gates[3].set()
        async with asyncio.timeout(10):
            if number < 4:
                await gates[number].wait()
        ended.append(number)
        if number:
            gates[number - 1].set()
        return Outcome(call.intended_s, 0.0, 0.0, text=str(number))

    outcomes = await open_loop(send, calls(5), rate=1000.0)
    assert ended == [4, 3, 2, 1, 0]
    assert [outcome.text for outcome in outcomes] == list("01234")


async def test_a_server_that_stands_still_does_not_slow_an_open_loop() -> None:
    """Without a limit all requests are on their way before the first is answered."""
    server = Server()
    server.open.clear()
    running = asyncio.ensure_future(open_loop(server.send, calls(4), rate=500.0))
    async with asyncio.timeout(10):
        await server.full.wait()
        server.open.set()
        outcomes = await running
    assert server.peak == 4
    assert len(outcomes) == 4


async def test_a_limit_makes_requests_wait_in_the_client_and_shows_it() -> None:
    server = Server()
    server.open.clear()
    running = asyncio.ensure_future(open_loop(server.send, calls(12), rate=1000.0, limit=4))
    async with asyncio.timeout(10):
        await server.full.wait()
        await asyncio.sleep(0.1)
        assert len(server.sent) == 4
        server.open.set()
        outcomes = await running
    assert server.peak == 4
    assert all(outcome.queued_s > 0.05 for outcome in outcomes[4:])
    assert [b.intended_s - a.intended_s for a, b in pairwise(outcomes)] == pytest.approx([0.001] * 11)


async def test_nothing_to_send() -> None:
    assert await open_loop(Server().send, [], rate=1.0) == []
    assert await play_all(Server().send, [], 3, Watcher(), {}) == []


class Recorder(Watcher):
    """What is seen, in order, as (what, agent, turn)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    def _note(self, what: str, conversation: Conversation) -> None:
        self.seen.append((what, conversation.script.name, conversation.turn))

    def waiting(self, conversation: Conversation, pause_s: float) -> None:
        assert pause_s == conversation.pause_s > 0
        self._note("waiting", conversation)

    def sent(self, conversation: Conversation) -> None:
        self._note("sent", conversation)

    def content(self, conversation: Conversation, now_s: float) -> None:
        self._note("content", conversation)

    def finished(self, conversation: Conversation, turn: Turn) -> None:
        assert turn.agent == conversation.script.name
        self._note("finished", conversation)


async def test_a_watcher_sees_each_turn_in_order() -> None:
    """Pauses only where a tool's result is brought; ``finished`` comes when the conversation has moved on."""
    talk = Conversation(make_agents(SPEC)[0], "m")
    recorder = Recorder()
    turns = await play(Server().send, talk, 4, recorder, {})
    assert [(turn.number, turn.fault) for turn in turns] == [(n, "") for n in range(4)]
    shape = [(what, turn) for what, _, turn in recorder.seen]
    first = [("sent", 0), ("content", 0), ("finished", 1)]
    tool = [[("waiting", n), ("sent", n), ("content", n), ("finished", n + 1)] for n in (1, 2)]
    assert shape == [*first, *tool[0], *tool[1], ("sent", 3), ("content", 3), ("finished", 4)]


async def test_extra_fields_go_into_every_request_and_each_history_grows() -> None:
    server = Server()
    talk = Conversation(make_agents(SPEC)[1], "m")
    await play(server.send, talk, 3, Watcher(), {"seed": 11, "stream": False})
    bodies = [call.body or {} for call, _ in server.sent]
    assert [(body["seed"], body["stream"]) for body in bodies] == [(11, False)] * 3
    lengths = [len(body["messages"]) for body in bodies]
    assert lengths == [2, 4, 6], "a request keeps the history it was sent with"
    assert bodies[2]["messages"][:4] == bodies[1]["messages"]
    assert {call.headers["x-session-id"] for call, _ in server.sent} == {"agent-02"}


async def test_a_fault_ends_its_own_agent_only() -> None:
    server = Server()

    async def send(call: Call, on_content: OnContent) -> Outcome:
        if call.headers["x-session-id"] == "agent-02":
            return Outcome(0.0, 0.0, 0.0, 429, "queue full")
        return await server.send(call, on_content)

    recorder = Recorder()
    talks = [Conversation(script, "m") for script in make_agents(SPEC)]
    turns = await play_all(send, talks, 3, recorder, {})
    assert [(turn.agent, turn.number) for turn in turns] == [
        *[("agent-01", n) for n in range(3)],
        ("agent-02", 0),
        *[("agent-03", n) for n in range(3)],
    ]
    assert [turn.fault for turn in turns if turn.fault] == ["queue full"]
    assert ("finished", "agent-02", 0) in recorder.seen, "the faulty turn is seen, the conversation has not moved"


async def test_agents_start_one_after_the_other() -> None:
    server = Server()
    talks = [Conversation(script, "m") for script in make_agents(SPEC)]
    begin = time.monotonic()
    await play_all(server.send, talks, 1, Watcher(), {}, stagger_s=0.05)
    assert [call.headers["x-session-id"] for call, _ in server.sent] == ["agent-01", "agent-02", "agent-03"]
    assert all(at - begin >= 0.05 * number - 0.005 for number, (_, at) in enumerate(server.sent))
