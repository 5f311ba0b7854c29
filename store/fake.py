"""The disk tier in memory, with faults by script. No threads, no files.

Implements ``StorePort`` of the scheduler. ``hold`` False: jobs run inside the call; True: they wait in ``pending`` until
whoever scripts the order calls ``run`` (slow), or ``refuse`` (any reason). Faults that last: ``full``, ``writable``;
faults of one chunk: ``corrupt`` (bytes changed), ``tear`` (cut short), ``vanish`` (gone without a word).

Bound: ``capacity`` chunks; beyond it the least recently used entry without children that is not pinned is evicted and
``on_gone`` is called, and if there is none the write is refused as "full". Records: ``fake_records.py``.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.store.fake_records import Branch, FakeRecords
from kvalet.store.ids import ChunkKey, ChunkMeta, TailRef, chunk_key
from kvalet.store.jobs import ReadResult, RecordResult, WriteResult
from kvalet.store.record import Record

NO_SLOT = memoryview(b"")


@dataclass(slots=True)
class _Entry:
    meta: ChunkMeta
    data: bytes
    digest: int
    recency: int


@dataclass(slots=True)
class FakeJob:
    """One job. ``run`` does it, ``refuse`` fails it for ``reason``; either calls ``done`` exactly once."""

    store: FakeStore
    job: int
    kind: str
    slot: memoryview
    done: Callable[[Any], None]
    meta: ChunkMeta | None = None
    parent: bytes = b""
    ids: tuple[int, ...] = ()
    candidates: tuple[TailRef, ...] = ()
    secret: bytes = b""
    record: Record | None = None
    branch: Branch = ("", "", "")

    def run(self) -> None:
        self._leave()
        self.done(self.store.execute(self))

    def refuse(self, reason: str) -> None:
        self._leave()
        if "record" in self.kind:
            self.done(RecordResult(self.job, reason))
        else:
            self.done(WriteResult(self.job, reason) if self.kind == "write" else ReadResult(self.job, reason))

    def _leave(self) -> None:
        if self in self.store.pending:
            self.store.pending.remove(self)


class FakeStore:
    def __init__(self, *, capacity: int = 1 << 30, identity: bytes = b"", hold: bool = False) -> None:
        """``identity``: parent of first chunks; b"" takes any parent that is not an entry's key for that."""
        self.capacity = capacity
        self.identity = identity
        self.hold = hold
        self.full = False
        self.writable = True
        self.pending: list[FakeJob] = []
        self.entries: dict[ChunkKey, _Entry] = {}
        self.records = FakeRecords(capacity)
        self.pins: Counter[ChunkKey] = Counter()
        self.on_gone: Callable[[tuple[ChunkKey, ...]], None] = lambda keys: None
        self._gone: list[ChunkKey] = []
        self._clock = 0

    # DiskView

    def has(self, key: ChunkKey) -> bool:
        return key in self.entries

    def tails(self, parent: bytes) -> Sequence[TailRef]:
        found = [e for e in self.entries.values() if e.meta.tail and e.meta.parent == parent]
        found.sort(key=lambda e: -e.recency)
        return [TailRef(parent, len(e.meta.ids), e.meta.key.hex()[:16]) for e in found]

    def accepts_writes(self) -> bool:
        return self.writable

    def branches(self, tenant: str, session: str) -> Sequence[str]:
        return self.records.branches(tenant, session)

    # jobs

    def read(
        self, job: int, meta: ChunkMeta, slot: memoryview, done: Callable[[Any], None], *, session: str, klass: int
    ) -> None:
        self._take(FakeJob(self, job, "read", slot, done, meta))

    def read_tail(
        self,
        job: int,
        parent: bytes,
        ordinal: int,
        first_token: int,
        ids: Sequence[int],
        candidates: Sequence[TailRef],
        slot: memoryview,
        done: Callable[[Any], None],
        *,
        session: str,
        klass: int,
        secret: bytes = b"",
    ) -> None:
        self._take(FakeJob(self, job, "read_tail", slot, done, None, parent, tuple(ids), tuple(candidates), secret))

    def write(self, job: int, meta: ChunkMeta, slot: memoryview, done: Callable[[Any], None], *, klass: int) -> None:
        self._take(FakeJob(self, job, "write", slot, done, meta))

    def write_record(self, job: int, record: Record, done: Callable[[Any], None], *, klass: int) -> None:
        branch = (record.tenant, record.session, record.branch)
        self._take(FakeJob(self, job, "write_record", NO_SLOT, done, record=record, branch=branch))

    def read_record(self, job: int, tenant: str, session: str, branch: str, done: Callable[[Any], None]) -> None:
        self._take(FakeJob(self, job, "read_record", NO_SLOT, done, branch=(tenant, session, branch)))

    def drop_record(self, tenant: str, session: str, branch: str) -> None:
        """What waits to be written under that name is as if it had been written and then dropped."""
        name = (tenant, session, branch)
        for waiting in [one for one in self.pending if one.kind == "write_record" and one.branch == name]:
            waiting.run()
        self.records.forget(name)

    def cancel(self, job: int) -> None:
        """What waits is refused as cancelled."""
        for waiting in list(self.pending):
            if waiting.job == job:
                waiting.refuse("cancelled")

    def settle(self, completion: Any) -> Any:
        if self._gone:
            gone, self._gone = tuple(self._gone), []
            self.on_gone(gone)
        return completion

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        self.pins.update(keys)

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            if self.pins[key] < 1:
                raise RuntimeError(f"{key.hex()[:8]} is not pinned")
            self.pins[key] -= 1

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        self._clock += 1
        for key in keys:
            if key in self.entries:
                self.entries[key].recency = self._clock

    # faults

    def corrupt(self, key: ChunkKey) -> None:
        """Its bytes are not what was written."""
        data = bytearray(self.entries[key].data)
        if data:
            data[len(data) // 2] ^= 0xFF
        self.entries[key].data = bytes(data)

    def tear(self, key: ChunkKey) -> None:
        """Half of it is there."""
        self.entries[key].data = self.entries[key].data[: len(self.entries[key].data) // 2]

    def vanish(self, key: ChunkKey) -> None:
        """Somebody removed the file; nobody was told. It is found out by reading."""
        self.entries[key].data = b""

    def evict(self, key: ChunkKey) -> None:
        """Gone, and ``on_gone`` says so."""
        del self.entries[key]
        self.on_gone((key,))

    # the work

    def execute(self, job: FakeJob) -> ReadResult | WriteResult | RecordResult:
        if job.kind == "read_record":
            return self.records.read(job.job, job.branch)
        if job.record is not None:
            return self._write_record(job.job, job.record)
        if job.kind == "write":
            return self._write(job)
        return self._read_tail(job) if job.kind == "read_tail" else self._read(job)

    def _take(self, job: FakeJob) -> None:
        if self.hold:
            self.pending.append(job)
        else:
            job.run()

    def _write(self, job: FakeJob) -> WriteResult:
        meta = job.meta
        assert meta is not None
        if not self.writable:
            return WriteResult(job.job, "read_only")
        if meta.key in self.entries:
            return WriteResult(job.job, skipped=True)
        if meta.ordinal > 0 and meta.parent not in self.entries:
            return WriteResult(job.job, "ancestor")
        if self.full or not self._make_room(meta.parent):
            return WriteResult(job.job, "full")
        data = bytes(job.slot)
        self._clock += 1
        self.entries[meta.key] = _Entry(meta, data, zlib.crc32(data), self._clock)
        return WriteResult(job.job, n_bytes=len(data))

    def _write_record(self, job: int, record: Record) -> RecordResult:
        if not self.writable:
            return RecordResult(job, "read_only")
        return self.records.write(job, record, self.entries, full=self.full)

    def _make_room(self, parent: bytes) -> bool:
        kept = self.records.pinned_keys()
        while len(self.entries) >= self.capacity:
            parents = {entry.meta.parent for entry in self.entries.values()}
            leaves = [k for k in self.entries if k not in parents and k != parent and k not in kept and not self.pins[k]]
            if not leaves:
                return False
            victim = min(leaves, key=lambda k: self.entries[k].recency)
            del self.entries[victim]
            self._gone.append(victim)
        return True

    def _read(self, job: FakeJob) -> ReadResult:
        meta = job.meta
        assert meta is not None
        entry = self.entries.get(meta.key)
        if entry is None:
            return ReadResult(job.job, "missing")
        if entry.meta.ids != meta.ids or entry.meta.parent != meta.parent:
            return ReadResult(job.job, "foreign")
        return self._deliver(job, entry)

    def _deliver(self, job: FakeJob, entry: _Entry) -> ReadResult:
        """Verify, then fill the slot. What is bad is quarantined: it is gone."""
        reason = ""
        if not entry.data:
            reason = "missing"
        elif len(entry.data) != len(job.slot):
            reason = "size"
        elif zlib.crc32(entry.data) != entry.digest:
            reason = "payload"
        if reason:
            del self.entries[entry.meta.key]
            self._gone.append(entry.meta.key)
            return ReadResult(job.job, reason)
        job.slot[:] = entry.data
        return ReadResult(job.job, "", entry.meta.key, entry.meta.ids, len(entry.data), 1.0, 0.1)

    def _read_tail(self, job: FakeJob) -> ReadResult:
        best: tuple[int, _Entry] | None = None
        for ref in job.candidates:
            for entry in self.entries.values():
                if entry.meta.parent != job.parent or not entry.meta.key.hex().startswith(ref.key_hex16):
                    continue
                if chunk_key(job.secret, job.parent, entry.meta.ids) != entry.meta.key:
                    return ReadResult(job.job, "key")
                shared = 0
                while shared < min(len(entry.meta.ids), len(job.ids)) and entry.meta.ids[shared] == job.ids[shared]:
                    shared += 1
                if shared and (best is None or shared > best[0]):
                    best = (shared, entry)
        return self._deliver(job, best[1]) if best else ReadResult(job.job, "no_prefix")
