"""One client connection: hypercorn's HTTP/1.1, with what it leaves open closed.

Five things differ from hypercorn 0.18's own connection, each found by a test (docs/decisions/0010-own-connection.md):
- A connection whose client has gone is closed at once; hypercorn keeps its tasks and descriptor until the keep-alive timeout.
- The socket is read while a request runs, so a disconnect is seen even behind bytes that were pipelined.
- A client that takes nothing for ``write_timeout_s`` is cut off; so is one that does not take the end within CLOSE_S.
- HTTP/2 (whose flow control is broken there), WebSockets, and a message with both lengths are refused.
- Refusals of the protocol itself carry the API's error object.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
import orjson
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr
from kvalet.api.errors import ApiError, error_body

LOGGER = logging.getLogger("kvalet.http")
READ_AHEAD = 2
"""Reads of at most MAX_RECV bytes that are taken from the socket before the request in progress asks for them. At the bound
the socket is not read any more: then a disconnect is seen at the next write."""
CLOSE_S = 5.0
WRITE_HIGH_BYTES, WRITE_LOW_BYTES = 32 * 1024, 24 * 1024
"""Unsent bytes above the first make a write wait until there are less than the second. A reader that takes fewer than their
difference within the write timeout counts as one that takes nothing."""
PROTOCOL_ERRORS = {
    400: ("The request is not valid HTTP/1.1.", "bad_request"),
    413: ("The request head is too large.", "head_too_large"),
    431: ("The request head is too large.", "head_too_large"),
}


class Http1(H11Protocol):
    """HTTP/1.1 and nothing else."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """hypercorn changes to HTTP/2 here."""

    async def _create_stream(self, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            await self._send_error_response(400)
            await self.send(Closed())
            return
        if b"upgrade" in names:  # a server may ignore the wish
            kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
            request = h11.Request(method=request.method, target=request.target, headers=kept, http_version=request.http_version)
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        message, code = PROTOCOL_ERRORS.get(status_code, PROTOCOL_ERRORS[400])
        body = orjson.dumps(error_body(ApiError(message, code=code, status=status_code)))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class Connection(TCPServer):
    """``await connection`` serves it until it is closed. ``abort`` cuts it off, unsent bytes and all."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        write_timeout_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(app, loop, config, context, {"connection": self}, reader, writer)
        writer.transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        self._write_timeout_s = write_timeout_s
        self.timed_out = False

    def abort(self) -> None:
        self.writer.transport.abort()

    async def run(self) -> None:
        try:
            socket = self.writer.get_extra_info("socket")
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup(self.loop) as task_group:
                self._task_group = task_group
                protocol: Any = Http1(
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    False,
                    client,
                    server,
                    self.protocol_send,
                )
                self.protocol = protocol
                await self.protocol.initiate()
                await self.idle_task.restart(task_group, self._idle_timeout)
                await self._read_data()
                await self.idle_task.stop()
        except OSError:
            pass  # the client went while its address was asked for
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            try:
                self.writer.write(event.data)
                async with asyncio.timeout(self._write_timeout_s):
                    await self.writer.drain()
            except TimeoutError:
                LOGGER.info("a client took nothing for %g s: cut off", self._write_timeout_s)
                self.timed_out = True
                self.abort()
                await self.protocol.handle(Closed())
            except (ConnectionError, RuntimeError):
                await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        """Reads ahead of the protocol, so that the end of the connection is seen while a request runs."""
        ahead: asyncio.Queue[bytes] = asyncio.Queue(READ_AHEAD)
        async with asyncio.TaskGroup() as group:
            feeder = group.create_task(self._feed(ahead))
            while data := await self._read():
                await ahead.put(data)
            # What it has not handled yet comes from a client that has gone. hypercorn swallows a cancellation that meets it
            # while it stops its idle timer, so once is not always enough.
            while not feeder.done():
                feeder.cancel()
                await asyncio.sleep(0)
        await self.protocol.handle(Closed())

    async def _feed(self, ahead: asyncio.Queue[bytes]) -> None:
        while True:
            await self.protocol.handle(RawData(await ahead.get()))

    async def _read(self) -> bytes:
        try:
            return bytes(await self.reader.read(MAX_RECV))
        except OSError:
            return b""

    async def _close(self) -> None:
        """Flush and close, within CLOSE_S; then cut."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await super()._close()
        except TimeoutError:
            self.abort()
            await self.idle_task.stop()

    def __repr__(self) -> str:
        return f"<Connection {self.writer.get_extra_info('peername')}>"


def connection_config(keep_alive_s: float, logger: logging.Logger) -> Config:
    """hypercorn's limits for this server. ``max_app_queue_size``: parts of a body waiting for the application."""
    values: dict[str, Any] = {
        "keep_alive_timeout": keep_alive_s,
        "keep_alive_max_requests": 1_000_000,
        "h11_max_incomplete_size": 64 * 1024,
        "max_app_queue_size": 8,
        "include_server_header": False,
        "accesslog": None,
        "errorlog": logger,
        "read_timeout": None,
    }
    return Config.from_mapping(values)
