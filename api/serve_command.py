"""``kvalet serve``: settings, engine, server; and one sentence with status 2 for whatever keeps it from starting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvalet.api.collector import calm
from kvalet.api.config import EngineConfig, ServerConfig
from kvalet.api.settings import BadSettings, load
from kvalet.sched.engine_thread import THREAD_NAME

if TYPE_CHECKING:
    from kvalet.api.build import Parts, Progress

    Builder = Callable[[EngineConfig, Progress | None], Parts]

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CannotStart(Exception):
    """The sentence that says why."""


def main(arguments: Sequence[str]) -> int:
    try:
        settings = load(arguments, os.environ, Path.cwd())
        configure_logging(settings.log_level)
        return leave(run(settings.engine_config(), settings.server_config()))
    except (BadSettings, CannotStart) as error:
        print(f"kvalet: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:  # before the server took over the signal, or after it had ended
        print("kvalet: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def leave(status: int) -> int:
    """``status``. Where a step still computes (one may take longer than closing waits for it), the process ends right here:
    everything is closed, and the interpreter's own end would abort under that thread, with another status."""
    if any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


def configure_logging(level: str) -> None:
    """One line per record on standard error; standard output is for what the command itself says."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )


def run(engine: EngineConfig, server: ServerConfig, builder: Builder | None = None) -> int:
    """Serve until told to end; the exit status. CannotStart. ``builder``: makes the engine's parts, None: ``api.build``."""
    import uvloop

    # uvloop on every Python: hypercorn's connections close late on the stock loop from 3.12 on.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(engine, server, builder))


async def serve(engine_config: EngineConfig, server_config: ServerConfig, builder: Builder | None = None) -> int:
    from kvalet.api.build import StartError, build
    from kvalet.api.engine import Engine
    from kvalet.api.serve import serve_engine

    engine = Engine(
        engine_config,
        progress=lambda step, of, what: say(f"kvalet: {step}/{of} {what}"),
        builder=builder if builder is not None else build,
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(engine)
        except StartError as error:
            raise CannotStart(str(error)) from error
        calm()
        for line in engine.banner():
            say(f"kvalet: {line}")
        try:
            return await serve_engine(engine, server_config, say)
        except OSError as error:
            where = f"{server_config.host} port {server_config.port}"
            raise CannotStart(f"cannot listen on {where}: {error.strerror or error}") from error


def say(line: str) -> None:
    print(line, flush=True)
