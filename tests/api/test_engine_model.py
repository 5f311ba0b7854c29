"""The engine with the default model: few tokens, a small pool (cases P01, P04, P05, P11, P13, P46 in process)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
from kvalet.api.config import EngineConfig
from kvalet.api.engine import Engine
from kvalet.api.errors import ApiError
from kvalet.api.requests import CompletionRequest, TextDelta, ToolCallDelta, TurnEnd
from kvalet.api.session import SessionTurn
from kvalet.api.tool_format import CALL_CLOSE, CALL_OPEN
from kvalet.runtime.geometry import PAGE_TOKENS
from kvalet.runtime.plan import SamplingParams
from kvalet.sched.turns import EndReason
from serverproc import model_path

POOL_TOKENS = 3072
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": CITY}}
SAVE = {
    "type": "function",
    "function": {
        "name": "save_text",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
async def engine(anyio_backend: Any) -> AsyncIterator[Engine]:
    config = EngineConfig(model=model_path(), weights="int4", pool_tokens=POOL_TOKENS, ram_bytes=0, max_rows=4)
    async with Engine(config) as made:
        yield made
        assert made.ready() == (True, "")


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def read(turn: SessionTurn) -> tuple[str, dict[int, str], TurnEnd]:
    """Streamed text, streamed arguments by index, and the end; ids and names of calls come once."""
    text, calls, end, ids = "", dict[int, str](), None, list[int]()
    async for item in turn:
        assert end is None, "nothing after the end"
        if isinstance(item, TurnEnd):
            end = item
            continue
        ids.extend(item.ids)
        if isinstance(item, TextDelta):
            text += item.text
        elif isinstance(item, ToolCallDelta):
            assert bool(item.id) == bool(item.name) == (item.index not in calls)
            calls[item.index] = calls.get(item.index, "") + item.arguments
    assert end is not None
    assert end.text == text
    assert [call.arguments for call in end.tool_calls] == [calls[index] for index in sorted(calls)]
    assert list(end.ids) == ids
    assert end.report.completion_tokens == len(ids)
    assert CALL_OPEN not in text
    assert CALL_CLOSE not in text
    return text, calls, end


@pytest.mark.anyio
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 12, 40])
async def test_a_call_cut_off_by_the_limit_is_length(engine: Engine, max_tokens: int) -> None:
    """P01. The tool's text has no bound of its own, so the model writes on."""
    request = user("Save the numbers one to two hundred written as words.")
    turn = engine.session().turn(request, [SAVE], tool_choice="required", max_tokens=max_tokens, temperature=0.0)
    _, _, end = await read(turn)
    if end.report.completion_tokens == max_tokens:
        assert end.finish_reason == "length"
    else:
        assert end.finish_reason == "tool_calls"
        assert all(json.loads(call.arguments) for call in end.tool_calls)
    assert end.text == ""


@pytest.mark.anyio
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), ("get_weather", "stop")])
async def test_forced_calls_are_valid(engine: Engine, choice: str, reason: str) -> None:
    """P04 (a), P03 with parallel calls off."""
    turn = engine.session().turn(
        user("Hello, how are you?"), [WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=80, temperature=0.0
    )
    _, _, end = await read(turn)
    assert (end.finish_reason, len(end.tool_calls)) == (reason, 1)
    jsonschema.validate(json.loads(end.tool_calls[0].arguments), CITY)


@pytest.mark.anyio
async def test_none_is_text_only(engine: Engine) -> None:
    for tools in ([WEATHER], []):
        turn = engine.session().turn(
            user("use get_weather for Oslo"), tools, tool_choice="none", max_tokens=12, temperature=0.0
        )
        async for item in turn:
            assert not isinstance(item, ToolCallDelta)
            if isinstance(item, TurnEnd):
                assert item.finish_reason in ("stop", "length")
                assert item.tool_calls == ()
                assert item.text


@pytest.mark.anyio
async def test_a_bad_schema_is_refused_and_the_next_request_served(engine: Engine) -> None:
    """P05."""
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "not-a-type"}}}
    with pytest.raises(ApiError) as caught:
        await engine.session().turn(user("x"), [bad], tool_choice="required").result()
    assert caught.value.param == "tools[0].function.parameters.type"
    tree = {"$defs": {"T": {"type": "object", "properties": {"v": {"type": "integer"}, "k": {"$ref": "#/$defs/T"}}}}}
    good = {"type": "function", "function": {"name": "f", "parameters": {**tree, "$ref": "#/$defs/T"}}}
    end = await engine.session().turn(user("x"), [good], tool_choice="f", max_tokens=60, temperature=0.0).result()
    assert end.finish_reason in ("stop", "length")


@pytest.mark.anyio
async def test_every_answer_matches_its_schema(engine: Engine) -> None:
    """P46 at temperature 1: what is finished validates, what is not says so."""
    schema = {
        "type": "object",
        "properties": {
            "sky": {"type": "string", "enum": ["blue", "grey"]},
            "numbers": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "minItems": 2,
                "maxItems": 3,
            },
        },
        "required": ["sky", "numbers"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": schema}}
    finished = 0
    for seed in range(8):
        turn = engine.session().turn(user("Describe."), response_format=asked, max_tokens=40, temperature=1.0, seed=seed)
        _, _, end = await read(turn)
        if end.finish_reason == "stop":
            jsonschema.validate(json.loads(end.text), schema)
            finished += 1
        else:
            assert end.finish_reason == "length", seed
    assert finished >= 6


@pytest.mark.anyio
@pytest.mark.parametrize("resent", ["as received", "stripped", "re-spaced"])
async def test_a_resent_history_is_not_computed_again(engine: Engine, resent: str) -> None:
    """P11 (a), (c), (d): what equals the last prompt is cached, page by page, and what the model wrote after it too."""
    session = engine.session()
    history = user("What is the weather in Oslo? " + "Please look it up carefully. " * 20)
    before: tuple[int, ...] = ()
    for turn_number in range(4):
        end = await session.turn(
            history, [WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=60, temperature=0.0
        ).result()
        common = next((i for i, (a, b) in enumerate(zip(before, end.prompt_ids, strict=False)) if a != b), len(before))
        assert common == len(before), f"turn {turn_number}: the prompt does not begin with the last one and its answer"
        assert end.report.cached_tokens >= common // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS
        if turn_number:
            assert end.report.computed_tokens < end.report.prompt_tokens - common + 2 * PAGE_TOKENS
        before = end.prompt_ids
        call = end.tool_calls[0]
        arguments = call.arguments if resent == "as received" else json.dumps(json.loads(call.arguments), indent=1)
        function = {"name": call.name, "arguments": arguments}
        content = "" if resent == "stripped" else end.text or None
        history.append({"role": "assistant", "content": content, "tool_calls": [{"id": call.id, "function": function}]})
        history.append({"role": "tool", "tool_call_id": call.id, "content": "4 degrees, light rain. " * 10})


@pytest.mark.anyio
async def test_text_is_whole_characters_at_every_length(engine: Engine) -> None:
    """P13: joined deltas are the text; a replacement character only where a character was cut off at the very end."""
    for max_tokens in (1, 2, 3, 5, 8, 13):
        text, _, _ = await read(engine.session().turn(user("Repeat: 😀日本語"), max_tokens=max_tokens, temperature=0.0))
        assert "�" not in text[:-1]
        text.encode()


@pytest.mark.anyio
async def test_cancel_fork_and_close(engine: Engine) -> None:
    session = engine.session()
    turn = session.turn(user("Write a long story about the sea."), temperature=0.0)
    seen = 0
    end: TurnEnd | None = None
    async for item in turn:
        seen += 1
        if seen == 3:
            turn.cancel()
        if isinstance(item, TurnEnd):
            end = item
    assert end is not None
    assert (end.finish_reason, end.reason) == ("error", EndReason.CANCELLED)
    assert seen < 40
    first = await session.turn(user("Count to three. " * 10), max_tokens=4, temperature=0.0).result()
    child = session.fork()
    again = await child.turn(user("Count to three. " * 10), max_tokens=4, temperature=0.0).result()
    assert again.report.computed_tokens <= 1 + PAGE_TOKENS < first.report.prompt_tokens
    await session.close()
    await child.close()


@pytest.mark.anyio
async def test_limits(engine: Engine) -> None:
    too_long = tuple([5] * (engine.model.context_tokens + 1))
    with pytest.raises(ApiError, match=f"maximum context length is {engine.model.context_tokens} tokens") as caught:
        await engine.start_completion(CompletionRequest(too_long, SamplingParams(max_tokens=1)))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ApiError, match="maximum context length") as caught:
        await engine.start_completion(CompletionRequest(tuple([5] * POOL_TOKENS), SamplingParams(max_tokens=1)))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    end = await (await engine.start_completion(CompletionRequest((5, 6, 7), params))).result()
    assert (end.finish_reason, len(end.ids), end.report.prompt_tokens) == ("length", 3, 3)


@pytest.mark.anyio
async def test_nothing_is_left_running_or_leased(engine: Engine) -> None:
    """Last in this file: after all of the above every page is either free or held by an idle branch."""
    statistics = engine.statistics()
    core = statistics.scheduler.core
    assert statistics.scheduler.open_turns == 0
    assert statistics.preparing == 0
    assert core.pages.free + core.pages.held == core.pages.total
    assert core.pages.leased_only == 0
    assert statistics.scheduler.violation is None
