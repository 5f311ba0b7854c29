"""Agents by seed, their histories, and the closed loop that plays them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvalet.loadtest.client import Call, Endpoint
from kvalet.loadtest.outcome import Outcome, ToolCall
from kvalet.loadtest.runner import Turn, Watcher, play_all, sender
from kvalet.loadtest.workload import SYSTEM, TOOLS, Conversation, WorkloadSpec, make_agents
from stubserver import Step, delta, event, finish, stream, stub, usage

SPEC = WorkloadSpec(seed=3, agents=4, tool_turns=2, result_chars=200, pause_s=(0.01, 0.03), follow_ups=1)


def answered(text: str = "", calls: tuple[ToolCall, ...] = ()) -> Outcome:
    return Outcome(0.0, 0.0, 1.0, 200, "", (0.5,), text, calls, ("stop",))


CALL = ToolCall("c1", "read_log", '{"service": "search"}')


def test_the_seed_decides() -> None:
    assert make_agents(SPEC) == make_agents(SPEC)
    assert make_agents(SPEC) != make_agents(WorkloadSpec(seed=4, agents=4, tool_turns=2, result_chars=200))
    more = make_agents(WorkloadSpec(seed=3, agents=9, tool_turns=2, result_chars=200, pause_s=(0.01, 0.03)))
    assert more[:4] == make_agents(SPEC)


def test_histories_differ_after_the_shared_start() -> None:
    bodies = [Conversation(script, "m").body() for script in make_agents(SPEC)]
    assert {body["messages"][0]["content"] for body in bodies} == {SYSTEM}
    assert all(body["tools"] == list(TOOLS) for body in bodies)
    assert len({body["messages"][1]["content"] for body in bodies}) == 4


def test_results_have_the_length_asked_for() -> None:
    for script in make_agents(SPEC):
        assert len(script.results) == len(script.pauses_s) == 2
        assert all(200 <= len(result) < 400 for result in script.results)
        assert all(0.01 <= pause <= 0.03 for pause in script.pauses_s)


def test_a_conversation_grows_turn_by_turn() -> None:
    talk = Conversation(make_agents(SPEC)[0], "m", max_tokens=9)
    assert (talk.wants_tool, talk.pause_s) == (True, 0.0)
    assert talk.accept(answered(calls=(CALL,))) == ""
    assert talk.pause_s == talk.script.pauses_s[0]
    assert talk.messages[-2]["tool_calls"][0]["function"]["arguments"] == CALL.arguments
    assert talk.messages[-1] == {"role": "tool", "tool_call_id": "c1", "content": talk.script.results[0]}
    before = list(talk.messages)
    assert talk.accept(answered(calls=(CALL,))) == ""
    assert talk.messages[: len(before)] == before
    body = talk.body(seed=1)
    assert (body["tool_choice"], body["seed"], body["max_tokens"]) == ("none", 1, 9)
    assert Conversation(make_agents(SPEC)[0], "m", 9, 5).body()["max_tokens"] == 9
    talk.answer_tokens = 5
    assert talk.body()["max_tokens"] == 5
    assert talk.accept(answered("It is slow.")) == ""
    assert [m["role"] for m in talk.messages[-2:]] == ["assistant", "user"]
    assert talk.accept(answered("Done.")) == ""
    assert talk.messages[-1] == {"role": "assistant", "content": "Done."}
    assert talk.turn == 4


@pytest.mark.parametrize(
    ("turns_before", "outcome", "word"),
    [
        (0, answered("text instead"), "had to be called"),
        (2, answered(calls=(CALL,)), "none was allowed"),
        (0, Outcome(0.0, 0.0, 1.0, 429, "queue full"), "queue full"),
    ],
)
def test_an_answer_that_was_not_asked_for_changes_nothing(turns_before: int, outcome: Outcome, word: str) -> None:
    talk = Conversation(make_agents(SPEC)[0], "m")
    for _ in range(turns_before):
        talk.accept(answered(calls=(CALL,)))
    before = list(talk.messages)
    assert word in talk.accept(outcome)
    assert (talk.messages, talk.turn) == (before, turns_before)


class Recorder(Watcher):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def waiting(self, conversation: Conversation, pause_s: float) -> None:
        self.seen.append("waiting")

    def sent(self, conversation: Conversation) -> None:
        self.seen.append("sent")

    def content(self, conversation: Conversation, now_s: float) -> None:
        self.seen.append("content")

    def finished(self, conversation: Conversation, turn: Turn) -> None:
        self.seen.append(f"finished {turn.number} {turn.fault}".strip())


def as_asked(number: int, request: bytes) -> list[Step]:
    """A server that does what tool_choice says."""
    body: dict[str, Any] = json.loads(request.partition(b"\r\n\r\n")[2])
    if body["tool_choice"] == "required":
        call = {"index": 0, "id": f"c{number}", "function": {"name": "read_log", "arguments": "{}"}}
        return stream((0.0, delta(tool_calls=[call])), (0.0, finish("tool_calls")), (0.0, usage(5)), (0.0, event("[DONE]")))
    return stream((0.0, delta(content="fine")), (0.0, finish()), (0.0, usage(2)), (0.0, event("[DONE]")))


@pytest.mark.anyio
async def test_all_agents_play_all_turns() -> None:
    talks = [Conversation(script, "m") for script in make_agents(SPEC)]
    recorder = Recorder()
    async with stub(as_asked) as url:
        turns = await play_all(sender(Endpoint.of(url)), talks, 4, recorder, {}, stagger_s=0.01)
    assert [(turn.agent, turn.number) for turn in turns] == [(t.script.name, n) for t in talks for n in range(4)]
    assert all(not turn.fault for turn in turns)
    assert recorder.seen.count("sent") == 16
    assert recorder.seen.count("waiting") == 8
    assert recorder.seen.count("content") == 16
    assert sorted(recorder.seen)[-1].startswith("waiting")


@pytest.mark.anyio
async def test_an_agent_stops_at_its_first_fault() -> None:
    def wrong(number: int, request: bytes) -> list[Step]:
        return stream((0.0, delta(content="no tool")), (0.0, finish()), (0.0, event("[DONE]")))

    talk = Conversation(make_agents(SPEC)[0], "m")
    async with stub(wrong) as url:
        turns = await play_all(sender(Endpoint.of(url)), [talk], 4, Watcher(), {})
    assert [turn.fault for turn in turns] == ["a tool had to be called and was not"]


@pytest.mark.anyio
async def test_requests_carry_session_and_report_headers() -> None:
    heads: list[bytes] = []

    def script(number: int, request: bytes) -> list[Step]:
        heads.append(request.partition(b"\r\n\r\n")[0])
        return as_asked(number, request)

    talk = Conversation(make_agents(SPEC)[0], "m")
    async with stub(script) as url:
        await play_all(sender(Endpoint.of(url)), [talk], 1, Watcher(), {})
    assert b"x-session-id: agent-01" in heads[0]
    assert b"x-kvalet-report: 1" in heads[0]


@pytest.mark.anyio
async def test_a_call_is_sent_as_it_is() -> None:
    async with stub(as_asked) as url:
        outcome = await sender(Endpoint.of(url))(Call("/v1/chat/completions", {"tool_choice": "none"}), None)
    assert outcome.text == "fine"
