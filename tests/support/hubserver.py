"""A Hugging Face hub on loopback, as far as a download needs one: repository and tree listings, files by HEAD and GET with
ranges. Files come from a folder; every request is recorded; a file can be cut off in the middle once."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """``repositories``: "owner/name" -> folder; ``gated``: names that answer as gated ones; ``cut``: file name -> bytes after
    which its next download breaks off. ``requests``: (method, path, range header)."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.revisions = {"main", "v1", COMMIT}
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.url = ""

    def downloads(self, name: str) -> list[str]:
        """The range headers of the GETs of one file."""
        return [found for method, path, found in self.requests if method == "GET" and path.endswith(f"/{name}")]


@contextmanager
def hub() -> Iterator[Hub]:
    made = Hub()

    class Handler(_Handler):
        hub = made

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = listing or file
        name, revision = (found[1], found[3 if listing else 2]) if found else ("", "")
        if name in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if found is None or name not in self.hub.repositories:
            return self._refuse(401, "RepoNotFound")
        if revision not in self.hub.revisions:
            return self._refuse(404, "RevisionNotFound")
        folder = self.hub.repositories[name]
        if listing:
            return self._json(_info(name) if listing[2] == "revision" else _tree(folder))
        assert file is not None
        return self._file(folder / file[3], body=body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, path: Path, *, body: bool) -> None:
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin = int(asked[1]) if asked else 0
        end = min(len(data), int(asked[2]) + 1) if asked and asked[2] else len(data)
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if not body:
            return None
        cut = self.hub.cut.pop(path.name, None)
        self.wfile.write(data[begin:end] if cut is None else data[begin : begin + cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
        return None


def _info(name: str) -> dict[str, Any]:
    return {"_id": "0" * 24, "id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": [], "siblings": []}


def _tree(folder: Path) -> list[dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        {
            "type": "file",
            "path": str(path.relative_to(folder)),
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        }
        for path in files
    ]
