"""A stub HTTP server on a real socket: each connection is answered by a script of (seconds after the request, bytes)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

Step = tuple[float, bytes]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def framed(raw: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(raw), raw)


def event(value: Any) -> bytes:
    """One server-sent event as one HTTP chunk."""
    text = value if isinstance(value, str) else json.dumps(value)
    return framed(f"data: {text}\n\n".encode())


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields}]})


def finish(reason: str = "stop") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage(completion: int, prompt: int = 10, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": counts})


def stream(*steps: Step) -> list[Step]:
    """The head at once, the steps at their times, then the end of the body."""
    last = steps[-1][0] if steps else 0.0
    return [(0.0, STREAM_HEAD), *steps, (last, framed(b""))]


def plain(status: int, body: Any, *headers: str) -> list[Step]:
    raw = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(raw)}", *headers]
    return [(0.0, ("\r\n".join(lines) + "\r\n\r\n").encode() + raw)]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return head + await reader.readexactly(length)


@asynccontextmanager
async def stub(script: Callable[[int, bytes], Sequence[Step]], gate: Callable[[], Any] | None = None) -> AsyncIterator[str]:
    """Serves until the block ends; gives the address. ``script(number, request)`` is asked once per connection, after ``gate``
    (an awaitable, where given) has let it through."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            request = await read_request(reader)
            number, count = count, count + 1
            if gate is not None:
                await gate()
            begin = asyncio.get_running_loop().time()
            for due_s, raw in script(number, request):
                await asyncio.sleep(begin + due_s - asyncio.get_running_loop().time())
                writer.write(raw)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone: some tests want just that
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
