"""Records of the disk tier in memory: as bytes, so that whatever comes back has been told and understood."""

from __future__ import annotations

from collections.abc import Container

from kvalet.store.header import Refused
from kvalet.store.ids import ChunkKey
from kvalet.store.jobs import RecordResult
from kvalet.store.record import Record, RecordHome, decode, encode

Branch = tuple[str, str, str]
"""Tenant, session, branch."""
NOWHERE = RecordHome(bytes(16), bytes(32), bytes(16), bytes(16))


class FakeRecords:
    """Bound: ``capacity`` records; beyond it the oldest that is not pinned goes. ``files``: as they would stand on disk, the
    latest last; ``kept``: what pinned ones name."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.files: dict[Branch, bytes] = {}
        self.kept: dict[Branch, tuple[ChunkKey, ...]] = {}
        self._written = 0

    def branches(self, tenant: str, session: str) -> list[str]:
        """Most recent first."""
        return [branch[2] for branch in reversed(self.files) if branch[:2] == (tenant, session)]

    def write(self, job: int, record: Record, stored: Container[ChunkKey], *, full: bool) -> RecordResult:
        """``stored``: the keys that are durable."""
        if any(key not in stored for key in record.keys):
            return RecordResult(job, "missing")
        if full:
            return RecordResult(job, "full")
        self._written += 1
        data = encode(record, NOWHERE, self._written)
        branch = (record.tenant, record.session, record.branch)
        self.forget(branch)
        self.files[branch] = data
        if record.pinned:
            self.kept[branch] = record.keys
        while len(self.files) > self.capacity and (old := next((b for b in self.files if b not in self.kept), None)):
            self.forget(old)
        return RecordResult(job, n_bytes=len(data))

    def read(self, job: int, branch: Branch) -> RecordResult:
        data = self.files.get(branch, b"")
        found = decode(data, tenant=branch[0]) if data else Refused("missing", "file")
        if isinstance(found, Refused):
            self.forget(branch)
            return RecordResult(job, found.reason)
        self.files[branch] = self.files.pop(branch)
        return RecordResult(job, "", found, len(data))

    def forget(self, branch: Branch) -> None:
        self.files.pop(branch, None)
        self.kept.pop(branch, None)

    def pinned_keys(self) -> set[ChunkKey]:
        return {key for keys in self.kept.values() for key in keys}

    # faults

    def corrupt(self, tenant: str, session: str, branch: str) -> None:
        """One bit of it is not what was written."""
        data = bytearray(self.files[tenant, session, branch])
        data[len(data) // 2] ^= 1
        self.files[tenant, session, branch] = bytes(data)

    def vanish(self, tenant: str, session: str, branch: str) -> None:
        """Somebody removed the file; nobody was told."""
        self.files[tenant, session, branch] = b""
