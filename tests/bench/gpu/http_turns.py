"""Turns over HTTP for the rotation: a `kvalet serve` process of the same configuration, token ids in and out."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
from kvalet.api.config import EngineConfig

START_S = 600.0
RECORD = ("prompt_tokens", "computed_tokens", "resident_tokens", "ram_tokens", "disk_tokens", "preemptions")


class HttpSide:
    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model = client, model

    async def turn(self, history: list[int], session: str, new: int) -> tuple[list[float], dict[str, int]]:
        """See ``rotation.Side``."""
        body = {
            "model": self._model, "prompt": history, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        headers = {"X-Kvalet-Report": "1", **({"X-Session-ID": session} if session else {})}
        stamps: list[float] = []
        report: dict[str, Any] = {}
        answer: list[int] = []
        async with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            assert reply.status_code == 200, (await reply.aread())[:500]
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    ids = choice.get("token_ids") or []
                    answer += ids
                    stamps += [time.monotonic()] * len(ids)
                report = event.get("kvalet") or report
        history.extend(answer)
        return stamps, {name: int(report[name]) for name in RECORD}

    def lag(self) -> dict[str, float]:
        """The server's own figures are in its /metrics; the client's say nothing."""
        return {}


@asynccontextmanager
async def served(config: EngineConfig) -> AsyncIterator[HttpSide]:
    """A server process, ended by its own process id."""
    flags = {
        "device": config.device, "load-format": config.load_format, "pool-tokens": config.pool_tokens,
        "ram-bytes": config.ram_bytes, "max-rows": config.max_rows, "step-tokens": config.step_tokens,
        "idle-step-tokens": config.idle_step_tokens, "queue-limit": config.queue_limit, "port": 0,
        "max-body-bytes": 64 << 20, "served-name": "shape",
    }  # fmt: skip
    if config.store_dir:
        flags |= {"store": config.store_dir, "store-bytes": config.store_bytes}
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-P", "-m", "kvalet", "serve", config.model, "--ready-file", str(ready), *words]
        process = await anyio.to_thread.run_sync(partial(subprocess.Popen, command, stdin=subprocess.DEVNULL))
        try:
            with anyio.fail_after(START_S):
                while not ready.exists():
                    assert process.poll() is None, f"the server ended with status {process.returncode}"
                    await anyio.sleep(0.1)
            async with httpx.AsyncClient(base_url=ready.read_text().strip(), timeout=600.0) as client:
                yield HttpSide(client, "shape")
        finally:
            process.terminate()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(process.wait, 120)
