"""Carries out what moves bytes (copies, reads, writes) and keeps what is in flight: every one that starts gets exactly one
answer in the inbox.

Whatever a port raises becomes the failure event of that transfer: the core knows what to do about a transfer that failed,
and nothing about exceptions.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kvalet.runtime.errors import DeviceLostText
from kvalet.runtime.plan import SlotId
from kvalet.sched.commands import (
    CancelTransfer,
    CopyIn,
    CopyOut,
    PinDisk,
    ReadChunk,
    ReadTail,
    TouchDisk,
    UnpinDisk,
    WriteChunk,
)
from kvalet.sched.events import CopyDone, CopyFailed, DiskGone, Event, ReadDone, ReadFailed, TransferId, WriteDone, WriteFailed
from kvalet.sched.inbox import Posting
from kvalet.sched.ports import CopierPort, StorePort
from kvalet.sched.stats import Stats
from kvalet.store.ids import ChunkKey

log = logging.getLogger(__name__)

Read = ReadChunk | ReadTail
Copy = CopyOut | CopyIn


class InFlight:
    """Loop thread only, but for the callbacks it hands to copier and store: these only post.

    ``post`` takes postings from any thread. ``slot_view`` gives the whole slot (header block and payload) as a memoryview.
    A transfer's id may serve several commands, one after the other (a read and the copy behind it); each has its own answer.
    Without a store, reads and writes fail with "closed" (the core does not ask for any then). A second answer to one
    command is logged as the defect it is, counted in ``duplicates`` and not passed on.
    """

    def __init__(
        self,
        copier: CopierPort,
        store: StorePort | None,
        slot_view: Callable[[SlotId], memoryview],
        post: Callable[[Posting], None],
        stats: Stats,
        on_device_lost: Callable[[str], None] = log.error,
    ) -> None:
        """``on_device_lost``: told, on the loop thread, each time a copy says that the device is lost."""
        self._on_device_lost = on_device_lost
        self._copier = copier
        self._store = store
        self._slot_view = slot_view
        self._post = post
        self._stats = stats
        self._numbers = itertools.count()
        self._unanswered: set[int] = set()
        self._jobs: dict[TransferId, int] = {}
        self.duplicates = 0

    def __len__(self) -> int:
        return len(self._unanswered)

    def copy(self, command: Copy) -> None:
        number = self._begin()

        def done(error: str | None, copy_ms: float) -> None:
            self._post(partial(self._copied, number, command, error, copy_ms))

        try:
            if isinstance(command, CopyOut):
                self._copier.copy_out(command.pages, command.slot, command.first_page, done, command.n_tokens)
            else:
                self._copier.copy_in(command.slot, command.slot_pages, command.pages, done)
        except Exception as error:
            log.exception("copy %s could not start", command.transfer)
            done(f"{type(error).__name__}: {error}", 0.0)

    def store_job(self, command: Read | WriteChunk) -> None:
        """Start a read or a write."""
        number = self._jobs[command.transfer] = self._begin()
        try:
            if self._store is None:
                self._post(partial(self._job_failed, number, command, "closed"))
            else:
                self._start(self._store, number, command)
        except Exception:
            log.exception("store job %s could not start", command.transfer)
            self._post(partial(self._job_failed, number, command, "internal"))

    def cancel(self, command: CancelTransfer) -> None:
        """A wish. Copies that were issued finish; the store answers what has not started with "cancelled"."""
        if self._store is not None and command.transfer in self._jobs:
            self._store.cancel(command.transfer)

    def cancel_all(self) -> None:
        for transfer in list(self._jobs):
            self.cancel(CancelTransfer(transfer))

    def disk_order(self, command: PinDisk | UnpinDisk | TouchDisk) -> None:
        if self._store is None:
            return
        if isinstance(command, PinDisk):
            self._store.pin(command.keys)
        elif isinstance(command, UnpinDisk):
            self._store.unpin(command.keys)
        else:
            self._store.touch(command.keys)

    def gone(self, keys: tuple[ChunkKey, ...]) -> None:
        """The store's ``on_gone``."""
        self._post(lambda now: DiskGone(now, keys))

    def _start(self, store: StorePort, number: int, command: Read | WriteChunk) -> None:
        slot = self._slot_view(command.slot)

        def done(completion: Any) -> None:
            self._post(partial(self._settled, number, command, completion))

        job = command.transfer
        if isinstance(command, ReadChunk):
            store.read(job, command.meta, slot, done, session=command.session, klass=command.klass)
        elif isinstance(command, WriteChunk):
            store.write(job, command.meta, slot, done, klass=command.klass)
        else:
            store.read_tail(
                job,
                command.parent,
                command.ordinal,
                command.first_token,
                command.ids,
                command.candidates,
                slot,
                done,
                session=command.session,
                klass=command.klass,
                secret=command.secret,
            )

    def _begin(self) -> int:
        number = next(self._numbers)
        self._unanswered.add(number)
        return number

    def _answered(self, number: int, command: Copy | Read | WriteChunk) -> bool:
        """False: it was answered before."""
        if number not in self._unanswered:
            self.duplicates += 1
            log.error("%s of transfer %s was answered twice", type(command).__name__, command.transfer)
            return False
        self._unanswered.remove(number)
        if self._jobs.get(command.transfer) == number:
            del self._jobs[command.transfer]
        return True

    def _copied(self, number: int, command: Copy, error: str | None, copy_ms: float, now: float) -> Event | None:
        if not self._answered(number, command):
            return None
        totals = self._stats.copies_out if isinstance(command, CopyOut) else self._stats.copies_in
        if error is not None:
            totals.failed("copy")
            if isinstance(error, DeviceLostText):
                self._on_device_lost(error)
            return CopyFailed(now, command.transfer, error)
        totals.done(copy_ms, pages=len(command.pages))
        return CopyDone(now, command.transfer, copy_ms)

    def _settled(self, number: int, command: Read | WriteChunk, completion: Any, now: float) -> Event | None:
        """The store's books first, whoever still waits for the answer."""
        assert self._store is not None
        try:
            result = self._store.settle(completion)
        except Exception:
            log.exception("store job %s could not be settled", command.transfer)
            return self._job_failed(number, command, "internal", now)
        if result.reason:
            return self._job_failed(number, command, result.reason, now)
        if not self._answered(number, command):
            return None
        if isinstance(command, WriteChunk):
            self._stats.writes.done(result.write_ms, n_bytes=result.n_bytes)
            return WriteDone(now, command.transfer, result.n_bytes)
        self._stats.reads.done(result.read_ms + result.verify_ms, n_bytes=result.n_bytes)
        return ReadDone(now, command.transfer, result.key, result.ids, result.n_bytes, result.read_ms, result.verify_ms)

    def _job_failed(self, number: int, command: Read | WriteChunk, reason: str, now: float) -> Event | None:
        if not self._answered(number, command):
            return None
        if isinstance(command, WriteChunk):
            self._stats.writes.failed(reason)
            return WriteFailed(now, command.transfer, reason)
        self._stats.reads.failed(reason)
        return ReadFailed(now, command.transfer, reason)

    def __repr__(self) -> str:
        return f"<InFlight unanswered={len(self)} duplicates={self.duplicates}>"
