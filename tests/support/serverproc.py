"""A real `kvalet serve` process for tests: started on a port of the system's choosing, ended by its own process id."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_S = 90.0


def model_path() -> str:
    """The default model's file; fails (never skips) when it is not there."""
    cache = Path(os.environ.get("KVALET_CACHE", Path.home() / ".cache" / "kvalet"))
    path = Path(os.environ.get("KVALET_MODEL", cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert path.is_file(), f"the default model is not at {path}: run `make model`"
    return str(path)


class Server:
    """``args`` are added to `kvalet serve MODEL`. Use as a context manager; ``log`` holds what it printed."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, served: str = "") -> None:
        """``served``: the model's file or folder, "" = the default model."""
        self.args = args
        self.served = served
        self.env = env or {}
        self.url = ""
        self._dir = tempfile.TemporaryDirectory(prefix="kvalet-test-")
        self._ready = Path(self._dir.name) / "ready"
        self._log = Path(self._dir.name) / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        command = [sys.executable, *self.program(), self.served or model_path(), "--port", "0"]
        command += ["--ready-file", str(self._ready), *self.args]
        if "--threads" not in self.args:  # one thread: two wait for each other whenever the machine is busy
            command += ["--threads", "1"]
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            environment = {**os.environ, "PYTHONSAFEPATH": "1", **self.env}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + START_S
        while not self._ready.exists() or not self._ready.read_text().strip():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not come up (exit {self.process.poll()}):\n{self.log}")
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        found = re.search(r"http://[0-9.]+:\d+", self._ready.read_text())
        assert found, self._ready.read_text()
        self.url = found.group(0)
        return self

    def program(self) -> list[str]:
        """What the interpreter is given before model and settings."""
        return ["-P", "-m", "kvalet", "serve"]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """SIGKILL, then reaped: what a power cut of the process looks like."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def terminate(self, timeout: float = 60.0) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._dir.cleanup()

    def request(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 120
    ) -> tuple[int, Any]:
        """(status, parsed JSON or text). ``body`` None makes a GET."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"content-type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode(errors="replace")

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, session: str = "", **fields: Any) -> dict[str, Any]:
        """POST /v1/completions, greedy, end of text ignored, ids returned, with the KV record."""
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        headers = {"X-Kvalet-Report": "1", **({"X-Session-ID": session} if session else {})}
        status, reply = self.request("/v1/completions", body, headers)
        assert status == 200, (status, reply, self.log[-3000:])
        assert isinstance(reply, dict)
        return reply

    @property
    def model(self) -> str:
        status, reply = self.request("/v1/models")
        assert status == 200, reply
        return str(reply["data"][0]["id"])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples whose labels include ``labels``; 0.0 when there is none."""
        _, text = self.request("/metrics")
        total = 0.0
        for line in str(text).splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total
