"""The openai SDK over TCP against the real server: what agents' clients do all day."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from serverproc import Server

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9},
                "b": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--weights", "bf16", "--pool-tokens", "8192", "--ram-bytes", "0") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as sdk:
        yield sdk


def test_models_and_plain_chat(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=ASK, max_tokens=12, temperature=0)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model=model, messages=ASK, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c for c in chunks if not c.choices] == [chunks[-1]]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == len({c.created for c in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_call_is_valid_for_its_schema(client: openai.OpenAI, stream: bool) -> None:
    model = client.models.list().data[0].id
    args: dict[str, Any] = {"model": model, "messages": ASK, "tools": [WEATHER, ADD], "tool_choice": "required"}
    args |= {"max_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**args) as events:
            for _ in events:
                pass
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**args).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls) == 1
    call = choice.message.tool_calls[0].function
    schema = {"get_weather": WEATHER, "add": ADD}[call.name]["function"]["parameters"]
    jsonschema.validate(json.loads(call.arguments), schema)


def test_tool_loop_returns_its_result_and_reuses_the_history(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "system", "content": "You use tools. " * 20}, *ASK]
    cached = []
    for turn in range(3):
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[ADD],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=100,
            temperature=0,
            extra_headers={"X-Session-ID": "loop"},
        )
        call = reply.choices[0].message.tool_calls[0]  # type: ignore[index]
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result {turn} " * 30})
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached.append((reply.usage.prompt_tokens_details.cached_tokens, reply.usage.prompt_tokens))
    assert cached[0][0] < cached[0][1]
    for (_, previous_prompt), (cached_now, _) in itertools.pairwise(cached):
        assert cached_now >= previous_prompt // 16 * 16, cached


def test_json_schema_answers_validate(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
    schema["additionalProperties"] = False
    for seed in range(5):
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "A number, please."}],
            response_format={"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}},
            temperature=1.0,
            seed=seed,
            max_tokens=60,
        )
        assert reply.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(reply.choices[0].message.content or ""), schema)


def test_errors_reach_the_sdk_as_its_own_types(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=ASK)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=ASK, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as long:
        client.completions.create(model=model, prompt="word " * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as tool:
        client.chat.completions.create(
            model=model, messages=ASK, tools=[ADD], tool_choice={"type": "function", "function": {"name": "nope"}}
        )
    assert "nope" in str(tool.value)


def test_logprobs_have_one_item_per_token(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    reply = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert reply.usage is not None
    assert len(logprobs.content) == reply.usage.completion_tokens
    assert all(item.logprob <= 0 and len(item.top_logprobs) == 3 for item in logprobs.content)
