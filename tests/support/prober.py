"""Asks a server for /health again and again from a process of its own, so that its figures are the server's and not those of
a test that is busy with large bodies: `python prober.py HOST PORT PAUSE_S`, until its standard input is closed. Prints the
seconds of each probe as JSON."""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from urllib.parse import urlsplit


def main(host: str, port: int, pause_s: float) -> None:
    times: list[float] = []
    while True:
        began = time.monotonic()
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        times.append(time.monotonic() - began)
        if len(times) == 1:
            print("probing", flush=True)
        if select.select([sys.stdin], [], [], pause_s)[0]:
            break
    print(json.dumps(times))


class Prober:
    """A context manager around that process; ``times`` (s) is there at the end of the block. The first probe has been answered
    when the block begins."""

    def __init__(self, url: str, pause_s: float) -> None:
        address = urlsplit(url)
        self._command = [sys.executable, __file__, str(address.hostname), str(address.port), str(pause_s)]
        self.times: list[float] = []

    def __enter__(self) -> Prober:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "probing\n"
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            out, _ = self._process.communicate(timeout=60)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        assert self._process.returncode == 0
        self.times = json.loads(out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
