"""/v1/chat/completions: the shape of streams and whole answers, and that both say the same."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import CHAT, CHAT_PATH, chunks, client, whole
from kvalet.api.requests import ChatRequest, Delta, TextDelta, ToolCallDelta, TurnEnd
from kvalet.runtime.plan import TokenLogprob
from kvalet.sched.turns import EndReason, TurnReport
from scripted_engine import ScriptedEngine, ended, text_deltas

pytestmark = pytest.mark.anyio

TEXT = "ok 😀 日本語 é"
CALLS: list[Delta] = [
    TextDelta("Let me see. ", (1, 2)),
    ToolCallDelta(0, id="call_a", name="add", ids=(3,)),
    ToolCallDelta(0, '{"a": 2, ', ids=(4,)),
    ToolCallDelta(0, '"b": 2}', ids=(5,)),
    ToolCallDelta(1, '{"city":', id="call_b", name="get_weather", ids=(6,)),
    ToolCallDelta(1, '"Oslo"}', ids=(7,)),
]


def playing(*items: Delta | TurnEnd) -> ScriptedEngine:
    return ScriptedEngine(script=lambda request: list(items))


async def both(engine: ScriptedEngine, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    async with client(engine) as http:
        body = {**CHAT, **fields}
        whole_body = {name: value for name, value in body.items() if name != "stream_options"}
        return await chunks(http, CHAT_PATH, body), await whole(http, CHAT_PATH, whole_body)


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message and finish reason that a client makes of a stream."""
    text = ""
    calls: dict[int, dict[str, str]] = {}
    finish = [chunk["choices"][0]["finish_reason"] for chunk in stream if chunk["choices"]]
    for chunk in stream:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", []):
                call = calls.setdefault(part["index"], {"id": part.get("id", ""), "name": "", "arguments": ""})
                assert part.get("id") in (None, call["id"])
                call["name"] += part["function"].get("name", "")
                call["arguments"] += part["function"]["arguments"]
    assert [word for word in finish if word is not None] == [finish[-1]]
    return {"text": text, "calls": list(calls.values()), "finish": finish[-1]}


async def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    stream, answer = await both(playing(*text_deltas(TEXT), ended("stop")))
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    message = answer["choices"][0]["message"]
    assert joined(stream) == {"text": TEXT, "calls": [], "finish": "stop"}
    assert message == {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"


async def test_frame_is_constant_over_a_stream() -> None:
    """P03: one id, one created, index 0 throughout."""
    stream, _ = await both(playing(*CALLS, ended("tool_calls")))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in stream}) == 1
    assert stream[0]["object"] == "chat.completion.chunk"
    assert {choice["index"] for chunk in stream for choice in chunk["choices"]} == {0}


async def test_tool_calls_in_both_modes() -> None:
    stream, answer = await both(playing(*CALLS, ended("tool_calls")))
    wanted = [
        {"id": "call_a", "name": "add", "arguments": '{"a": 2, "b": 2}'},
        {"id": "call_b", "name": "get_weather", "arguments": '{"city":"Oslo"}'},
    ]
    assert joined(stream) == {"text": "Let me see. ", "calls": wanted, "finish": "tool_calls"}
    message = answer["choices"][0]["message"]
    assert message["content"] == "Let me see. "
    assert [{"id": c["id"], **c["function"]} for c in message["tool_calls"]] == wanted
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_content_is_null_beside_calls_alone() -> None:
    _, answer = await both(playing(*CALLS[1:4], ended("tool_calls")))
    assert answer["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls"])
async def test_usage_only_when_asked_and_always_whole(finish: str) -> None:
    """P21: with include_usage exactly one chunk with no choices, after the finish chunk."""
    report = TurnReport(prompt_tokens=50, completion_tokens=7, computed_tokens=18, resident_tokens=16, disk_tokens=16)
    engine = playing(*text_deltas("x"), ended(finish, report=report))
    usage = {
        "prompt_tokens": 50,
        "completion_tokens": 7,
        "total_tokens": 57,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    plain, answer = await both(engine)
    assert answer["usage"] == usage
    assert all(chunk["choices"] for chunk in plain)
    assert not any("usage" in chunk for chunk in plain)
    declined, _ = await both(engine, stream_options={"include_usage": False})
    assert all(chunk["choices"] for chunk in declined)
    asked, _ = await both(engine, stream_options={"include_usage": True})
    assert [chunk["choices"] for chunk in asked].count([]) == 1
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"] == usage
    assert asked[-2]["choices"][0]["finish_reason"] == finish


@pytest.mark.parametrize(("computed", "cached"), [(10, 0), (-5, 10), (3, 7), (20, 0)])
async def test_cached_tokens_stay_within_the_prompt(computed: int, cached: int) -> None:
    """P42: also when the engine once reports nonsense."""
    report = TurnReport(prompt_tokens=10, completion_tokens=1, computed_tokens=computed)
    _, answer = await both(playing(ended("stop", report=report)))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


@pytest.mark.parametrize("k", [0, 5])
async def test_logprobs(k: int) -> None:
    """P20: one item per token, k alternatives each, and the joined bytes are the text."""
    engine = playing(*text_deltas(TEXT, logprobs=True, k=k), ended("stop"))
    stream, answer = await both(engine, logprobs=True, top_logprobs=k)
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for item in content for byte in item["bytes"]).decode() == TEXT
    assert all(item["logprob"] <= 0 and len(item["top_logprobs"]) == k for item in content)
    streamed = [item for c in stream if c["choices"][0]["logprobs"] for item in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content


async def test_logprobs_are_null_when_not_asked_for() -> None:
    stream, answer = await both(playing(*text_deltas("ab", logprobs=True), ended("stop")))
    assert answer["choices"][0]["logprobs"] is None
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in stream)


async def test_logprobs_of_tokens_without_text_are_not_lost() -> None:
    """A held-back piece, and the end-of-turn token, have no text of their own."""
    held = TextDelta("", (104,), (TokenLogprob(104, -1.0),))
    last = TextDelta("", (299,), (TokenLogprob(299, float("-inf")),))
    stream, answer = await both(playing(held, *text_deltas("i", logprobs=True), last, ended("stop")), logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [item["bytes"] for item in content] == [[104], [105], []]
    assert content[2]["logprob"] == -9999.0
    streamed = [item for c in stream if c["choices"][0]["logprobs"] for item in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content


async def test_pieces_without_text_make_no_chunk() -> None:
    stream, _ = await both(playing(TextDelta("", (1,)), *text_deltas("a"), TextDelta("", (2,)), ended("stop")))
    assert len(stream) == 3


async def test_token_ids_when_asked_for() -> None:
    engine = playing(*CALLS, TextDelta("", (8,)), ended("tool_calls", prompt_ids=(91, 92)))
    stream, answer = await both(engine, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert answer["prompt_token_ids"] == [91, 92]
    assert [token for chunk in stream for token in chunk["choices"][0]["token_ids"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert stream[-1]["prompt_token_ids"] == [91, 92]


async def test_the_kv_record_when_asked_by_header() -> None:
    report = TurnReport(prompt_tokens=50, completion_tokens=7, computed_tokens=18, ram_tokens=32, read_ms=1.23456)
    engine = playing(ended("stop", report=report))
    async with client(engine) as http:
        asked = {"x-kvalet-report": "1"}
        answer = await whole(http, CHAT_PATH, CHAT, **asked)
        stream = await chunks(http, CHAT_PATH, CHAT, **asked)
        with_usage = await chunks(http, CHAT_PATH, {**CHAT, "stream_options": {"include_usage": True}}, **asked)
        assert "kvalet" not in await whole(http, CHAT_PATH, CHAT)
    record = answer["kvalet"]
    assert (record["ram_tokens"], record["cached_tokens"], record["read_ms"]) == (32, 32, 1.235)
    assert set(TurnReport.__slots__) <= set(record)
    assert stream[-1]["kvalet"] == record
    assert with_usage[-1]["kvalet"] == record
    assert "kvalet" not in with_usage[-2]


async def test_what_reaches_the_engine() -> None:
    engine = ScriptedEngine()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {**CHAT, "max_tokens": 5, "max_completion_tokens": 3, "temperature": 1e-8, "tools": [tool], "stop": "x", "seed": -1}
    async with client(engine) as http:
        await whole(http, CHAT_PATH, body, **{"X-Session-ID": "s1"})
        await whole(http, CHAT_PATH, CHAT)
    first, second = engine.requests
    assert isinstance(first, ChatRequest)
    assert isinstance(second, ChatRequest)
    assert (first.session, first.tools, first.tool_choice) == ("s1", (tool,), "auto")
    params = first.params
    assert (params.max_tokens, params.temperature, params.stop, params.seed) == (3, 0.0, ("x",), -1)
    assert first.max_tokens_given
    assert (second.max_tokens_given, second.tool_choice, second.session) == (False, "none", "")


async def test_a_turn_that_ended_is_not_cancelled_by_its_answer() -> None:
    engine = playing(*text_deltas("a"), ended("stop"))
    await both(engine)
    assert [turn.cancelled for turn in engine.turns] == [False, False]
    assert all(turn.over.is_set() for turn in engine.turns)


@pytest.mark.parametrize("reason", [r for r in EndReason if r not in (EndReason.STOP, EndReason.LENGTH)])
async def test_every_bad_end_is_told_in_both_modes(reason: EndReason) -> None:
    engine = playing(*text_deltas("a"), ended("error", reason, message="what happened"))
    async with client(engine) as http:
        stream = await chunks(http, CHAT_PATH, CHAT)
        reply = await http.post(CHAT_PATH, json=CHAT)
    assert stream[-1]["error"] == reply.json()["error"]
    assert stream[-1]["error"]["message"] == "what happened"
    assert reply.status_code == {"grammar": 500, "internal": 500, "device_error": 503, "shutdown": 503}.get(reason, 499)
