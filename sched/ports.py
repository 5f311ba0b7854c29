"""What the scheduler needs from the rooms below it. The core asks ``DiskView``; the loop drives the others.

Shipped implementations: runtime.engine.StepEngine and runtime.fake.FakeEngine (EnginePort), runtime.transfer.Copier and
runtime.fake.FakeCopier (CopierPort), store.store.DiskStore and store.fake.FakeStore (StorePort and DiskView).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvalet.runtime.plan import PageId, SlotId, StepPlan, StepResult
from kvalet.store.ids import ChunkKey, ChunkMeta, TailRef
from kvalet.store.record import Record

CopyDoneCallback = Callable[[str | None, float], None]
JobDoneCallback = Callable[[Any], None]


class DiskView(Protocol):
    """In-memory questions about the disk tier, on the loop thread. They never do I/O and never block.

    Yes means "was there a moment ago": a read may still fail.
    """

    def has(self, key: ChunkKey) -> bool: ...

    def tails(self, parent: bytes) -> Sequence[TailRef]:
        """Tails stored after ``parent``, most recent first."""
        ...

    def accepts_writes(self) -> bool:
        """False: no disk tier, read-only, or its breaker is open."""
        ...

    def branches(self, tenant: str, session: str) -> Sequence[str]:
        """Branches of the session that have a record, most recent first."""
        ...


class EnginePort(Protocol):
    """One model on one device. Called from the engine thread only. Raises only when the device is lost or on a defect; the
    loop then posts DeviceFailed."""

    synchronous: bool
    """True: ``launch`` returns when the step is computed (CPU). False: it returns once the work is queued."""

    def launch(self, plan: StepPlan) -> Any:
        """Start the step; the return value is handed to ``finish`` in the same order."""
        ...

    def finish(self, launched: Any) -> StepResult:
        """Wait for the step, read its tokens, detokenise, find ends."""
        ...


class CopierPort(Protocol):
    """Copies between pool pages and slab slots, each direction in its own order. ``done(error, copy_ms)`` is called once per
    copy, on a thread of the copier's: error None or the reason."""

    def copy_out(
        self, pages: Sequence[PageId], slot: SlotId, first_page: int, done: CopyDoneCallback, n_tokens: int = 0
    ) -> None: ...

    def copy_in(self, slot: SlotId, slot_pages: Sequence[int], pages: Sequence[PageId], done: CopyDoneCallback) -> None: ...

    def close(self) -> None: ...


class StorePort(DiskView, Protocol):
    """The disk tier, called from the loop thread; jobs run on its own threads.

    ``done`` is called exactly once per job, on a worker thread, with an opaque completion. The loop hands it to ``settle`` on
    the loop thread, which updates index and ledger and returns the outcome. No slot of a job is touched after its ``done``.
    """

    on_gone: Callable[[tuple[ChunkKey, ...]], None]
    """Called on the loop thread when the index loses keys."""

    def read(self, job: int, meta: ChunkMeta, slot: memoryview, done: JobDoneCallback, *, session: str, klass: int) -> None: ...

    def read_tail(
        self,
        job: int,
        parent: bytes,
        ordinal: int,
        first_token: int,
        ids: Sequence[int],
        candidates: Sequence[TailRef],
        slot: memoryview,
        done: JobDoneCallback,
        *,
        session: str,
        klass: int,
        secret: bytes = b"",
    ) -> None: ...

    def write(self, job: int, meta: ChunkMeta, slot: memoryview, done: JobDoneCallback, *, klass: int) -> None: ...

    def write_record(self, job: int, record: Record, done: JobDoneCallback, *, klass: int) -> None:
        """Outcome: RecordResult; "" = durable, after all that it names; it takes the place of the branch's record before it.
        Chunks and tail named by a durable record with ``pinned`` are not evicted, also after a restart. "missing": something
        that it names is not on disk."""
        ...

    def read_record(self, job: int, tenant: str, session: str, branch: str, done: JobDoneCallback) -> None:
        """Outcome: RecordResult; ``record`` is whole and of this identity, or None with the reason."""
        ...

    def drop_record(self, tenant: str, session: str, branch: str) -> None:
        """Forget it, after whatever is being written under its name. Unknown ones are ignored."""
        ...

    def cancel(self, job: int) -> None: ...

    def settle(self, completion: Any) -> Any:
        """A ``store.jobs.ReadResult``, ``WriteResult`` or ``RecordResult``."""
        ...

    def pin(self, keys: Sequence[ChunkKey]) -> None: ...

    def unpin(self, keys: Sequence[ChunkKey]) -> None: ...

    def touch(self, keys: Sequence[ChunkKey]) -> None: ...
