"""A turn belongs to its request: whichever way the request goes, its turn is over and nothing runs on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from kvalet.api.app import build_app
from kvalet.api.config import ServerConfig
from kvalet.api.gate import Gate
from kvalet.sched.turns import EndReason
from scripted_engine import ScriptedEngine, ended, text_deltas
from starlette.types import Message

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class Connection:
    """One request to the application, with both ends of its wire in the test's hands."""

    def __init__(self, app: Gate, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> None:
        self.app = app
        self.sent: list[Message] = []
        self.timed_out = False
        self.aborted = 0
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._changed = asyncio.Condition()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        length = {"content-length": str(len(body))} if body else {}
        names = {"content-type": "application/json", **length, **given}
        raw = [(name.encode(), value.encode()) for name, value in names.items()]
        self.scope = {
            "type": "http", "method": "POST", "path": path, "headers": raw, "query_string": b"", "root_path": "",
            "state": {"connection": self},
        }  # fmt: skip
        if body:
            self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def run(self) -> None:
        await self.app(self.scope, self._inbox.get, self._send)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        async with self._changed:
            self._changed.notify_all()

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    def more(self, body: bytes, more_body: bool) -> None:
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": more_body})

    def abort(self) -> None:
        self.aborted += 1
        self.leave()

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(check)

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"]) if self.sent else 0

    @property
    def finished(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


def connect(engine: ScriptedEngine, config: ServerConfig | None = None, *, stream: bool = True, **fields: Any) -> Connection:
    app = build_app(engine, config or ServerConfig())
    return Connection(app, json.dumps({**BODY, "stream": stream, **fields}).encode())


def endless(request: Any) -> list[Any]:
    return [*text_deltas("ab"), asyncio.Event()]


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_cancels_the_turn_and_waits_for_its_record(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvalet.request")
    engine = ScriptedEngine(script=endless)
    connection = connect(engine, stream=stream)
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        await engine.started.wait()
        connection.leave()
    turn = engine.turns[0]
    assert turn.cancelled
    assert turn.over.is_set()
    record = json.loads(caplog.records[-1].getMessage().removeprefix("request "))
    assert (record["status"], record["reason"], record["kv"]["prompt_tokens"]) == (499, EndReason.CANCELLED, 10)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_server_cancelling_the_request_cancels_the_turn(stream: bool) -> None:
    engine = ScriptedEngine(script=endless)
    connection = connect(engine, stream=stream)
    running = asyncio.ensure_future(connection.run())
    await engine.started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.turns[0].cancelled


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_the_request_is_prepared(stream: bool) -> None:
    """Tokenising goes on elsewhere; no turn is started, and nobody is answered."""
    engine = ScriptedEngine(before=asyncio.Event())
    connection = connect(engine, stream=stream)
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        await engine.asked.wait()
        connection.leave()
    assert not engine.turns
    assert connection.status in (0, 200)
    assert not connection.finished


async def test_leaving_before_the_body_is_there() -> None:
    engine = ScriptedEngine()
    app = build_app(engine, ServerConfig())
    connection = Connection(app, b"", content_length="10")
    connection.leave()
    await connection.run()
    assert (connection.sent, engine.requests) == ([], [])


async def test_the_turn_is_cancelled_even_if_its_end_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the last record is bounded."""
    monkeypatch.setattr("kvalet.api.answer.LAST_WORDS_S", 0.05)
    engine = ScriptedEngine(script=endless)
    connection = connect(engine)

    async with asyncio.timeout(3), asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        await engine.started.wait()
        turn = engine.turns[0]
        monkeypatch.setattr(turn, "end", lambda reason: None)  # an engine that does not answer
        await connection.until(lambda: b'"b"' in connection.data)
        connection.leave()
    assert turn.cancels >= 1


async def test_a_write_timeout_is_named_in_the_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvalet.request")
    engine = ScriptedEngine(script=endless)
    connection = connect(engine)
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        await connection.until(lambda: b'"b"' in connection.data)
        connection.timed_out = True
        connection.leave()
    assert '"error_code":"write_timeout"' in caplog.records[-1].getMessage()


async def test_a_stream_is_complete_and_closed() -> None:
    engine = ScriptedEngine(script=lambda request: [*text_deltas("ab"), ended("stop")])
    connection = connect(engine)
    await connection.run()
    assert connection.finished
    assert connection.data.endswith(b"data: [DONE]\n\n")
    assert [message["type"] for message in connection.sent].count("http.response.start") == 1
    assert not engine.turns[0].cancelled


async def test_the_head_is_sent_before_the_first_token() -> None:
    go = asyncio.Event()
    engine = ScriptedEngine(script=lambda request: [go, *text_deltas("a"), ended("stop")])
    connection = connect(engine)
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        await connection.until(lambda: b'"role":"assistant"' in connection.data)
        assert (connection.status, b'"a"' in connection.data) == (200, False)
        go.set()
    assert b'"content":"a"' in connection.data


# the rest of a body that was refused early


async def test_the_rest_of_a_refused_body_is_read_before_the_end() -> None:
    app = build_app(ScriptedEngine(), ServerConfig(max_body_bytes=100))
    connection = Connection(app, b"", content_length="1000000")
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        await connection.until(lambda: b"body_too_large" in connection.data)
        assert not connection.finished  # the client has its answer, the server goes on reading
        connection.more(b"x" * 500_000, True)
        connection.more(b"x" * 500_000, False)
    assert connection.finished
    assert (connection.status, connection.aborted) == (413, 0)


@pytest.mark.parametrize("path", ["/nothing", "/v1/chat/completions"])
async def test_a_body_without_end_is_cut_off(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvalet.api.gate.DISCARD_BYTES", 1000)
    app = build_app(ScriptedEngine(), ServerConfig(max_body_bytes=100))
    connection = Connection(app, b"", path, transfer_encoding="chunked")
    for _ in range(20):
        connection.more(b"x" * 150, True)
    async with asyncio.timeout(5):
        await connection.run()
    assert connection.aborted == 1


async def test_a_refused_body_that_stalls_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvalet.api.gate.DISCARD_S", 0.05)
    app = build_app(ScriptedEngine(), ServerConfig())
    connection = Connection(app, b"", "/nothing", content_length="10")
    async with asyncio.timeout(5):
        await connection.run()
    assert (connection.status, connection.aborted) == (404, 1)


async def test_other_kinds_of_connections() -> None:
    app = build_app(ScriptedEngine(), ServerConfig())
    sent: list[Message] = []
    inbox: asyncio.Queue[Message] = asyncio.Queue()

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "websocket", "path": "/", "headers": []}, inbox.get, send)
    for name in ("startup", "shutdown"):
        inbox.put_nowait({"type": f"lifespan.{name}"})
    await app({"type": "lifespan"}, inbox.get, send)
    assert [message["type"] for message in sent] == [
        "websocket.close", "lifespan.startup.complete", "lifespan.shutdown.complete",
    ]  # fmt: skip


async def test_running_requests_are_counted() -> None:
    engine = ScriptedEngine(script=endless)
    connection = connect(engine)
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        await connection.until(lambda: b'"b"' in connection.data)
        assert connection.app.running == 1
        connection.leave()
    assert connection.app.running == 0
