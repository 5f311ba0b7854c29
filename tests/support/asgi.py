"""Requests to the application in memory, and reading event streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from kvalet.api.app import build_app
from kvalet.api.config import ServerConfig
from scripted_engine import ScriptedEngine

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello"}
CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"


@asynccontextmanager
async def client(engine: ScriptedEngine, config: ServerConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(engine, config or ServerConfig())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE] and hold nothing but data events and comments."""
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]", text[-300:]
    assert all(block.startswith((": ", "data: ")) for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1] if not block.startswith(": ")]


async def chunks(http: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    reply = await http.post(path, json={**body, "stream": True}, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.text)


async def whole(http: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    reply = await http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error object, which must have exactly OpenAI's four fields and no trace of a traceback."""
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in reply.text
    error: dict[str, Any] = body["error"]
    return error
