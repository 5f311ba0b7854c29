"""``export``: one session as a plain tar: its records (as files and as JSON), its chunks and tails, and a manifest.

Deterministic: members in the order of their names, the manifest last, because it holds digests of what went before; all
times 0, owner 0. Each file is verified whole before its first byte goes out, and again while it goes out. Memory is one
buffer, whatever the sizes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from kvalet.store import header, layout
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.faultwords import explain, read_reason
from kvalet.store.fileio import DIRECTORY_FLAGS, READ_FLAGS
from kvalet.store.header import Refused, running_digest
from kvalet.store.inspect_file import GONE, Reader
from kvalet.store.inspect_open import Finding, Place
from kvalet.store.inspect_records import Stored
from kvalet.store.inspect_walk import Found, Tick
from kvalet.store.record import Record

MANIFEST = "MANIFEST.json"
PIECE_BYTES = 1 << 20
FORMAT = 1


@dataclass(slots=True)
class Exported:
    """``missing``: what records name and is not in the tar, and why."""

    members: list[dict[str, Any]] = field(default_factory=list)
    missing: list[Finding] = field(default_factory=list)
    n_bytes: int = 0

    def count(self, name: str, n_bytes: int, sha256: str) -> None:
        self.members.append({"name": name, "bytes": n_bytes, "sha256": sha256})
        self.n_bytes += n_bytes


class Changed(Exception):
    """A file could be verified, but not copied as it was: the tar is worthless."""


def named_files(stored: Sequence[Stored], files: Sequence[Found]) -> tuple[list[Found], list[str]]:
    """Files that the records name, in the order of their paths, and the keys (hex) that no file has."""
    by_key = {(found.file.folder, found.file.index_key[:8]): found for found in files if found.file.folder != layout.RECORDS}
    chosen: dict[str, Found] = {}
    lost: list[str] = []
    for one in stored:
        keys = [(layout.CHUNKS, key) for key in one.record.chunk_keys]
        keys += [(layout.TAILS, one.record.tail_key)] if one.record.tail_key is not None else []
        keys += [(layout.STATES, key) for key in one.record.state_keys]
        for folder, key in keys:
            found = by_key.get((folder, key[:8]))
            if found is None:
                lost.append(f"{folder}/{key.hex()}")
            else:
                chosen[found.path] = found
    return [chosen[path] for path in sorted(chosen)], sorted(set(lost))


def record_json(record: Record) -> bytes:
    """For people: keys as hex, one record per file."""
    fields = {name: _plain(value) for name, value in asdict(record).items()}
    return json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


def export(
    place: Place,
    stored: Sequence[Stored],
    files: Sequence[Found],
    out: BinaryIO,
    tick: Tick = lambda: None,
    *,
    missing: Sequence[Finding] = (),
) -> Exported:
    """Writes the tar. ``files``: those that the records name; ``missing``: what is known to be missing already. A file that is
    refused or gone is left out and named. OSError of ``out`` is passed on; Changed ends it, then what was written is to be
    thrown away."""
    done = Exported(missing=list(missing))
    reader = Reader(place)
    members: list[tuple[str, Found | bytes]] = [(found.path, found) for found in files]
    members += [(one.found.path, one.data) for one in stored]
    members += [(f"records/{one.record.branch}.json", record_json(one.record)) for one in stored]
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=PIECE_BYTES) as tar:
        for name, content in sorted(members, key=lambda member: member[0]):
            if isinstance(content, bytes):
                _add(tar, name, content, done)
                continue
            verdict = reader.examine(content, payload=True)
            if verdict.reason:
                done.missing.append(Finding(name, verdict.reason, verdict.field))
            else:
                _add_file(place, tar, verdict.found, done)
            tick()
        manifest = {
            "format": FORMAT,
            "store_id": place.store_id.hex() if place.store_id else None,
            "identity": dict(place.identity_fields),
            "session": stored[0].record.session,
            "members": done.members,
            "missing": [asdict(finding) for finding in done.missing],
        }
        _add(tar, MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n", None)
    return done


def _member(name: str, n_bytes: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = n_bytes, 0o600
    return info


def _add(tar: tarfile.TarFile, name: str, data: bytes, done: Exported | None) -> None:
    tar.addfile(_member(name, len(data)), io.BytesIO(data))
    if done is not None:
        done.count(name, len(data), hashlib.sha256(data).hexdigest())


def _add_file(place: Place, tar: tarfile.TarFile, found: Found, done: Exported) -> None:
    try:
        shard_fd = place.io.open(found.file.shard, DIRECTORY_FLAGS, dir_fd=place.folder_fds[found.file.folder])
        try:
            fd = place.io.open(found.file.name, READ_FLAGS, dir_fd=shard_fd)
        finally:
            place.close_quietly(shard_fd)
    except FileNotFoundError:
        done.missing.append(Finding(found.path, GONE, "evicted meanwhile"))
        return
    except OSError as error:
        done.missing.append(Finding(found.path, read_reason(error), explain(error)))
        return
    try:
        source = _Source(place, fd, found)
        tar.addfile(_member(found.path, found.st.size), source)
        source.refuse_changes()
        place.io.drop_cache(fd)
    finally:
        place.close_quietly(fd)
    done.count(found.path, found.st.size, source.sha256.hexdigest())


class _Source(io.RawIOBase):
    """A verified file as tarfile reads it, verified once more on the way. Raises Changed instead of giving too few bytes."""

    def __init__(self, place: Place, fd: int, found: Found) -> None:
        super().__init__()
        self._place, self._fd, self._found = place, fd, found
        self._at = 0
        self._head = b""
        self._payload = running_digest()
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        buffer = bytearray(min(size, self._found.st.size - self._at) if size >= 0 else self._found.st.size - self._at)
        try:
            got = self._place.io.preadv(self._fd, [buffer], self._at) if buffer else 0
        except OSError as error:  # not to be mistaken for one of the output
            raise Changed(self._found.path) from error
        if got < len(buffer):
            raise Changed(self._found.path)
        data = bytes(buffer)
        self.sha256.update(data)
        in_head = max(0, BLOCK_BYTES - self._at)
        self._head += data[:in_head]
        self._payload.update(data[in_head:])
        self._at += got
        return data

    def refuse_changes(self) -> None:
        """Changed if what was read is not what its own header says, or is another file than was verified."""
        head = header.unpack(self._head)
        if isinstance(head, Refused) or head.payload_digest != self._payload.digest():
            raise Changed(self._found.path)
