"""A small store on a real directory, driven as the scheduler's loop drives it: submit, wait for ``done``, settle.

Payloads are a function of the key, so that any read can be checked without remembering what was written.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import queue
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvalet.store import layout, scan
from kvalet.store.config import BLOCK_BYTES, StoreConfig
from kvalet.store.fileio import FileIO
from kvalet.store.ids import ChunkMeta, Identity, chunk_key, tenant_secret
from kvalet.store.jobs import ReadResult, WriteResult
from kvalet.store.store import DiskStore

PAGE_TOKENS, CHUNK_TOKENS, STRIDE = 16, 32, 4096
FILE_BYTES = BLOCK_BYTES + CHUNK_TOKENS // PAGE_TOKENS * STRIDE
IDENTITY = Identity.of({"weights": "w", "kv_dtype": "bf16", "layout": "1"})
WAIT_S = 20.0


def slot(n_bytes: int = FILE_BYTES) -> memoryview:
    """Writable, 4096-aligned."""
    return memoryview(mmap.mmap(-1, n_bytes))


def payload(meta: ChunkMeta) -> bytes:
    return hashlib.shake_128(meta.key).digest(meta.n_pages * STRIDE)


def chain(
    secret: bytes,
    n_chunks: int,
    *,
    seed: int = 0,
    tail: int = 0,
    after: Sequence[ChunkMeta] = (),
    root: bytes = b"",
    ns: str = "",
) -> list[ChunkMeta]:
    """``n_chunks`` whole chunks (and a tail of ``tail`` tokens) of one sequence, following ``after``."""
    parent = bytes(after[-1].key) if after else (root or IDENTITY.digest)
    first = len(after)
    metas = []
    for i in range(first, first + n_chunks + (tail > 0)):
        n = tail if tail and i == first + n_chunks else CHUNK_TOKENS
        ids = tuple(seed * 100_000 + i * CHUNK_TOKENS + k for k in range(n))
        key = chunk_key(secret, parent, ids)
        is_tail = n < CHUNK_TOKENS
        metas.append(ChunkMeta(key, parent, i, i * CHUNK_TOKENS, ids, -(-n // PAGE_TOKENS), is_tail, ns))
        parent = bytes(key)
    return metas


class Rig:
    """Opens at once; ``with`` closes and checks the books. Job ids count from 1. ``gone`` collects on_gone's keys."""

    def __init__(self, directory: Path, io: FileIO | None = None, identity: Identity = IDENTITY, **config: Any) -> None:
        config.setdefault("cap_bytes", 1 << 24)
        config.setdefault("min_free_bytes", 0)
        config.setdefault("probe_every_s", 0.05)
        self.directory = directory
        self.config = StoreConfig(str(directory), **config)
        self.store = DiskStore.open(
            self.config, identity, page_stride_bytes=STRIDE, page_tokens=PAGE_TOKENS, chunk_tokens=CHUNK_TOKENS, io=io
        )
        self.root = identity.digest
        self.done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.gone: list[bytes] = []
        self.store.on_gone = self.gone.extend
        self.jobs = itertools.count(1)
        self.secret = tenant_secret(self.store.secret, "tenant")

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.close(WAIT_S)

    def chain(self, n_chunks: int, **how: Any) -> list[ChunkMeta]:
        return chain(how.pop("secret", self.secret), n_chunks, root=self.root, **how)

    def submit_write(self, meta: ChunkMeta, *, klass: int = 2, view: memoryview | None = None) -> int:
        view = view or slot(BLOCK_BYTES + meta.n_pages * STRIDE)
        view[BLOCK_BYTES : BLOCK_BYTES + meta.n_pages * STRIDE] = payload(meta)
        job = next(self.jobs)
        self.store.write(job, meta, view, self.done.put, klass=klass)
        return job

    def submit_read(self, meta: ChunkMeta, view: memoryview | None = None, *, session: str = "s", klass: int = 0) -> int:
        job = next(self.jobs)
        self.store.read(job, meta, view or slot(), self.done.put, session=session, klass=klass)
        return job

    def settle(self) -> ReadResult | WriteResult:
        return self.store.settle(self.done.get(timeout=WAIT_S))

    def settle_all(self, n: int) -> dict[int, Any]:
        """The next ``n`` outcomes by job."""
        return {result.job: result for result in (self.settle() for _ in range(n))}

    def write(self, metas: Iterable[ChunkMeta], *, klass: int = 2) -> list[WriteResult]:
        """All at once; outcomes in the order of ``metas``."""
        jobs = [self.submit_write(meta, klass=klass) for meta in metas]
        results = self.settle_all(len(jobs))
        return [results[job] for job in jobs]

    def read(self, meta: ChunkMeta) -> str:
        """Reason; "" only if the payload in the slot is exactly the one that belongs to the key (asserted)."""
        view = slot()
        self.submit_read(meta, view)
        result = self.settle()
        assert isinstance(result, ReadResult)
        if not result.reason:
            assert bytes(view[BLOCK_BYTES : BLOCK_BYTES + meta.n_pages * STRIDE]) == payload(meta), "WRONG BYTES SERVED"
            assert (result.key, result.ids) == (meta.key, meta.ids)
        return result.reason

    def read_tail(
        self, parent: bytes, ordinal: int, ids: Sequence[int], secret: bytes | None = None
    ) -> tuple[ReadResult, bytes]:
        view = slot()
        candidates = self.store.tails(parent)[:4]
        self.store.read_tail(
            next(self.jobs),
            parent,
            ordinal,
            ordinal * CHUNK_TOKENS,
            ids,
            candidates,
            view,
            self.done.put,
            session="s",
            klass=0,
            secret=self.secret if secret is None else secret,
        )
        result = self.settle()
        assert isinstance(result, ReadResult)
        return result, bytes(view[BLOCK_BYTES:])

    def path(self, meta: ChunkMeta) -> Path:
        """Where the file of ``meta`` is (exactly one)."""
        folder, start = ("t", meta.parent.hex()) if meta.tail else ("c", meta.key.hex())
        found = [p for p in (self.directory / folder / start[:2]).iterdir() if meta.key.hex()[:16] in p.name]
        assert len(found) == 1, found
        return found[0]

    def quiet(self) -> None:
        """Wait until the janitor has nothing to do (bounded); then the ledger must equal the disk, byte for byte."""
        state = self.store._state
        with state.lock:
            assert state.quiet.wait_for(lambda: not state.burials and not state.dying and not state.running, WAIT_S)
        self.check_books()

    def check_books(self) -> None:
        state = self.store._state
        found = scan.count(state.disk)
        with state.lock:
            state.books.check()
            assert state.books.reserved_bytes == 0
            assert state.unsettled == 0
            assert found.n_bytes == state.books.live_bytes, (found, state.books.live_bytes)
            assert state.books.used_bytes <= self.config.cap_bytes or not self.config.cap_bytes
        assert self.tmp_names() == []

    def tmp_names(self) -> list[str]:
        """Temporary files of ours."""
        return [name for name in os.listdir(self.directory / "tmp") if layout.is_tmp_name(name)]

    def reasons(self) -> dict[str, int]:
        """Refusals so far by reason."""
        counts: dict[str, int] = {}
        for reason, _, n in self.store.statistics().refusals:
            counts[reason] = counts.get(reason, 0) + n
        return counts
