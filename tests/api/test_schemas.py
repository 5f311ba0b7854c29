"""Request bodies into frozen requests: every field's way, and that nothing but an ApiError ever comes out of bad ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.api.errors import ApiError
from kvalet.api.requests import ChatRequest, CompletionRequest
from kvalet.api.sampling_fields import GREEDY_BELOW, MAX_INT32, check_ids, kind_of, logit_bias_pairs
from kvalet.api.schemas import (
    Asked,
    Caller,
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
    prompt_kind,
    read_tool_choice,
)
from kvalet.api.validation import path_of
from kvalet.runtime.plan import SamplingParams

VOCAB = 100
CALLER = Caller("session", "tenant")
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]


def chat(**fields: Any) -> Asked:
    return parse_chat({**CHAT, **fields}, CALLER, VOCAB)


def chat_request(**fields: Any) -> ChatRequest:
    request = chat(**fields).request
    assert isinstance(request, ChatRequest)
    return request


def completion_request(**fields: Any) -> CompletionRequest:
    request = parse_completion({"model": "m", "prompt": "x", **fields}, CALLER, VOCAB).request
    assert isinstance(request, CompletionRequest)
    return request


def test_defaults_are_those_of_the_engine() -> None:
    request = chat_request()
    assert request.params == SamplingParams()
    assert request.messages == tuple(CHAT["messages"])
    assert (request.session, request.tenant, request.cache_salt, request.priority) == ("session", "tenant", "", 0)
    assert not request.max_tokens_given


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": GREEDY_BELOW / 2}, {"temperature": 0.0}),
        ({"temperature": GREEDY_BELOW}, {"temperature": GREEDY_BELOW}),
        ({"top_p": 0.1}, {"top_p": 0.1}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"seed": 7}, {"seed": 7}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_token_ids": [1, 99]}, {"stop_token_ids": (1, 99)}),
        ({"min_tokens": 2}, {"min_tokens": 2}),
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"max_tokens": 9, "max_completion_tokens": 8}, {"max_tokens": 8}),
        ({"max_tokens": 10**12}, {"max_tokens": MAX_INT32}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"logit_bias": {"3": -5, "99": 1.5}}, {"logit_bias": ((3, -5.0), (99, 1.5))}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_each_field_arrives(fields: dict[str, Any], params: dict[str, Any]) -> None:
    found = chat_request(**fields).params
    assert {name: getattr(found, name) for name in params} == params


def test_completions_share_the_sampling_fields() -> None:
    shared = {"temperature": 0.5, "seed": 3, "stop": "x", "max_tokens": 4, "min_tokens": 2, "cache_salt": "s"}
    one, other = chat_request(**shared), completion_request(**shared)
    assert one.params == other.params
    assert one.cache_salt == other.cache_salt == "s"


def test_form_of_the_answer() -> None:
    plain = chat()
    assert (plain.stream, plain.include_usage, plain.return_token_ids, plain.top_logprobs) == (False, False, False, None)
    asked = chat(stream=True, stream_options={"include_usage": True, "extra": 1}, return_token_ids=True, logprobs=True)
    assert (asked.stream, asked.include_usage, asked.return_token_ids, asked.top_logprobs) == (True, True, True, 0)


@pytest.mark.parametrize(
    ("choice", "tools", "word", "name", "kept"),
    [
        (None, [], "none", "", []),
        (None, TOOLS, "auto", "", ["add", "sub"]),
        ("auto", TOOLS, "auto", "", ["add", "sub"]),
        ("auto", [], "none", "", []),
        ("none", TOOLS, "none", "", ["add", "sub"]),
        ("none", [], "none", "", []),
        ("required", TOOLS, "required", "", ["add", "sub"]),
        ("required", [], "required", "", []),
        ({"type": "function", "function": {"name": "sub"}}, TOOLS, "named", "sub", ["add", "sub"]),
        ({"type": "function", "function": {"name": "nope"}}, TOOLS, "named", "nope", ["add", "sub"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[0]]}},
            TOOLS,
            "required",
            "",
            ["add"],
        ),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [TOOLS[1]]}}, TOOLS, "auto", "", ["sub"]),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, TOOLS, "auto", "", []),
    ],
)
def test_tool_choice(choice: Any, tools: list[dict[str, Any]], word: str, name: str, kept: list[str]) -> None:
    found = read_tool_choice(choice, tools)
    assert (found.word, found.name) == (word, name)
    assert [tool["function"]["name"] for tool in found.tools] == kept


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("maybe", "tool_choice"),
        (5, "tool_choice"),
        ([], "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "function", "function": {"name": ""}}, "tool_choice.function.name"),
        ({"type": "function", "function": "add"}, "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [{}]}}, "tool_choice.allowed_tools.tools[0].function.name"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}, "tool_choice.allowed_tools.mode"),
    ],
)
def test_bad_tool_choices(choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as error:
        read_tool_choice(choice, TOOLS)
    assert (error.value.status, error.value.param) == (400, param)


def test_tools_and_formats_pass_through() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    request = chat_request(tools=TOOLS, parallel_tool_calls=False, response_format=schema)
    assert request.tools == tuple(TOOLS)
    assert (request.parallel_tool_calls, request.response_format) == (False, schema)
    assert chat_request().parallel_tool_calls
    assert chat_request(response_format={"type": "text"}).response_format is None


@pytest.mark.parametrize(
    ("location", "body", "path"),
    [
        (("model",), {}, "model"),
        (("messages", 2, "content"), {"messages": [{}, {}, {"content": 1}]}, "messages[2].content"),
        (("messages", 2), {"messages": [1, 1, 1]}, "messages[2]"),
        (("stop", "list", 0), {"stop": [""]}, "stop[0]"),
        (("stop", "text"), {"stop": ""}, "stop"),
        (("prompt", "batch", 0, "ids", 1), {"prompt": [[1, "x"]]}, "prompt[0][1]"),
        (("stream_options", "include_usage"), {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (("a", "b"), {"a": {}}, "a.b"),
        (("a", "b"), {"a": 5}, "a"),
        ((), {}, ""),
    ],
)
def test_paths(location: tuple[int | str, ...], body: Any, path: str) -> None:
    assert path_of(location, body) == path


@pytest.mark.parametrize(("value", "kind"), [("x", "text"), ([], "list"), (None, "other"), ({}, "other"), (5, "other")])
def test_kinds(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [("x", "text"), ([], "ids"), ([1], "ids"), (["x"], "batch"), ([[1]], "batch"), ([{}], "ids"), (5, "other")],
)
def test_prompt_kinds(prompt: Any, kind: str) -> None:
    assert prompt_kind(prompt) == kind


@pytest.mark.parametrize("ids", [[], [0], [99], list(range(100))])
def test_ids_within_the_vocabulary(ids: list[int]) -> None:
    check_ids(ids, VOCAB, "p")


@pytest.mark.parametrize(("ids", "index"), [([100], 0), ([5, -1], 1), ([0, 1, 10**9], 2)])
def test_ids_outside_the_vocabulary(ids: list[int], index: int) -> None:
    with pytest.raises(ApiError) as error:
        check_ids(ids, VOCAB, "p")
    assert error.value.param == f"p[{index}]"


@pytest.mark.parametrize("key", ["", "-1", "1.0", " 1", "1 ", "0x1", "100", "9" * 30, "٣", "x"])
def test_keys_that_are_no_token_ids(key: str) -> None:
    with pytest.raises(ApiError) as error:
        logit_bias_pairs({key: 1.0}, VOCAB)
    assert error.value.param == "logit_bias"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4))
def test_any_json_gives_a_request_or_a_400(fields: dict[str, Any]) -> None:
    for parse, base in ((parse_chat, CHAT), (parse_completion, {"model": "m", "prompt": "x"})):
        asked = outcome(parse, {**base, **fields})
        if isinstance(asked, ApiError):
            assert asked.status == 400
            assert asked.message
        else:
            assert 0 <= asked.request.params.temperature <= 2
            assert asked.request.params.max_tokens >= 1


def outcome(parse: Callable[[dict[str, Any], Caller, int], Asked], body: dict[str, Any]) -> Asked | ApiError:
    try:
        return parse(body, CALLER, VOCAB)
    except ApiError as error:
        return error
