"""A real server process over a scripted engine: `python scripted_server.py READY_FILE [--setting value ...]`.

The script of a turn is what the last message says, in words: "text:abc" and "big:N" give text, "call:INDEX:NAME:JSON" a tool
call in two parts, "wait" waits for ever, "later:S" for S seconds, "stop", "length" and "tool_calls" end, "refuse" is a 429,
"lose" loses the device, "break" is a defect in the engine.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import uvloop
from kvalet.api.config import ServerConfig
from kvalet.api.errors import ApiError
from kvalet.api.requests import ChatRequest, TextDelta, ToolCallDelta
from kvalet.api.serve import serve_engine
from kvalet.api.serve_command import configure_logging
from scripted_engine import ScriptedEngine, Step, ended, text_deltas


def script(engine: ScriptedEngine, request: Any) -> Iterable[Step]:
    words = (request.messages[-1]["content"] if isinstance(request, ChatRequest) else str(request.prompt)).split()
    if "refuse" in words:
        raise ApiError("Too many requests are waiting.", status=429, code="queue_full", retry_after_s=1.0)
    print("turn started", flush=True)
    return steps(engine, words)


def steps(engine: ScriptedEngine, words: list[str]) -> Iterator[Step]:
    for word in words:
        name, _, value = word.partition(":")
        if name == "text":
            yield from text_deltas(value)
        elif name == "big":
            yield from (TextDelta("x" * 4096, (120,)) for _ in range(int(value)))
        elif name == "wait":
            yield asyncio.Event()
        elif name == "later":
            event = asyncio.Event()
            asyncio.get_running_loop().call_later(float(value), event.set)
            yield event
        elif name == "lose" and engine.on_device_lost is not None:
            engine.on_device_lost("the script says so")
        elif name == "break":
            raise RuntimeError("the script broke")
        elif name == "call":
            index, function, arguments = value.split(":", 2)
            yield ToolCallDelta(int(index), arguments[:3], id=f"call_{index}", name=function)
            yield ToolCallDelta(int(index), arguments[3:])
        elif name in ("stop", "length", "tool_calls"):
            yield ended(name)


async def main(ready_file: str, **fields: Any) -> int:
    engine = ScriptedEngine()
    engine.script = partial(script, engine)
    config = replace(ServerConfig(port=0, ready_file=ready_file), **fields)
    return await serve_engine(engine, config, lambda line: print(line, flush=True))


if __name__ == "__main__":
    fields = {key: float(value) if "." in value else int(value) for key, value in (w.split("=") for w in sys.argv[2:])}
    configure_logging("info")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(sys.argv[1], **fields)))
