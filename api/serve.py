"""Starts the server, announces it, and ends it in order.

Order of the end (SIGTERM or SIGINT): new work is refused with 503 and ``Retry-After`` while the socket still answers; running
turns may end until ``drain_s``, then they end with ``shutdown`` (their streams get an error event and ``[DONE]``); sessions
are spilled; idle connections are closed and the rest is cut. A second signal skips what is left of the drain.
When the device is lost its turns have ended already (``device_error``); what RAM holds and the disk can use is written within
``flush_s``, the rest is counted in the log, and the exit status is 70, after which a restart goes on from what was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
from kvalet.api.app import build_app
from kvalet.api.config import ServerConfig
from kvalet.api.listener import Listener
from kvalet.api.ports import ServedEnginePort
from kvalet.sched.status import DrainReport

LOGGER = logging.getLogger("kvalet.serve")
EXIT_DEVICE_LOST = 70
CLOSE_GRACE_S = 2.0
"""For answers whose turn has ended to reach their clients."""
HURRIED_GRACE_S = 0.2
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Ending:
    """Why and how fast to end: signals and the loss of the device. Loop thread only."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self.device_lost = ""

    def signalled(self) -> None:
        if self.asked.is_set():
            self.hurry.set()
        self.asked.set()

    def lost(self, reason: str) -> None:
        self.device_lost = reason or "unknown"
        self.asked.set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Signals come here meanwhile."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.signalled)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


async def serve_engine(engine: ServedEnginePort, config: ServerConfig, say: Callable[[str], None]) -> int:
    """Serve a running engine until told to end; the exit status. OSError where the address cannot be had."""
    app = build_app(engine, config)
    listener = Listener(app, config)
    ending = Ending()
    engine.on_device_lost = ending.lost
    with ending.watching():
        host, port = await listener.start()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"kvalet: listening on {url}")
        with ready_file(config.ready_file, url):
            await ending.asked.wait()
            app.draining = True
            await drain(engine, config.flush_s if ending.device_lost else config.drain_s, ending)
            await listener.close(HURRIED_GRACE_S if ending.hurry.is_set() else CLOSE_GRACE_S)
    return EXIT_DEVICE_LOST if ending.device_lost else 0


async def drain(engine: ServedEnginePort, seconds: float, ending: Ending) -> None:
    """Until the engine is drained, or the second signal."""
    if ending.device_lost:
        LOGGER.error("the device is lost (%s): ending", ending.device_lost)
    else:
        LOGGER.info("ending: running turns have %g s", seconds)

    async def hurried(scope: anyio.CancelScope) -> None:
        await ending.hurry.wait()
        LOGGER.warning("second signal: what is not spilled yet stays behind")
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(hurried, group.cancel_scope)
        report = await engine.drain(seconds)
        LOGGER.info("drained: %s", drained_words(report))
        group.cancel_scope.cancel()


def drained_words(report: DrainReport) -> str:
    """What a drain left behind, for the log."""
    if report.left_behind is None:
        return "how much did not reach the disk is not known"
    words = f"{report.left_behind} chunks did not reach the disk" if report.left_behind else "nothing is left to do"
    if report.records_left:
        words += f", {report.records_left} sessions are not recorded to their end"
    if report.lost_pages or report.lost_chunks:
        words += f", {report.lost_pages} pages and {report.lost_chunks} chunks went with the device"
    return words


@contextlib.contextmanager
def ready_file(path: str, url: str) -> Iterator[None]:
    """``path`` holds the server's address as long as it accepts requests. It appears whole. "" = none."""
    if not path:
        yield
        return
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_text(url + "\n")
    partial.replace(target)
    try:
        yield
    finally:
        target.unlink(missing_ok=True)
