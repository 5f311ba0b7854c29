"""Accepts connections on one socket and ends them in order.

Bounds: at most ``max_connections`` at a time, the next one is closed at once (the process keeps descriptors for its store);
closing waits for answers under way at most as long as it is told, then cuts.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework
from kvalet.api.config import ServerConfig
from kvalet.api.connection import Connection, connection_config
from starlette.types import ASGIApp

LOGGER = logging.getLogger("kvalet.http")
BACKLOG = 2048
SEND_BUFFER_BYTES = 128 * 1024
"""Of each connection, in the kernel (which takes twice that). Left to itself it grows to megabytes per reader that stalls, and
hides the stall for minutes."""
SPARE_DESCRIPTORS = 256
"""Kept for model, store files and the rest when the limit on descriptors bounds the connections."""


class Listener:
    """``start`` binds and accepts; ``close`` ends. Loop thread only."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = ASGIWrapper(cast(ASGIFramework, app))
        self._config = config
        self._hypercorn = connection_config(config.keep_alive_s, LOGGER)
        self._context = WorkerContext(None)
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.refused = 0
        self.max_connections = config.max_connections

    def __len__(self) -> int:
        """Connections open now."""
        return len(self._connections)

    async def start(self) -> tuple[str, int]:
        """Bind and accept. (host, port) as bound. OSError if the address cannot be had."""
        self.max_connections = min(self._config.max_connections, max(16, raise_descriptor_limit() - SPARE_DESCRIPTORS))
        bound = bind(self._config.host, self._config.port)
        self._server = await asyncio.start_server(self._accept, sock=bound, backlog=BACKLOG)
        host, port = bound.getsockname()[:2]
        return host, port

    async def close(self, grace_s: float) -> None:
        """Accept no more, end idle connections now and the others when their answer is out, cut what is left after
        ``grace_s``. ``Server.wait_closed`` is not used: from Python 3.12 on it waits for connections without a bound."""
        if self._server is not None:
            self._server.close()
        await self._context.terminated.set()
        await self._until_empty(grace_s)
        for connection in list(self._connections):
            LOGGER.info("cut off at shutdown: %r", connection)
            connection.abort()
        await self._until_empty(1.0)
        for task in list(self._connections.values()):
            task.cancel()

    async def _until_empty(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self.max_connections:
            self.refused += 1
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        connection = Connection(self._app, self._hypercorn, self._context, reader, writer, self._config.write_timeout_s)
        self._connections[connection] = task
        self._empty.clear()
        try:
            await connection
        # The boundary of a connection's task: what is left here is a defect, and it must not end the server.
        except Exception:
            LOGGER.exception("%r failed", connection)
        finally:
            writer.transport.abort()  # nothing where it is closed already
            del self._connections[connection]
            if not self._connections:
                self._empty.set()


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket, IPv4 or IPv6 as ``host`` says."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def raise_descriptor_limit(wanted: int = 65_536, limits: Callable[[int], tuple[int, int]] = resource.getrlimit) -> int:
    """Raise the soft limit on open files to the hard one (at most ``wanted``); the limit that holds."""
    soft, hard = limits(resource.RLIMIT_NOFILE)
    best = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= best:
        return wanted if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
    except (ValueError, OSError):
        return soft
    return best
