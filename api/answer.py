"""From a turn to a response: one event pipeline for streams and whole answers, whatever the API's shape.

The turn belongs to the request, not to a generator: whichever way this function is left - answered, refused, client gone,
cancelled by the server - the turn is cancelled on the way out (which is nothing where it has ended). The connection is
watched the whole time, for whole answers too. A client that closes its sending side counts as gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

import anyio
import orjson
from kvalet.api.errors import ApiError, ended_badly, error_body
from kvalet.api.exchange import Exchange
from kvalet.api.ports import TurnPort
from kvalet.api.requests import Delta, TurnEnd
from kvalet.api.sse import SseWriter
from starlette.types import Receive, Send

LAST_WORDS_S = 1.0
"""How long the log waits for the record of a turn whose client has gone."""


class Shape(Protocol):
    """One API's form of an answer. Made per request; sees every delta in order, then the end."""

    def opening(self) -> Mapping[str, Any] | None:
        """Chunk before the first delta."""
        ...

    def chunk(self, delta: Delta) -> Mapping[str, Any] | None:
        """Chunk of one delta; None where there is nothing to tell."""
        ...

    def closing(self, end: TurnEnd) -> list[Mapping[str, Any]]:
        """Chunks after the last delta: the finish reason, then usage where asked for."""
        ...

    def fold(self, delta: Delta) -> None:
        """Takes one delta of a whole answer."""
        ...

    def whole(self, end: TurnEnd) -> Mapping[str, Any]:
        """The whole answer, after all deltas were folded."""
        ...


Form = Callable[[str], Shape]
"""Makes the shape of the answer to the turn of this id."""


async def answer_stream(
    receive: Receive, writer: SseWriter, start: Callable[[], Awaitable[TurnPort]], form: Form, exchange: Exchange
) -> None:
    """ApiError from ``start`` comes out as it is while no byte was sent; later errors are events, followed by [DONE]."""

    async def work(held: _HeldTurn) -> None:
        try:
            turn = held.keep(await start())
        except ApiError as error:
            if not writer.opened:
                raise
            await _end_with_error(writer, error, exchange)
            return
        await writer.open()
        shape = form(turn.id)
        opening = shape.opening()
        if opening is not None:
            await writer.event(opening)
        async for item in turn:
            if isinstance(item, TurnEnd):
                exchange.end = item
                break
            chunk = shape.chunk(item)
            if chunk is not None:
                await writer.event(chunk)
        await _close_stream(writer, shape, exchange)

    await _while_connected(receive, work, exchange, writer.keep_alive)


async def answer_whole(
    receive: Receive, send: Send, start: Callable[[], Awaitable[TurnPort]], form: Form, exchange: Exchange
) -> None:
    """ApiError for a refusal or an end that is no answer."""

    async def work(held: _HeldTurn) -> None:
        turn = held.keep(await start())
        shape = form(turn.id)
        async for item in turn:
            if isinstance(item, TurnEnd):
                exchange.end = item
                break
            shape.fold(item)
        end = _ended(exchange)
        await send_json(send, 200, shape.whole(end))

    await _while_connected(receive, work, exchange)


async def send_json(send: Send, status: int, value: Mapping[str, Any], headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    body = orjson.dumps(value)
    fixed = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _ended(exchange: Exchange) -> TurnEnd:
    """The end, if it is an answer. ApiError otherwise."""
    end = exchange.end
    if end is None:
        raise ApiError("The turn ended without saying why.", status=500, code="internal_error")
    if end.finish_reason == "error":
        raise ended_badly(end.reason, end.message)
    return end


async def _close_stream(writer: SseWriter, shape: Shape, exchange: Exchange) -> None:
    try:
        end = _ended(exchange)
    except ApiError as error:
        await _end_with_error(writer, error, exchange)
        return
    for chunk in shape.closing(end):
        await writer.event(chunk)
    await writer.close()


async def _end_with_error(writer: SseWriter, error: ApiError, exchange: Exchange) -> None:
    exchange.error_code = error.code or ""
    await writer.event(error_body(error))
    await writer.close()


class _HeldTurn:
    """The turn of one request, so that it can be cancelled from outside the task that reads it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.turn: TurnPort | None = None

    def keep(self, turn: TurnPort) -> TurnPort:
        self.turn = turn
        self._exchange.turn_id = turn.id
        return turn

    def cancel(self) -> None:
        if self.turn is not None:
            self.turn.cancel()

    async def last_words(self) -> None:
        """After ``cancel``: waits shortly for the end, for the log."""
        if self.turn is None or self._exchange.end is not None:
            return
        with anyio.move_on_after(LAST_WORDS_S):
            async for item in self.turn:
                if isinstance(item, TurnEnd):
                    self._exchange.end = item
                    break


async def _while_connected(
    receive: Receive,
    work: Callable[[_HeldTurn], Awaitable[None]],
    exchange: Exchange,
    companion: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """``work`` until it is done or the client has gone, then everything else is cancelled. Work's ApiError comes out bare."""
    held = _HeldTurn(exchange)
    refusal: ApiError | None = None
    finished = False
    try:
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                held.cancel()
                group.cancel_scope.cancel()

            group.start_soon(watch)
            if companion is not None:
                group.start_soon(companion)
            try:
                await work(held)
                finished = True
            except ApiError as error:
                refusal = error
            group.cancel_scope.cancel()
    finally:
        held.cancel()
    if refusal is not None:
        raise refusal
    if not finished:
        exchange.client_gone = True
        await held.last_words()
