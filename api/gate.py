"""The outermost layer of the server: every request passes in and out here, once.

It names the request (``x-request-id``), asks for a key, refuses work while the server drains, turns every exception into the
API's error object, reads off what is left of a body that was refused early (so that the client can read the refusal), and
logs and counts the request when it is over. No traceback ever reaches a client.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvalet.api.answer import send_json
from kvalet.api.auth import OPEN_PATHS, tenant_of
from kvalet.api.body import ClientGone
from kvalet.api.config import ServerConfig
from kvalet.api.errors import ApiError, error_body, retry_after
from kvalet.api.exchange import Exchange
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGER = logging.getLogger("kvalet.http")
MAX_REQUEST_ID_CHARS = 128
DISCARD_BYTES = 256 << 20
DISCARD_S = 10.0
"""How much of a refused body is read off, and for how long; then the connection is cut."""
DRAIN_RETRY_S = 5.0


class Gate:
    """ASGI application around the routes. ``finished`` is told of every exchange; what it raises is logged and dropped."""

    def __init__(self, routes: ASGIApp, config: ServerConfig, finished: Callable[[Exchange], None]) -> None:
        self._routes = routes
        self._config = config
        self._finished = finished
        self.draining = False
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse_other(scope["type"], receive, send)
            return
        headers = lower_headers(scope)
        exchange = Exchange(request_id(headers), scope["method"], scope["path"])
        scope["app"] = self  # tells the router to raise its 404 and 405 instead of answering in plain text
        scope.setdefault("state", {}).update(exchange=exchange, headers=headers)
        wire = Wire(scope, receive, send, exchange, headers)
        self.running += 1
        try:
            await self._serve(scope, wire, exchange, headers)
        finally:
            self.running -= 1
            self._over(exchange)

    async def _serve(self, scope: Scope, wire: Wire, exchange: Exchange, headers: Mapping[str, str]) -> None:
        try:
            if exchange.path not in OPEN_PATHS:
                exchange.tenant = tenant_of(headers, self._config.api_keys)
            if self.draining and exchange.method == "POST":
                raise ApiError("The server is shutting down.", status=503, code="shutdown", retry_after_s=DRAIN_RETRY_S)
            await self._routes(scope, wire.receive, wire.send)
        except ClientGone:
            exchange.client_gone = True
        except ApiError as error:
            await wire.refuse(error)
        except HTTPException as error:
            await wire.refuse(from_framework(error, exchange), error.headers or {})
        # The last boundary of a request: a defect must become a 500 with its traceback in the log, not in the answer.
        except Exception:
            LOGGER.exception("request %s failed: %s %s", exchange.id, exchange.method, exchange.path)
            if exchange.status:
                raise  # the answer has begun: cutting the connection is the only way left to say that it is not whole
            await wire.refuse(ApiError("The server failed to handle this request.", status=500, code="internal_error"))

    def _over(self, exchange: Exchange) -> None:
        # Counting must never touch an answer.
        try:
            exchange.log()
            self._finished(exchange)
        except Exception:
            LOGGER.exception("request %s could not be counted", exchange.id)


class ConnectionPort(Protocol):
    """What the server says about the connection under a request (``scope["state"]["connection"]``)."""

    timed_out: bool
    """The client took nothing for the write timeout and was cut off."""

    def abort(self) -> None: ...


class Wire:
    """``receive`` and ``send`` of one request, watched."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange, headers: Mapping[str, str]) -> None:
        self._receive = receive
        self._send = send
        self._exchange = exchange
        self._connection: ConnectionPort | None = scope.get("state", {}).get("connection")
        self._body_pending = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self._gone = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone = True
            if self._connection is not None and self._connection.timed_out:
                self._exchange.error_code = "write_timeout"
        elif not message.get("more_body", False):
            self._body_pending = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._exchange.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self._exchange.id.encode())]
        elif self._body_pending and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._discard()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def refuse(self, error: ApiError, headers: Mapping[str, str] | None = None) -> None:
        """The error object, unless an answer has begun."""
        self._exchange.error_code = error.code or ""
        if self._exchange.status:
            return
        extra = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        if error.retry_after_s > 0:
            extra.append((b"retry-after", retry_after(error.retry_after_s).encode()))
        if error.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        await send_json(self.send, error.status, error_body(error), tuple(extra))

    async def _discard(self) -> None:
        """Read the rest of the body, within bounds: closing with unread bytes would reset the connection, and the client
        would never see the answer."""
        left = DISCARD_BYTES
        try:
            async with asyncio.timeout(DISCARD_S):
                while self._body_pending and not self._gone and left > 0:
                    message = await self.receive()
                    left -= len(message.get("body", b""))
        except TimeoutError:
            left = 0
        if left <= 0 and not self._gone and self._connection is not None:
            self._connection.abort()


def lower_headers(scope: Scope) -> dict[str, str]:
    """Header names in lower case; of repeated ones the first counts."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own ``x-request-id`` where it is usable, else a new one."""
    given = headers.get("x-request-id", "")
    usable = 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
    return given if usable else f"req_{os.urandom(12).hex()}"


def from_framework(error: HTTPException, exchange: Exchange) -> ApiError:
    """The router's refusals, in the API's words."""
    if error.status_code == 404:
        return ApiError(f"There is nothing at {exchange.method} {exchange.path}.", status=404, code="not_found")
    if error.status_code == 405:
        return ApiError(f"{exchange.path} does not take {exchange.method}.", status=405, code="method_not_allowed")
    return ApiError(str(error.detail), status=error.status_code)


async def _refuse_other(kind: str, receive: Receive, send: Send) -> None:
    """WebSockets are closed; lifespan is answered, there is nothing to start."""
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    while kind == "lifespan":
        message: Any = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
