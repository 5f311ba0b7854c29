"""The scripted server (scripted_server.py) as a subprocess, and a plain HTTP client over a socket that can misbehave."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPT = Path(__file__).with_name("scripted_server.py")
START_S = 60.0


def until(what: str, check: Any, timeout_s: float = 30.0) -> Any:
    """The first true value of ``check()``. The condition lies in another process, so it is asked for again and again."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        pause(0.02)


def pause(seconds: float) -> None:
    """Between two questions to another process."""
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(seconds)
        try:
            one.recv(1)
        except TimeoutError:
            return


class ScriptedProcess:
    """``fields`` are fields of ServerConfig. Use as a context manager."""

    def __init__(self, folder: Path, preexec: Any = None, **fields: float) -> None:
        self.ready = folder / "ready"
        self.log_path = folder / "log"
        words = [f"{name}={value}" for name, value in fields.items()]
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(SCRIPT.parent)}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.ready), *words],
                stdout=log, stderr=log, env=environment, preexec_fn=preexec,
            )  # fmt: skip
        try:
            until("the server is up", lambda: self.ready.exists() or self.process.poll() is not None, START_S)
            assert self.process.poll() is None, self.log
            self.url = self.ready.read_text().strip()
        except BaseException:
            self.process.kill()
            self.process.wait(10)
            raise
        host, port = self.url.removeprefix("http://").split(":")
        self.address = (host, int(port))

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> ScriptedProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_status(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def health(self) -> bool:
        with urllib.request.urlopen(self.url + "/health", timeout=5) as reply:
            return bool(reply.status == 200)

    def turns_started(self) -> int:
        return self.log.count("turn started")

    def requests_logged(self) -> list[dict[str, Any]]:
        """The records of the requests that are over, but for probes."""
        lines = [line.partition("kvalet.request request ")[2] for line in self.log.splitlines()]
        return [json.loads(line) for line in lines if line]


def chat_request(script: str, *, stream: bool = True, **fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": script}], "stream": stream, **fields}
    return raw_request("POST", "/v1/chat/completions", json.dumps(body).encode())


def raw_request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: test"]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Wire:
    """One TCP connection."""

    def __init__(self, address: tuple[str, int], receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect(address)
        self.seen = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_until(self, marker: bytes) -> bytes:
        """All that was received so far, up to and with ``marker``; or everything, where the connection ends before."""
        while marker not in self.seen:
            data = self.socket.recv(65536)
            if not data:
                return self.seen
            self.seen += data
        return self.seen

    def read_all(self) -> bytes:
        """Until the server closes."""
        while data := self.socket.recv(65536):
            self.seen += data
        return self.seen

    def reset(self) -> None:
        """Close with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
