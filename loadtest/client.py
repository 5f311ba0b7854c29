"""An HTTP/1.1 client for OpenAI-compatible servers that measures what it receives. One connection per request.

Framing is h11's work; the sockets are asyncio's streams. Bodies are read as they come, each content chunk is stamped when its
bytes have arrived and before they are used for anything else.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11
import orjson
from kvalet.loadtest.outcome import Collector, Outcome
from kvalet.loadtest.sse import SseDecoder, SseError

READ_BYTES = 1 << 16
MAX_REPLY_BYTES = 64 << 20
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server. ``key`` "" = no authentication header."""

    host: str
    port: int
    prefix: str = ""
    key: str = ""

    @classmethod
    def of(cls, url: str, key: str = "") -> Endpoint:
        """From "http://host:port[/prefix]". Raises ValueError for anything but plain http with a host."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"an http:// address is needed, not {url!r}")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"), key)


@dataclass(frozen=True, slots=True)
class Call:
    """One request. ``intended_s`` 0 = now. ``body`` None makes a GET. At ``timeout_s`` the connection is closed and the
    outcome is a failure."""

    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    intended_s: float = 0.0
    timeout_s: float = TIMEOUT_S


class ProtocolError(Exception):
    """The server closed or garbled the connection before its reply was whole."""


class Connection:
    """One request and its reply on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, endpoint: Endpoint, call: Call) -> None:
        raw = b"" if call.body is None else orjson.dumps(call.body)
        headers = {
            "host": f"{endpoint.host}:{endpoint.port}",
            "connection": "close",
            "content-length": str(len(raw)),
            "content-type": "application/json",
            **({"authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}),
            **call.headers,
        }
        method = "GET" if call.body is None else "POST"
        request = h11.Request(method=method, target=endpoint.prefix + call.path, headers=list(headers.items()))
        parts = [self._http.send(request), self._http.send(h11.Data(data=raw)), self._http.send(h11.EndOfMessage())]
        self._writer.write(b"".join(part for part in parts if part))
        await self._writer.drain()

    async def event(self) -> h11.Response | h11.Data | h11.EndOfMessage:
        """The reply's next piece. Raises ProtocolError."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise ProtocolError(f"bad reply: {error}") from error
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(READ_BYTES))
            elif isinstance(event, h11.Response | h11.Data | h11.EndOfMessage):
                return event
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                raise ProtocolError("the server closed the connection before its reply was whole")


async def fetch(endpoint: Endpoint, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """GET: (status, body). Raises OSError, ProtocolError, TimeoutError. At MAX_REPLY_BYTES: ProtocolError."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            connection = Connection(reader, writer)
            await connection.send(endpoint, Call(path))
            status, body = 0, bytearray()
            while not isinstance(event := await connection.event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    status = event.status_code
                else:
                    body += event.data
                if len(body) > MAX_REPLY_BYTES:
                    raise ProtocolError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
            return status, bytes(body)
        finally:
            writer.close()


class Exchange:
    """One POST as it goes on: what has come so far is here even if the connection breaks."""

    def __init__(self, on_content: Callable[[float], None] | None) -> None:
        self.collector = Collector()
        self.status = 0
        self.retry_after = ""
        self.done = False
        self._streamed = False
        self._sse = SseDecoder()
        self._whole = bytearray()
        self._on_content = on_content

    def head(self, response: h11.Response) -> None:
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in response.headers}
        self.status = response.status_code
        self.retry_after = headers.get("retry-after", "")
        self._streamed = headers.get("content-type", "").startswith("text/event-stream")

    def data(self, raw: bytes, now_s: float) -> None:
        """Raises ProtocolError for what is neither an event stream nor JSON."""
        if not self._streamed:
            self._whole += raw
            if len(self._whole) > MAX_REPLY_BYTES:
                raise ProtocolError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
            return
        try:
            events = self._sse.feed(raw)
        except SseError as error:
            raise ProtocolError(str(error)) from error
        for event in events:
            if event == "[DONE]":
                self.done = True
            else:
                self._chunk(event.encode(), now_s)

    def end(self, now_s: float) -> None:
        if not self._streamed:
            self._chunk(bytes(self._whole), now_s)
        elif not self.done and not self.collector.error:
            self.collector.error = "the stream ended without [DONE]"

    def _chunk(self, raw: bytes, now_s: float) -> None:
        try:
            chunk = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ProtocolError(f"not JSON: {raw[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise ProtocolError(f"not a JSON object: {raw[:80]!r}")
        if self.collector.add(chunk, now_s) and self._on_content:
            self._on_content(now_s)


async def complete(endpoint: Endpoint, call: Call, on_content: Callable[[float], None] | None = None) -> Outcome:
    """Sends ``call`` and follows it to its end. Never raises for what the server or the network does: that is an outcome.

    ``on_content`` is called with the time of each chunk that has content. Cancelling closes the connection.
    """
    intended = call.intended_s or time.monotonic()
    sent = time.monotonic()
    exchange = Exchange(on_content)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(call.timeout_s):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            connection = Connection(reader, writer)
            await connection.send(endpoint, call)
            while not isinstance(event := await connection.event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    exchange.head(event)
                else:
                    exchange.data(bytes(event.data), time.monotonic())
            exchange.end(time.monotonic())
    except TimeoutError:
        exchange.collector.error = f"no whole reply within {call.timeout_s:g} s"
    except (OSError, ProtocolError) as error:
        exchange.collector.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return exchange.collector.outcome(intended, sent, time.monotonic(), exchange.status, exchange.retry_after)
