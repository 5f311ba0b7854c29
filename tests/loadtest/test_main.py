"""The load test's command line against a stub: table, JSON line, and what its exit status says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from kvalet.loadtest.__main__ import main
from stubserver import Step, delta, event, finish, plain, stream, stub, usage


def server(number: int, request: bytes) -> list[Step]:
    """Lists one model; answers as tool_choice asks."""
    if request.startswith(b"GET /v1/models"):
        return plain(200, {"data": [{"id": "m1"}]})
    body: dict[str, Any] = json.loads(request.partition(b"\r\n\r\n")[2])
    if body["model"] != "m1":
        return plain(404, {"error": {"message": "no such model"}})
    if body["tool_choice"] == "required":
        call = {"index": 0, "id": f"c{number}", "function": {"name": "read_log", "arguments": "{}"}}
        return stream((0.0, delta(tool_calls=[call])), (0.0, finish("tool_calls")), (0.0, usage(5)), (0.0, event("[DONE]")))
    return stream((0.0, delta(content="fine")), (0.0, finish()), (0.0, usage(2, cached=7)), (0.0, event("[DONE]")))


async def run(script: Any, *arguments: str) -> int:
    """The command in a thread of its own, the stub on this loop."""
    async with stub(script) as url:
        words = [url, "--agents", "2", "--tool-turns", "2", "--pause", "0.01", "0.02", *arguments]
        return await asyncio.to_thread(main, words)


@pytest.mark.anyio
async def test_a_good_run_ends_with_0_and_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(server) == 0
    *table, line = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert (figures["requests"], figures["faults"], figures["failures"]) == (6, 0, {})
    assert (figures["output_tokens"], figures["cached_tokens"]) == (24, 14)
    assert figures["ttft"]["n"] == 6
    assert any("time to first token" in text for text in table)


@pytest.mark.anyio
async def test_refused_turns_end_with_1_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(server, "--model", "other") == 1
    out = capsys.readouterr().out
    assert "agent-01 turn 1: no such model" in out
    assert json.loads(out.splitlines()[-1])["failures"] == {"status 404": 2}


@pytest.mark.anyio
@pytest.mark.parametrize("reply", [plain(500, {}), plain(200, {"data": []}), plain(200, {})])
async def test_a_server_that_cannot_be_used_ends_with_2(reply: list[Step], capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(lambda number, request: reply) == 2
    assert capsys.readouterr().err.startswith("kvalet.loadtest: ")


def test_an_address_that_is_none_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["https://nowhere"]) == 2
    assert "http://" in capsys.readouterr().err
