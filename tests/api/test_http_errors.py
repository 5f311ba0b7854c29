"""What is refused, how, and that nothing of it is left behind."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from asgi import CHAT, CHAT_PATH, COMPLETION_PATH, chunks, client, error_of, whole
from kvalet.api.config import ServerConfig
from scripted_engine import VOCAB, ScriptedEngine, ended, refused, text_deltas

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize(
    "body",
    [b"[]", b"true", b"null", b"123", b'"str"', b"", b"   ", b"{", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08\x00",
     b'{"model": NaN}', b'{"model":"m","temperature":1e400}', b'{"model":"m","model":5}'],
)  # fmt: skip
async def test_bodies_that_are_no_requests(path: str, body: bytes) -> None:
    """P43."""
    engine = ScriptedEngine()
    async with client(engine) as http:
        reply = await http.post(path, content=body, headers=JSON)
    assert reply.status_code == 400
    assert error_of(reply)["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 123456789012345678901234567890}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.0001}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 10}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"seed": 9223372036854775808}, "seed"),
        ({"logit_bias": {str(VOCAB): 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"2": 101}}, "logit_bias.2"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "magic"}}, "tool_choice.type"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    """P16, P20, P43, P44."""
    engine = ScriptedEngine()
    async with client(engine) as http:
        reply = await http.post(CHAT_PATH, json={**CHAT, **fields})
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None, "stop": None, "tools": None, "stream": None, "temperature": None, "seed": None},
        {"max_tokens": 10**12}, {"temperature": 1e-8}, {"temperature": 0}, {"top_k": 0}, {"top_k": -1}, {"seed": 0},
        {"seed": -1}, {"logit_bias": {"2": -100}}, {"stop": []}, {"user": 5, "metadata": [], "store": True, "extra": {}},
        {"tools": []}, {"tool_choice": "none"}, {"parallel_tool_calls": False}, {"n": 1},
        {"stream_options": None}, {"response_format": {"type": "text"}}, {"modalities": ["text"]},
        {"service_tier": "auto", "reasoning_effort": "low", "prompt_cache_retention": "24h"},
    ],
)  # fmt: skip
async def test_what_is_taken(fields: dict[str, Any]) -> None:
    async with client(ScriptedEngine()) as http:
        await whole(http, CHAT_PATH, {**CHAT, **fields})


@pytest.mark.parametrize("depth", [199, 200, 201, 300, 1000, 1024, 1025, 20_000])
async def test_nesting(depth: int) -> None:
    """P07: the limit is 200 levels, the body's own included. Refused fast, harmless inside the limit."""
    text = json.dumps(CHAT)[:-1] + ', "x": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
    async with client(ScriptedEngine()) as http:
        began = time.process_time()  # what others do on the machine is not our time
        reply = await http.post(CHAT_PATH, content=text, headers=JSON)
        assert time.process_time() - began < 0.1
        assert reply.status_code == (200 if depth <= 200 else 400)
        if depth > 200:
            assert error_of(reply)["code"] == "nesting_too_deep"
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON", "content-encoding": "identity"}, 200),
    ],
)
async def test_content_types(headers: dict[str, str], status: int) -> None:
    async with client(ScriptedEngine()) as http:
        reply = await http.post(CHAT_PATH, content=json.dumps(CHAT), headers=headers)
    assert reply.status_code == status
    if status != 200:
        error_of(reply)


async def test_routes_that_are_not_there() -> None:
    async with client(ScriptedEngine()) as http:
        for method, path, status in (
            ("GET", CHAT_PATH, 405), ("DELETE", "/v1/models", 405), ("PUT", "/health", 405), ("GET", "/", 404),
            ("POST", "/v1/embeddings", 404), ("GET", "/v1/chat/completions/", 404), ("GET", "/v1/models/other", 404),
        ):  # fmt: skip
            reply = await http.request(method, path)
            assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json"), path
            error_of(reply)
            if status == 405:
                assert reply.headers["allow"]


async def test_unknown_model() -> None:
    async with client(ScriptedEngine()) as http:
        reply = await http.post(CHAT_PATH, json={**CHAT, "model": "other"})
    assert reply.status_code == 404
    assert error_of(reply) == {
        "message": "The model 'other' does not exist here: this server has 'm'.",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "after"), [(429, 0.2), (429, 500.0), (503, 5.0), (400, 0.0)])
async def test_refusals_of_the_engine(stream: bool, status: int, after: float) -> None:
    engine = ScriptedEngine(script=refused("no", status=status, code="c", param="p", retry_after_s=after))
    async with client(engine) as http:
        reply = await http.post(CHAT_PATH, json={**CHAT, "stream": stream})
    assert reply.status_code == status
    assert error_of(reply)["code"] == "c"
    wanted = {0.2: "1", 500.0: "60", 5.0: "5"}.get(after)
    assert reply.headers.get("retry-after") == wanted


async def test_a_refusal_after_the_stream_was_opened_is_an_event() -> None:
    """Tokenising takes longer than the ping interval: the stream is open when the engine says no."""
    engine = ScriptedEngine(script=refused("too long", code="context_length_exceeded", param="messages"))
    engine.before = asyncio.Event()

    async def release() -> None:
        await asyncio.sleep(0.1)
        assert engine.before is not None
        engine.before.set()

    async with client(engine, ServerConfig(ping_s=0.02)) as http, asyncio.TaskGroup() as group:
        group.create_task(release())
        reply = await http.post(CHAT_PATH, json={**CHAT, "stream": True})
    assert reply.status_code == 200
    assert reply.text.startswith(": ping\n\n")
    assert '"code":"context_length_exceeded"' in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")


async def test_keys() -> None:
    config = ServerConfig(api_keys=(("alice", "ka"), ("bob", "kb")))
    engine = ScriptedEngine()
    async with client(engine, config) as http:
        for headers in ({}, {"authorization": "Bearer nope"}, {"x-api-key": "nope"}, {"authorization": "Basic ka"}):
            reply = await http.post(CHAT_PATH, json=CHAT, headers=headers)
            assert reply.status_code == 401
            assert error_of(reply)["type"] == "authentication_error"
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        await whole(http, CHAT_PATH, CHAT, authorization="Bearer ka")
        await whole(http, CHAT_PATH, CHAT, **{"x-api-key": "kb"})
    assert [request.tenant for request in engine.requests] == ["alice", "bob"]


async def test_request_ids() -> None:
    async with client(ScriptedEngine()) as http:
        mine = await http.get("/nothing", headers={"x-request-id": "mine-1"})
        made = await http.get("/health", headers={"x-request-id": "x" * 200})
        other = await http.get("/health")
    assert mine.headers["x-request-id"] == "mine-1"
    assert made.headers["x-request-id"].startswith("req_")
    assert other.headers["x-request-id"] != made.headers["x-request-id"]


async def test_not_ready_says_why() -> None:
    async with client(ScriptedEngine(is_ready=(False, "device lost: x"))) as http:
        reply = await http.get("/ready")
        assert reply.status_code == 503
        assert "device lost: x" in error_of(reply)["message"]
        assert (await http.get("/health")).status_code == 200


async def test_a_defect_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> Any:
        raise RuntimeError("secret detail")

    async with client(ScriptedEngine(script=broken)) as http:
        reply = await http.post(CHAT_PATH, json=CHAT)
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert error_of(reply)["code"] == "internal_error"
    assert "secret detail" in caplog.text


@pytest.mark.alone
async def test_large_bodies_leave_the_loop_free(anyio_backend: Any) -> None:
    """P38 in small: a 5 MB body is parsed off the loop; other requests are answered meanwhile."""
    body = {**CHAT, "messages": [{"role": "user", "content": "x" * 250} for _ in range(20_000)]}
    content = json.dumps(body)
    engine = ScriptedEngine()
    slowest = 0.0
    async with client(engine) as http:
        async with asyncio.TaskGroup() as group:
            big = group.create_task(http.post(CHAT_PATH, content=content, headers=JSON))
            while not big.done():
                began = time.perf_counter()
                assert (await http.get("/health")).status_code == 200
                slowest = max(slowest, time.perf_counter() - began)
                await asyncio.sleep(0.005)
        assert big.result().status_code == 200
        assert len(engine.requests[0].messages) == 20_000  # type: ignore[union-attr]
    assert slowest < 0.25


async def test_streams_and_errors_in_one_log_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvalet.request")
    engine = ScriptedEngine(script=lambda request: [*text_deltas("x"), ended("length")])
    async with client(engine) as http:
        await chunks(http, CHAT_PATH, CHAT, **{"x-session-id": "s", "x-request-id": "r1"})
        await http.post(CHAT_PATH, json={})
        await http.get("/health")
    records = [json.loads(record.getMessage().removeprefix("request ")) for record in caplog.records]
    assert len(records) == 2
    first, second = records
    assert (first["id"], first["session"], first["finish"], first["status"]) == ("r1", "s", "length", 200)
    assert first["kv"]["resident_tokens"] == 6
    assert (second["status"], second["error_code"]) == (400, "missing_required_parameter")
