"""Server-sent events: one stream of chunks, kept alive by comments, over a connection that may go at any time.

Nothing is buffered here. ``event`` waits until the connection takes the bytes, so a slow reader slows the turn's own bounded
channel, and that is where the scheduler sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Send

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
"""``x-accel-buffering`` and ``no-transform`` keep proxies from collecting the stream before they pass it on."""


def event_bytes(value: Mapping[str, Any]) -> bytes:
    """One ``data:`` event. JSON has no raw line ends, so one line is enough."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class SseWriter:
    """Writes one event stream. ``open`` sends status and headers at once; ``close`` ends it with ``[DONE]``.

    ``keep_alive`` runs beside the writing task and breaks every silence after ``ping_s`` seconds with a comment; it opens the
    stream itself if nothing else has. All writes go through one lock, so a comment never lands inside an event.
    """

    def __init__(self, send: Send, ping_s: float) -> None:
        self._send = send
        self._ping_s = ping_s
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._opened = False
        self._closed = False

    @property
    def opened(self) -> bool:
        """The status is on its way: an error can only be told as an event now."""
        return self._opened

    async def open(self) -> None:
        async with self._lock:
            await self._open()

    async def event(self, value: Mapping[str, Any]) -> None:
        await self._write(event_bytes(value))

    async def close(self) -> None:
        """``[DONE]`` and the end of the response. Nothing is written afterwards."""
        async with self._lock:
            await self._open()
            self._closed = True
            await self._send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def keep_alive(self) -> None:
        """Until cancelled or closed."""
        while not self._closed:
            left_s = self._written_at + self._ping_s - self._loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            elif not self._lock.locked():  # otherwise a write waits for the reader: a comment would only join the queue
                await self._write(PING)
            else:
                await asyncio.sleep(self._ping_s)

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if self._closed:
                return
            await self._open()
            self._written_at = self._loop.time()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _open(self) -> None:
        if not self._opened:
            self._opened = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            self._written_at = self._loop.time()
