"""The openai SDK against a real server process over scripts: what its helpers make of our bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from scriptedproc import ScriptedProcess, Wire, chat_request, until

TWO_CALLS = 'text:Hm call:0:add:{"a":2,"b":2} call:1:get_weather:{"city":"Oslo"} tool_calls'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    with ScriptedProcess(tmp_path_factory.mktemp("sdk"), ping_s=0.2) as running:
        yield running
        assert "Traceback" not in running.log, running.log


@pytest.fixture
def sdk(server: ScriptedProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def asked(script: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": script}], **fields}


def test_the_stream_helper_reads_two_calls(sdk: openai.OpenAI) -> None:
    """P03."""
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "get_weather")]
    with sdk.chat.completions.stream(**asked(TWO_CALLS, tools=tools)) as stream:
        ids = {event.chunk.id for event in stream if event.type == "chunk"}
        final = stream.get_final_completion()
    assert len(ids) == 1
    choice = final.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Hm")
    calls = choice.message.tool_calls or []
    assert [call.id for call in calls] == ["call_0", "call_1"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 2, "b": 2}, {"city": "Oslo"}]
    whole = sdk.chat.completions.create(**asked(TWO_CALLS, tools=tools)).choices[0]
    assert whole.message.tool_calls is not None
    assert [call.model_dump() for call in whole.message.tool_calls] == [
        {key: value for key, value in call.model_dump().items() if key in ("id", "type", "function")}
        | {"function": {k: v for k, v in call.model_dump()["function"].items() if k in ("name", "arguments")}}
        for call in calls
    ]


def test_comments_are_swallowed(sdk: openai.OpenAI) -> None:
    chunks = list(sdk.chat.completions.create(**asked("text:a later:0.7 text:b stop"), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"


def test_usage_is_the_last_chunk(sdk: openai.OpenAI) -> None:
    chunks = list(sdk.chat.completions.create(**asked("text:a stop"), stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 6


def test_refusals_become_the_sdks_own_errors(sdk: openai.OpenAI, server: ScriptedProcess) -> None:
    with pytest.raises(openai.RateLimitError) as limited:
        sdk.chat.completions.create(**asked("refuse"))
    assert limited.value.code == "queue_full"
    assert limited.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(**asked("stop", temperature=-1))
    assert bad.value.param == "temperature"
    assert bad.value.request_id


def test_an_error_inside_a_stream_reaches_the_caller(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ScriptedProcess(tmp_path_factory.mktemp("ends"), drain_s=0.2) as server:
        sdk = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30)
        with sdk:
            stream = iter(sdk.chat.completions.create(**asked("text:a wait"), stream=True))
            assert [chunk.choices[0].delta.content for chunk in (next(stream), next(stream))] == ["", "a"]
            server.signal()
            with pytest.raises(openai.APIError) as error:
                next(stream)
    assert error.value.code == "shutdown"


def test_completions(sdk: openai.OpenAI) -> None:
    reply = sdk.completions.create(model="m", prompt="text:abc length", max_tokens=3)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("abc", "length")
    chunks = list(sdk.completions.create(model="m", prompt="text:abc stop", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_closing_a_stream_ends_the_turn(sdk: openai.OpenAI, server: ScriptedProcess) -> None:
    before = len(server.requests_logged())
    stream = sdk.chat.completions.create(**asked("text:ab wait"), stream=True)
    next(iter(stream))
    stream.close()
    until("the turn is over", lambda: len(server.requests_logged()) > before)
    assert server.requests_logged()[-1]["reason"] == "cancelled"


def test_many_streams_at_once_keep_their_own_text(sdk: openai.OpenAI) -> None:
    def text(number: int) -> str:
        chunks = sdk.chat.completions.create(**asked(f"text:{'x' * number}{number} stop"), stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(text, range(64))) == [f"{'x' * number}{number}" for number in range(64)]


def test_a_stalled_reader_holds_nobody_back(server: ScriptedProcess, sdk: openai.OpenAI) -> None:
    """P24: 8 streams run to their end beside one whose client reads nothing."""
    with Wire(server.address, receive_buffer=4096) as stalled:
        stalled.send(chat_request("big:20000"))
        stalled.read_until(b"xxx")
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda n: sdk.chat.completions.create(**asked(f"big:200 text:{n} stop")), range(8)))
        assert [(reply.choices[0].message.content or "")[-1] for reply in replies] == [str(n) for n in range(8)]
