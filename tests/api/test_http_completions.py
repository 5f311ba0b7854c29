"""/v1/completions: the shape of streams and whole answers, prompts as text and as ids."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import COMPLETION, COMPLETION_PATH, chunks, client, error_of, whole
from kvalet.api.requests import CompletionRequest, TextDelta
from scripted_engine import VOCAB, ScriptedEngine, ended, text_deltas

pytestmark = pytest.mark.anyio

TEXT = "ok 日本"


def playing(*items: Any) -> ScriptedEngine:
    return ScriptedEngine(script=lambda request: list(items))


async def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    async with client(playing(*text_deltas(TEXT), ended("length"))) as http:
        stream = await chunks(http, COMPLETION_PATH, {**COMPLETION, "stream_options": {"include_usage": True}})
        answer = await whole(http, COMPLETION_PATH, COMPLETION)
    assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == TEXT == answer["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in stream[:-1]] == [None] * len(TEXT) + ["length"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["object"] == stream[0]["object"] == "text_completion"
    assert stream[-1]["usage"] == answer["usage"]
    assert len({(chunk["id"], chunk["created"]) for chunk in stream}) == 1


@pytest.mark.parametrize("prompt", ["text", [5, 6], ["text"], [[5, 6]]])
async def test_prompts(prompt: Any) -> None:
    engine = ScriptedEngine()
    async with client(engine) as http:
        await whole(http, COMPLETION_PATH, {"model": "m", "prompt": prompt})
    request = engine.requests[0]
    assert isinstance(request, CompletionRequest)
    assert request.prompt == ("text" if "text" in prompt else (5, 6))
    assert request.params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([VOCAB], "prompt[0]"),
        ([1, -1], "prompt[1]"),
        ([1, "x"], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([[1, VOCAB]], "prompt[0][1]"),
        ([[1], [2]], "prompt"),
        (["a", "b"], "prompt"),
        ([], "prompt"),
        ("", "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
    ],
)
async def test_bad_prompts(prompt: Any, param: str) -> None:
    async with client(ScriptedEngine()) as http:
        reply = await http.post(COMPLETION_PATH, json={"model": "m", "prompt": prompt})
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param


async def test_token_ids() -> None:
    engine = playing(*text_deltas(TEXT), TextDelta("", (299,)), ended("stop", prompt_ids=(7, 8)))
    ids = [*TEXT.encode(), 299]
    async with client(engine) as http:
        stream = await chunks(http, COMPLETION_PATH, {**COMPLETION, "return_token_ids": True})
        answer = await whole(http, COMPLETION_PATH, {**COMPLETION, "return_token_ids": True})
    assert [token for chunk in stream for token in chunk["choices"][0]["token_ids"]] == ids
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == answer["choices"][0]["prompt_token_ids"] == stream[-1]["prompt_token_ids"] == [7, 8]


async def test_benchmark_fields_reach_the_engine() -> None:
    engine = ScriptedEngine()
    async with client(engine) as http:
        await whole(http, COMPLETION_PATH, {**COMPLETION, "ignore_eos": True, "min_tokens": 30, "max_tokens": 30})
        await whole(http, COMPLETION_PATH, {**COMPLETION, "min_tokens": 30})
    params = engine.requests[0].params
    assert (params.ignore_eos, params.min_tokens, params.max_tokens) == (True, 30, 30)
    assert engine.requests[1].params.max_tokens == 30


@pytest.mark.parametrize("k", [0, 3])
async def test_logprobs(k: int) -> None:
    engine = playing(*text_deltas("abé", logprobs=True, k=k), ended("stop"))
    async with client(engine) as http:
        answer = await whole(http, COMPLETION_PATH, {**COMPLETION, "logprobs": k})
        stream = await chunks(http, COMPLETION_PATH, {**COMPLETION, "logprobs": k})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "\ufffd", "\ufffd"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == ({"a": -0.5, "b": -1.5, "c": -2.5} if k else None)
    for name, values in logprobs.items():
        streamed = [v for c in stream if c["choices"][0]["logprobs"] for v in c["choices"][0]["logprobs"][name]]
        assert streamed == values


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2), ("n", 2), ("logprobs", 21)])
async def test_what_cannot_be_honoured_is_refused(field: str, value: Any) -> None:
    async with client(ScriptedEngine()) as http:
        reply = await http.post(COMPLETION_PATH, json={**COMPLETION, field: value})
    assert reply.status_code == 400
    assert error_of(reply)["param"] == field


@pytest.mark.parametrize(("field", "value"), [("echo", False), ("suffix", None), ("best_of", 1), ("n", 1), ("user", "me")])
async def test_what_changes_nothing_is_taken(field: str, value: Any) -> None:
    async with client(ScriptedEngine()) as http:
        await whole(http, COMPLETION_PATH, {**COMPLETION, field: value})
