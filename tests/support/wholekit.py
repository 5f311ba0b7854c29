"""What whole-process tests say to a real server (serverproc.Server): both modes of one request, raw connections, metrics."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlparse

from scriptedproc import Wire, raw_request, until
from serverproc import Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ERROR_FIELDS = {"message", "type", "param", "code"}


def chat(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat body with one user message."""
    return {"model": server.model, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def answered(server: Server, body: dict[str, Any], path: str = CHAT, **headers: str) -> dict[str, Any]:
    """The whole answer; it must be one."""
    status, reply = server.request(path, {**body, "stream": False}, headers)
    assert status == 200, (status, reply)
    assert isinstance(reply, dict)
    return reply


def streamed(server: Server, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    """All chunks of the streamed answer, which ends with [DONE]."""
    status, text = server.request(path, {**body, "stream": True})
    assert status == 200, (status, text)
    data = [block.removeprefix("data: ") for block in str(text).split("\n\n") if block.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(block) for block in data[:-1]]


def refused(server: Server, body: Any, path: str = CHAT, status: int = 400) -> dict[str, Any]:
    """The error object of a request that must be refused in the API's shape, without a traceback in its text."""
    found, reply = server.request(path, body)
    assert found == status, (found, reply)
    assert isinstance(reply, dict), reply
    error: dict[str, Any] = reply["error"]
    assert set(error) == ERROR_FIELDS
    assert error["message"]
    assert "Traceback" not in json.dumps(reply)
    return error


def joined(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a chat stream: {content, calls: [{id, name, arguments}], finish}. Ids and names come once."""
    content, calls, finish = "", list[dict[str, str]](), None
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert finish is None, "nothing after the finish reason"
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                if call["index"] == len(calls):
                    assert call["type"] == "function"
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert call["index"] == len(calls) - 1
                    assert not call.get("id")
                    assert not call["function"].get("name")
                calls[-1]["arguments"] += call["function"].get("arguments") or ""
            finish = choice["finish_reason"]
    return {"content": content, "calls": calls, "finish": finish}


def said(reply: dict[str, Any]) -> dict[str, Any]:
    """The same of a whole answer."""
    choice = reply["choices"][0]
    calls = [{"id": call["id"], **call["function"]} for call in choice["message"].get("tool_calls") or []]
    return {"content": choice["message"]["content"] or "", "calls": calls, "finish": choice["finish_reason"]}


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """For comparing two answers: ids of calls are fresh each time."""
    return {**answer, "calls": [{**call, "id": ""} for call in answer["calls"]]}


def both(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """One chat request in both modes, which must say the same; the whole answer's content, calls and finish."""
    whole, pieces = said(answered(server, body)), joined(streamed(server, body))
    assert without_ids(whole) == without_ids(pieces)
    return whole


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def random_ids(n: int, seed: int = 0) -> list[int]:
    """Token ids of no meaning, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(n)]


def ids_of(reply: dict[str, Any]) -> list[int]:
    ids: list[int] = reply["choices"][0]["token_ids"]
    return ids


def wire(server: Server, receive_buffer: int = 0) -> Wire:
    """One raw TCP connection to the server."""
    address = urlparse(server.url)
    assert address.hostname
    assert address.port
    return Wire((address.hostname, address.port), receive_buffer)


def post(body: Any, path: str = COMPLETIONS) -> bytes:
    """The bytes of a POST."""
    return raw_request("POST", path, json.dumps(body).encode())


def idle(server: Server, seconds: float = 20.0) -> None:
    """Within ``seconds`` nothing runs or waits and every page is free or only caches. (The cases allow one second. What was
    measured with five other programs on two cores is 0.1 to 2.7 s, the step under way; the bound tells that from a hang.)"""
    seen: dict[str, float] = {}
    try:
        until("nothing runs, waits or is leased", lambda: at_rest(server, seen), seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: { {name: value for name, value in seen.items() if value} }") from None


def at_rest(server: Server, seen: dict[str, float]) -> bool:
    """``seen`` is filled with the figures that were looked at."""
    _, text = server.request("/metrics")
    for line in str(text).splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("vllm:num_requests_", "kvalet_pages", "kvalet_idle_pages", "kvalet_pool_pages", "kvalet_turns{")):
            seen[name.replace("vllm:", "").split("{")[0] + state_of(name)] = float(value)
    live = seen["num_requests_running"] + seen["num_requests_waiting"]
    live += sum(value for name, value in seen.items() if name.startswith("kvalet_turns"))
    return not live and seen["kvalet_pages:free"] + seen["kvalet_idle_pages"] == seen["kvalet_pool_pages"]


def state_of(sample: str) -> str:
    return ":" + sample.split('state="')[1].split('"')[0] if 'state="' in sample else ""
