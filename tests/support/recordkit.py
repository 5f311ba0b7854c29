"""Records on a real directory: made of chains, written, read, compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvalet.store import layout
from kvalet.store.ids import ChunkMeta, StatePart, state_key
from kvalet.store.jobs import RecordResult
from kvalet.store.record import Record, Span
from storekit import Rig, slot

TENANT, SESSION, BRANCH = "a tenant", "conversation/1 \u00e9", "00112233445566aa"


def record_of(metas: Sequence[ChunkMeta], *, after: int = 0, **fields: Any) -> Record:
    """Of a chain as ``storekit.chain`` makes it; ``after``: tokens that were accepted but have no KV."""
    kv = tuple(token for meta in metas for token in meta.ids)
    fields = {"tenant": TENANT, "session": SESSION, "branch": BRANCH} | fields
    return Record(
        ids=(*kv, *range(7, 7 + after)),
        boundary=max(len(kv) - 3, 1),
        kv_len=len(kv),
        decoded=((max(len(kv) - 3, 1), len(kv)),),
        space=b"12345678",
        chunk_keys=tuple(meta.key for meta in metas if not meta.tail),
        tail_key=next((meta.key for meta in metas if meta.tail), None),
        **fields,
    )


FULL = record_of([], tenant=TENANT)
SPANS = (Span("Let me look.\n\U0001f50d", 40, 44, ("call_1", "call_2")), Span("", 44, 44))


class RecordRig(Rig):
    """A rig that writes and reads records, one at a time."""

    def submit_record(self, record: Record, *, klass: int = 2) -> int:
        job = next(self.jobs)
        self.store.write_record(job, record, self.done.put, klass=klass)
        return job

    def put(self, record: Record, *, klass: int = 2) -> str:
        """Reason."""
        job = self.submit_record(record, klass=klass)
        result = self.settle()
        assert isinstance(result, RecordResult)
        assert result.job == job
        assert result.record is None
        assert (result.n_bytes > 0) == (result.reason == "")
        return result.reason

    def get(self, branch: str = BRANCH, session: str = SESSION, tenant: str = TENANT) -> RecordResult:
        job = next(self.jobs)
        self.store.read_record(job, tenant, session, branch, self.done.put)
        result = self.settle()
        assert isinstance(result, RecordResult)
        assert result.job == job
        assert (result.record is None) == (result.reason != "")
        return result

    def branches(self, session: str = SESSION, tenant: str = TENANT) -> list[str]:
        return list(self.store.branches(tenant, session))

    def drop(self, branch: str = BRANCH, session: str = SESSION, tenant: str = TENANT) -> None:
        self.store.drop_record(tenant, session, branch)

    def record_paths(self) -> list[Path]:
        return sorted((self.directory / layout.RECORDS).glob("*/*"))

    def record_path(self) -> Path:
        (found,) = self.record_paths()
        return found

    def submit_state(self, meta: ChunkMeta, data: bytes, *, klass: int = 2) -> int:
        view = slot(4096 - (-len(data) // 4096) * 4096)
        view[4096 : 4096 + len(data)] = data
        job = next(self.jobs)
        self.store.write(job, meta, view, self.done.put, klass=klass)
        return job

    def put_state(self, meta: ChunkMeta, data: bytes) -> str:
        self.submit_state(meta, data)
        reason: str = self.settle().reason
        return reason

    def get_state(self, meta: ChunkMeta) -> tuple[str, bytes]:
        assert meta.state is not None
        view = slot(4096 - (-meta.state.n_bytes // 4096) * 4096)
        self.submit_read(meta, view)
        return self.settle().reason, bytes(view[4096 : 4096 + meta.state.n_bytes])


def state_meta(secret: bytes, after: ChunkMeta, n_bytes: int, part: int = 0, parts: int = 1) -> ChunkMeta:
    """A part of the running state at the end of ``after``."""
    key = state_key(secret, bytes(after.key), part, parts)
    ordinal = after.ordinal + 1
    position = after.first_token + len(after.ids)
    return ChunkMeta(key, bytes(after.key), ordinal, position, (), 0, state=StatePart(n_bytes, part, parts))


def state_bytes(meta: ChunkMeta) -> bytes:
    """What a test writes there: a function of the key."""
    assert meta.state is not None
    return hashlib.shake_128(meta.key + b"state").digest(meta.state.n_bytes)
