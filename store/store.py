"""The disk tier: chunk, tail, state and record files in one directory, written durably, read verified, bounded in bytes.

Called from one thread (the event loop's); nothing here does file I/O except ``open`` and ``close``. Jobs end exactly once:
``done(completion)`` on a thread of the store's, then ``settle(completion)`` by the caller, which returns the outcome.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvalet.store import admission, budget, chores, closing, layout, recordchores, recordjobs, scan, workers
from kvalet.store.books import Books
from kvalet.store.config import StoreConfig
from kvalet.store.directory import Directory, open_directory
from kvalet.store.errors import StoreRefused
from kvalet.store.faultwords import explain
from kvalet.store.fileio import FileIO
from kvalet.store.header import Geometry, Home
from kvalet.store.ids import ChunkKey, ChunkMeta, Identity, TailRef
from kvalet.store.janitor import BadFolder, load_bad
from kvalet.store.jobs import ReadResult, RecordResult, WriteResult
from kvalet.store.reading import TailWish
from kvalet.store.record import Record
from kvalet.store.settling import settle_read, settle_write
from kvalet.store.state import Done, Read, ReadOver, StoreState
from kvalet.store.stats import Health, StoreStatistics, health_of, statistics_of
from kvalet.store.storefiles import identity_file, read_small

log = logging.getLogger("kvalet.store")
_open_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


class DiskStore:
    """sched.ports.StorePort over a directory. Make it with ``open``.

    Slots are writable memoryviews of at least 4096 + n_pages * page_stride bytes, 4096-aligned; a write puts its header into
    the first 4096 bytes. A slot belongs to its job until ``done``.
    """

    def __init__(self, state: StoreState, walk: scan.Walk) -> None:
        self._state = state
        self.found = walk
        self.on_gone: Callable[[tuple[ChunkKey, ...]], None] = lambda keys: None
        self._threads: list[threading.Thread] = []
        _open_stores.add(self)

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        identity: Identity,
        *,
        page_stride_bytes: int,
        page_tokens: int,
        chunk_tokens: int,
        page_bytes: int = 0,
        io: FileIO | None = None,
    ) -> DiskStore:
        """Blocking: lock, check, sweep, scan (about 1 s per 100,000 files when cold), start the threads.

        StoreRefused/StoreLocked with one sentence, and nothing changed. ``page_bytes``: payload of a page without its
        padding (0: the stride).
        """
        geometry = Geometry(page_tokens, page_bytes or page_stride_bytes, page_stride_bytes, chunk_tokens)
        with ExitStack() as opened:
            disk = open_directory(config, io or FileIO())
            opened.callback(disk.close)
            books = Books(config.cap_bytes, identity.digest)
            changes = _note_identity(config.directory, disk, identity)
            bad, walk = _scan(config.directory, disk, books)
            books.aside_bytes = bad.n_bytes
            home = Home(disk.store_id, identity.digest, geometry)
            state = StoreState(config, disk, home, books, bad, _budget(config, disk))
            recordchores.restore_pins(state, walk)
            chores.measure_free(state)
            opened.pop_all()
        store = cls(state, walk)
        with state.lock:
            admission.evict_to_cap(state)
        store._start()
        if changes and walk.files:
            log.warning(
                "store %r: filled under another identity (%s); its %d files are not used now and will be evicted in time",
                config.directory,
                "; ".join(changes),
                walk.files,
            )
        log.info("store %r: %d files, %d bytes, %s", config.directory, walk.files, walk.n_bytes, store)
        return store

    @property
    def secret(self) -> bytes:
        """32 bytes, for store.ids.tenant_secret. Never logged."""
        return self._state.disk.secret

    # -- DiskView

    def has(self, key: ChunkKey) -> bool:
        return self._usable() and self._state.books.has(key)

    def tails(self, parent: bytes) -> Sequence[TailRef]:
        with self._state.lock:
            return self._state.books.tails(parent) if self._usable() else []

    def accepts_writes(self) -> bool:
        state = self._state
        return self._usable() and not state.write_breaker.is_open and not state.budget.exhausted(state.clock())

    def branches(self, tenant: str, session: str) -> Sequence[str]:
        """Branches of the session that have a record, most recent first. Not all of them need be readable, or of this
        identity."""
        with self._state.lock:
            return recordjobs.branches(self._state, tenant, session) if self._usable() else []

    # -- jobs

    def read(self, job: int, meta: ChunkMeta, slot: memoryview, done: Done, *, session: str, klass: int) -> None:
        """Outcome: ReadResult; "" only if the slot holds the verified payload of exactly ``meta``."""
        state = self._state
        with state.lock:
            admission.admit_read(state, Read(job, slot, done, state.clock(), meta=meta, klass=klass), session)

    def read_tail(
        self,
        job: int,
        parent: bytes,
        ordinal: int,
        first_token: int,
        ids: Sequence[int],
        candidates: Sequence[TailRef],
        slot: memoryview,
        done: Done,
        *,
        session: str,
        klass: int,
        secret: bytes = b"",
    ) -> None:
        """Of at most 4 ``candidates`` the one that shares the longest prefix with ``ids``. ``secret``: the tenant's, without
        which no tail's key can be checked. Outcome: ReadResult with the tail's own key and ids."""
        state = self._state
        wish = TailWish(bytes(parent), ordinal, first_token, tuple(ids), secret)
        with state.lock:
            admission.admit_tail_read(state, Read(job, slot, done, state.clock(), wish=wish, klass=klass), candidates, session)

    def write(self, job: int, meta: ChunkMeta, slot: memoryview, done: Done, *, klass: int) -> None:
        """Outcome: WriteResult; "" only if the file is durable. Its parent must be on disk or in flight ("ancestor")."""
        state = self._state
        with state.lock:
            admission.admit_write(state, job, meta, slot, done, klass)

    def write_record(self, job: int, record: Record, done: Done, *, klass: int) -> None:
        """Outcome: RecordResult; "" only if the record is durable, after all that it names; it takes the place of the one
        before it. What a pinned record names is not evicted, also after a restart, until its record is replaced by one that is
        not pinned, or dropped."""
        with self._state.lock:
            recordjobs.admit_record(self._state, job, record, done, klass)

    def read_record(self, job: int, tenant: str, session: str, branch: str, done: Done) -> None:
        """Outcome: RecordResult with the record, or the reason. What it names need not be there."""
        with self._state.lock:
            recordjobs.admit_record_read(self._state, job, tenant, session, branch, done)

    def drop_record(self, tenant: str, session: str, branch: str) -> None:
        """Forget it, also one that is being written. Unknown ones are ignored. The file goes soon; a power loss right after may
        bring it back."""
        with self._state.lock:
            if self._usable():
                recordjobs.drop_record(self._state, tenant, session, branch)

    def cancel(self, job: int) -> None:
        """What has not started ends as "cancelled"; anything else, also unknown ids, is left alone."""
        with self._state.lock:
            admission.cancel(self._state, job)

    def settle(self, completion: Any) -> Any:
        """ReadResult, WriteResult or RecordResult of a completion; once per completion, on the loop thread."""
        if isinstance(completion, ReadOver):
            result: ReadResult | WriteResult | RecordResult = settle_read(self._state, completion)
        else:
            result = settle_write(self._state, completion)
        self._tell_gone()
        return result

    # -- pins and recency

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Not evicted until unpinned as often. A pin may come before the chunk does."""
        with self._state.lock:
            self._state.books.pin(keys)

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        with self._state.lock:
            self._state.books.unpin(keys)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """One recency for the whole chain, parents first; written to the files' times by and by."""
        state = self._state
        with state.lock:
            recency = state.books.next_recency(state.wall_ns())
            for entry in state.books.touch(keys, recency):
                state.touched.pop(entry.file.name, None)
                state.touched[entry.file.name] = (entry.file, recency)

    # -- state

    def health(self) -> Health:
        with self._state.lock:
            return health_of(self._state)

    def statistics(self) -> StoreStatistics:
        with self._state.lock:
            return statistics_of(self._state, self.found)

    def __repr__(self) -> str:
        books = self._state.books
        return f"<DiskStore {len(books)} files, {books.used_bytes} of {books.cap_bytes} bytes, {self.health().status}>"

    def close(self, deadline_s: float) -> int:
        """Blocking. Ends what is running within ``deadline_s``, refuses the rest ("closed"), stops the threads, gives up
        the lock. Returns how many jobs were not finished by the deadline. Twice is fine. If a thread is stuck in the disk,
        the lock is kept until the process ends: two writers must never meet."""
        return closing.close(self._state, self._threads, deadline_s)

    def _tell_gone(self) -> None:
        state = self._state
        if state.gone:
            with state.lock:
                gone, state.gone = tuple(state.gone), []
            self.on_gone(gone)

    def _usable(self) -> bool:
        return not self._state.closed and self._state.config.cap_bytes > 0

    def _start(self) -> None:
        state = self._state
        bodies = [("reader", workers.reader_loop)] * state.config.readers + [
            ("writer", workers.writer_loop)
        ] * state.config.writers
        bodies += [("committer", workers.committer_loop)] * state.config.committers
        bodies += [("clerk", chores.clerk_loop), ("janitor", chores.janitor_loop)]
        for number, (name, body) in enumerate(bodies):
            thread = threading.Thread(target=body, args=(state,), name=f"kvalet-store-{name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)


def _note_identity(path: str, disk: Directory, identity: Identity) -> list[str]:
    try:
        return identity_file(path, disk.root_fd, identity)
    except OSError as error:
        raise StoreRefused(f"The file IDENTITY in the store {path!r} cannot be kept: {explain(error)}.") from error


def _budget(config: StoreConfig, disk: Directory) -> budget.Budget:
    try:
        data = read_small(disk.root_fd, layout.BUDGET_FILE) if config.bytes_per_day else None
    except OSError as error:
        raise StoreRefused(f"The file BUDGET in the store {config.directory!r} cannot be read: {explain(error)}.") from error
    return budget.load(data, config.bytes_per_day, created=disk.created, now=time.monotonic(), wall_s=time.time())


def _scan(path: str, disk: Directory, books: Books) -> tuple[BadFolder, scan.Walk]:
    try:
        return load_bad(disk), scan.load(disk, books, time.time_ns())
    except OSError as error:
        raise StoreRefused(f"The store {path!r} cannot be read: {explain(error)}.") from error


def _after_fork_in_child() -> None:
    """The child has no threads of ours and must not touch the directory."""
    for store in list(_open_stores):
        store._state.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
