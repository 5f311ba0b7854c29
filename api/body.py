"""Request bodies: bytes from the client -> one JSON object, within limits, off the event loop when it is large.

Order of the checks: content type and encoding (415), declared length (413), real length while reading (413), JSON (400),
an object (400), nesting (400). Duplicate keys: the last one counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
from kvalet.api.errors import ApiError
from starlette.types import Receive

BOM = b"\xef\xbb\xbf"
INLINE_BYTES = 32 * 1024
"""Bodies up to this are parsed on the loop (well under a millisecond); larger ones on a worker thread."""

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client left before its request was complete. Nobody is there to be answered."""


class BodyBudget:
    """Bytes of request bodies that all requests together may hold until they are parsed. At the bound the request that needs
    more gets 429, so that many large bodies at once cannot take the memory."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Gives a function that takes bytes from the budget (ApiError 429); all are given back at the end of the block."""
        taken = 0

        def take(n_bytes: int) -> None:
            nonlocal taken
            if self.held_bytes + n_bytes > self.limit_bytes:
                raise ApiError("Too many large requests at once.", status=429, code="bodies_full", retry_after_s=1.0)
            self.held_bytes += n_bytes
            taken += n_bytes

        try:
            yield take
        finally:
            self.held_bytes -= taken


def check_headers(headers: Mapping[str, str], max_bytes: int) -> None:
    """ApiError 415 or 413 from the headers alone. ``headers`` has lower-case names."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        said = f"not {kind!r}" if kind else "and the header is missing"
        raise ApiError(f"Content-Type must be application/json, {said}.", status=415, code="unsupported_media_type")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(f"Content-Encoding {encoding!r} is not supported.", status=415, code="unsupported_encoding")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large(max_bytes)


def too_large(max_bytes: int) -> ApiError:
    return ApiError(f"The request body is larger than the limit of {max_bytes} bytes.", status=413, code="body_too_large")


async def read_body(
    receive: Receive, headers: Mapping[str, str], max_bytes: int, timeout_s: float, take: Callable[[int], None]
) -> bytes:
    """The whole body, at most ``max_bytes``. ApiError 413, 415, 408 when nothing came for ``timeout_s``, or what ``take`` (told
    of the bytes of each piece) raises; ClientGone."""
    check_headers(headers, max_bytes)
    pieces: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            raise ApiError(f"No byte of the body came for {timeout_s:g} s.", status=408, code="body_timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise too_large(max_bytes)
        take(len(piece))
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def parse_object(data: bytes, max_nesting: int) -> dict[str, Any]:
    """One JSON object no deeper than ``max_nesting``. ApiError 400."""
    if not data.strip():
        raise ApiError("The request body is empty: a JSON object is needed.", code="invalid_json")
    try:
        value = orjson.loads(data.removeprefix(BOM))
    except orjson.JSONDecodeError as error:
        if "depth limit" in str(error):
            raise too_deep(max_nesting) from None
        raise ApiError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError("The request body must be a JSON object.", code="invalid_json")
    if deeper_than(value, max_nesting):
        raise too_deep(max_nesting)
    return value


def too_deep(max_nesting: int) -> ApiError:
    return ApiError(f"The JSON is nested deeper than the limit of {max_nesting} levels.", code="nesting_too_deep")


def deeper_than(value: Any, levels: int) -> bool:
    """Whether objects and lists stand more than ``levels`` deep in ``value``. Level by level, no recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    depth = 0
    while level:
        depth += 1
        if depth > levels:
            return True
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, (dict, list))
        ]
    return False


async def off_loop(data: bytes, work: Callable[[bytes], Result]) -> Result:
    """``work(data)``, on a worker thread if ``data`` is large. Cancelling the wait lets the thread finish unseen."""
    if len(data) <= INLINE_BYTES:
        return work(data)
    return await asyncio.to_thread(work, data)
