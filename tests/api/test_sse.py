"""The event stream: comments in silence, never inside an event, nothing after the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kvalet.api.sse import SseWriter, event_bytes
from starlette.types import Message

pytestmark = pytest.mark.anyio


class Recorder:
    """An ASGI ``send`` that keeps what it is given, and may be held up."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.free = asyncio.Event()
        self.free.set()
        self.changed = asyncio.Condition()

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        async with self.changed:
            self.changed.notify_all()
        await self.free.wait()

    async def until(self, check: Callable[[bytes], bool]) -> None:
        async with asyncio.timeout(5), self.changed:
            await self.changed.wait_for(lambda: check(self.data))

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def test_the_status_goes_out_with_open() -> None:
    wire = Recorder()
    writer = SseWriter(wire.send, 10.0)
    assert not writer.opened
    await writer.open()
    await writer.open()
    assert [message["type"] for message in wire.messages] == ["http.response.start"]
    assert wire.messages[0]["status"] == 200
    assert dict(wire.messages[0]["headers"])[b"content-type"].startswith(b"text/event-stream")


async def test_events_and_end() -> None:
    wire = Recorder()
    writer = SseWriter(wire.send, 10.0)
    await writer.event({"text": "line\nbreak"})
    await writer.close()
    assert wire.data == b'data: {"text":"line\\nbreak"}\n\ndata: [DONE]\n\n'
    assert [m.get("more_body") for m in wire.messages] == [None, True, False]


async def test_nothing_follows_the_end() -> None:
    wire = Recorder()
    writer = SseWriter(wire.send, 0.01)
    async with asyncio.TaskGroup() as group:
        pings = group.create_task(writer.keep_alive())
        await wire.until(lambda data: data.count(b": ping") >= 2)
        await writer.close()
        await pings  # ends by itself
    await writer.event({"late": True})
    assert wire.data.endswith(b"data: [DONE]\n\n")
    assert wire.messages[-1]["more_body"] is False


async def test_silence_is_broken_and_opens_the_stream() -> None:
    wire = Recorder()
    writer = SseWriter(wire.send, 0.01)
    async with asyncio.TaskGroup() as group:
        pings = group.create_task(writer.keep_alive())
        await wire.until(lambda data: b": ping\n\n" in data)
        pings.cancel()
    assert writer.opened
    assert wire.messages[0]["type"] == "http.response.start"


async def test_no_comment_while_events_flow() -> None:
    wire = Recorder()
    writer = SseWriter(wire.send, 0.5)
    async with asyncio.TaskGroup() as group:
        pings = group.create_task(writer.keep_alive())
        for _ in range(20):
            await writer.event({"a": 1})
            await asyncio.sleep(0.001)
        pings.cancel()
    assert b": ping" not in wire.data


async def test_a_blocked_reader_gets_no_pile_of_comments() -> None:
    wire = Recorder()
    writer = SseWriter(wire.send, 0.01)
    await writer.open()
    wire.free.clear()
    async with asyncio.TaskGroup() as group:
        pings = group.create_task(writer.keep_alive())
        event = group.create_task(writer.event({"a": 1}))
        await wire.until(lambda data: data.count(b"\n\n") >= 1)
        before = len(wire.messages)
        await asyncio.sleep(0.1)
        assert len(wire.messages) <= before + 1
        wire.free.set()
        await event
        pings.cancel()


@pytest.mark.parametrize("value", [{"t": "\u2028\u2029\r\n"}, {"t": "é😀"}, {"t": "\x00\x1f"}])
def test_an_event_is_one_line(value: dict[str, Any]) -> None:
    data = event_bytes(value)
    assert data.count(b"\n") == 2
    assert data.endswith(b"\n\n")
    assert b"\r" not in data
