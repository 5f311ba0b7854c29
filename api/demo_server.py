"""The demo's server: a `kvalet serve` process of its own, started, watched, scraped, killed or ended by its own process id."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType

from kvalet.loadtest.client import Endpoint, ProtocolError, fetch
from prometheus_client.parser import text_string_to_metric_families

START_S = 120.0
STOP_S = 60.0
KEPT_LINES = 200
LISTENING = re.compile(r"listening on (http://\S+)")


class ServerError(Exception):
    """The server did not do what it must; the text says what, with its own last lines."""


def serve_command(arguments: Sequence[str], python: str = sys.executable) -> list[str]:
    """`kvalet serve` on a port of the system's choosing."""
    return [python, "-P", "-m", "kvalet", "serve", *arguments, "--port", "0"]


class ServerProcess:
    """One life of a server that prints "listening on URL". Its output is read all the time (the last KEPT_LINES lines are
    kept), so it never blocks on it.

    Use as an async context manager: leaving kills what is still running.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[str] | None = None
        self.endpoint = Endpoint("127.0.0.1", 0)

    async def __aenter__(self) -> ServerProcess:
        self._ready = asyncio.get_running_loop().create_future()
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
        )
        self._reader = asyncio.create_task(self._read(), name="kvalet demo: server output")
        try:
            async with asyncio.timeout(START_S):
                url = await asyncio.shield(self._ready)
        except TimeoutError:
            await self.kill()
            raise ServerError(f"the server did not come up within {START_S:g} s\n{self.log}") from None
        except ServerError:
            await self.kill()
            raise
        self.endpoint = Endpoint.of(url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def log(self) -> str:
        return "\n".join(self._lines)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._ready is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            if not self._ready.done() and (found := LISTENING.search(line)):
                self._ready.set_result(found[1])
        if not self._ready.done():
            self._ready.set_exception(ServerError(f"the server ended before it listened\n{self.log}"))

    async def kill(self) -> None:
        """SIGKILL, and waits until the process is gone. Harmless when it is gone already."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._gone()

    async def terminate(self) -> int:
        """SIGTERM: the server drains and ends. Its exit status. Raises ServerError if it takes longer than STOP_S."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                return await self._gone()
        except TimeoutError:
            raise ServerError(f"the server did not end within {STOP_S:g} s of SIGTERM\n{self.log}") from None

    async def _gone(self) -> int:
        assert self._process is not None
        assert self._reader is not None
        status = await self._process.wait()
        await self._reader
        return status

    async def scrape(self) -> Scrape:
        """The server's figures now. Raises ServerError if they cannot be had."""
        try:
            status, raw = await fetch(self.endpoint, "/metrics")
        except (OSError, ProtocolError, TimeoutError) as error:
            raise ServerError(f"/metrics does not answer: {error}\n{self.log}") from error
        if status != 200:
            raise ServerError(f"/metrics answers with status {status}")
        return Scrape.of(raw.decode())


class Scrape:
    """Samples of one scrape: (name, label values in the order of label names) -> value."""

    def __init__(self, samples: Mapping[tuple[str, tuple[str, ...]], float]) -> None:
        self._samples = dict(samples)

    @classmethod
    def of(cls, text: str) -> Scrape:
        """From Prometheus' text format. Raises ValueError for anything else."""
        return cls(
            {
                (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def value(self, name: str, *labels: str) -> float:
        """Raises ServerError if there is no such sample: a figure that is missing must not pass for 0."""
        try:
            return self._samples[name, labels]
        except KeyError:
            raise ServerError(f"/metrics has no {name}{list(labels)}") from None

    def by_label(self, name: str) -> dict[str, float]:
        """Label value -> value, for a family with one label; {} if it has no samples."""
        return {labels[0]: value for (found, labels), value in self._samples.items() if found == name and len(labels) == 1}
