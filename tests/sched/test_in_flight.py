"""Every transfer that starts gets exactly one answer, whatever copier and store do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kvalet.runtime.plan import PageId, SlotId
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
from kvalet.sched.in_flight import InFlight
from kvalet.sched.inbox import Posting
from kvalet.sched.ports import CopyDoneCallback, JobDoneCallback
from kvalet.sched.stats import Stats
from kvalet.store.ids import ChunkKey, ChunkMeta, TailRef
from kvalet.store.jobs import ReadResult, WriteResult
from kvalet.store.record import Record

KEY = ChunkKey(b"k" * 32)
META = ChunkMeta(KEY, b"p" * 32, 0, 0, tuple(range(16)), 1)
READ = ReadChunk(TransferId(1), META, SlotId(3), session="s", klass=1)
WRITE = WriteChunk(TransferId(2), META, SlotId(4))
TAIL = ReadTail(TransferId(3), b"p" * 32, 2, 32, (7, 8), (TailRef(b"p" * 32, 2, "ab"),), SlotId(5), secret=b"s" * 32)
OUT = CopyOut(TransferId(4), (PageId(9),), SlotId(6), first_page=2)
IN = CopyIn(TransferId(5), SlotId(7), (1, 0), (PageId(8), PageId(9)))


class Bench:
    """A port for both directions that keeps callbacks until the test calls them, and the inbox as a list."""

    def __init__(self, with_store: bool = True) -> None:
        self.postings: list[Posting] = []
        self.stats = Stats()
        self.calls: list[tuple[Any, ...]] = []
        self.done: list[Callable[..., None]] = []
        self.refuse = False
        self.settle_raises = False
        self.on_gone: Callable[[tuple[ChunkKey, ...]], None] = lambda keys: None
        slots = [bytearray(8) for _ in range(16)]
        self.transfers = InFlight(self, self if with_store else None, self.slot_view(slots), self.postings.append, self.stats)

    @staticmethod
    def slot_view(slots: list[bytearray]) -> Callable[[SlotId], memoryview]:
        def view(slot: SlotId) -> memoryview:
            slots[slot][0] = slot  # so that the test can tell which one was handed on
            return memoryview(slots[slot])

        return view

    def _note(self, done: Callable[..., None], *call: Any) -> None:
        if self.refuse:
            raise OSError("port is broken")
        self.calls.append(call)
        self.done.append(done)

    def copy_out(
        self, pages: Sequence[PageId], slot: SlotId, first_page: int, done: CopyDoneCallback, n_tokens: int = 0
    ) -> None:
        self._note(done, "out", pages, slot, first_page)

    def copy_in(self, slot: SlotId, slot_pages: Sequence[int], pages: Sequence[PageId], done: CopyDoneCallback) -> None:
        self._note(done, "in", slot, slot_pages, pages)

    def close(self) -> None: ...

    def has(self, key: ChunkKey) -> bool:
        return False

    def tails(self, parent: bytes) -> Sequence[TailRef]:
        return ()

    def accepts_writes(self) -> bool:
        return True

    def branches(self, tenant: str, session: str) -> Sequence[str]:
        return ()

    def write_record(self, job: int, record: Record, done: JobDoneCallback, *, klass: int) -> None: ...

    def read_record(self, job: int, tenant: str, session: str, branch: str, done: JobDoneCallback) -> None: ...

    def drop_record(self, tenant: str, session: str, branch: str) -> None: ...

    def read(self, job: int, meta: ChunkMeta, slot: memoryview, done: JobDoneCallback, *, session: str, klass: int) -> None:
        self._note(done, "read", job, meta, slot[0], session, klass)

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
    ) -> None:
        self._note(done, "tail", job, parent, ordinal, first_token, ids, candidates, slot[0], session, klass, secret)

    def write(self, job: int, meta: ChunkMeta, slot: memoryview, done: JobDoneCallback, *, klass: int) -> None:
        self._note(done, "write", job, meta, slot[0], klass)

    def cancel(self, job: int) -> None:
        self.calls.append(("cancel", job))

    def settle(self, completion: Any) -> Any:
        self.calls.append(("settle",))
        if self.settle_raises:
            raise ValueError("books are torn")
        return completion

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        self.calls.append(("pin", keys))

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        self.calls.append(("unpin", keys))

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        self.calls.append(("touch", keys))

    def events(self) -> list[Event]:
        """Run what was posted, as a tick does."""
        found = [posting(1.0) for posting in self.postings]
        self.postings.clear()
        return [event for event in found if event is not None]


def test_arguments_reach_the_ports() -> None:
    bench = Bench()
    bench.transfers.store_job(READ)
    bench.transfers.store_job(WRITE)
    bench.transfers.store_job(TAIL)
    bench.transfers.copy(OUT)
    bench.transfers.copy(IN)
    assert bench.calls == [
        ("read", 1, META, 3, "s", 1),
        ("write", 2, META, 4, 2),
        ("tail", 3, TAIL.parent, 2, 32, (7, 8), TAIL.candidates, 5, "", 0, b"s" * 32),
        ("out", (9,), 6, 2),
        ("in", 7, (1, 0), (8, 9)),
    ]
    assert len(bench.transfers) == 5


def test_good_ends_become_done_events() -> None:
    bench = Bench()
    for job in (READ, WRITE, TAIL):
        bench.transfers.store_job(job)
    bench.transfers.copy(OUT)
    bench.transfers.copy(IN)
    read, write, tail, out, into = bench.done
    read(ReadResult(1, "", KEY, (), 100, 2.0, 1.0))
    write(WriteResult(2, "", 50, write_ms=4.0))
    tail(ReadResult(3, "", KEY, (7,), 10))
    out(None, 0.5)
    into(None, 0.25)
    assert bench.events() == [
        ReadDone(1.0, TransferId(1), KEY, (), 100, 2.0, 1.0),
        WriteDone(1.0, TransferId(2), 50),
        ReadDone(1.0, TransferId(3), KEY, (7,), 10),
        CopyDone(1.0, TransferId(4), 0.5),
        CopyDone(1.0, TransferId(5), 0.25),
    ]
    assert len(bench.transfers) == 0
    totals = bench.stats.snapshot().transfers
    assert (totals["disk_to_ram"].done, totals["disk_to_ram"].n_bytes) == (2, 110)
    assert (totals["ram_to_disk"].n_bytes, totals["ram_to_disk"].ms) == (50, 4.0)
    assert (totals["device_to_ram"].pages, totals["ram_to_device"].pages) == (1, 2)


def test_bad_ends_become_failed_events_with_the_ports_own_word() -> None:
    bench = Bench()
    for job in (READ, WRITE):
        bench.transfers.store_job(job)
    bench.transfers.copy(OUT)
    read, write, out = bench.done
    read(ReadResult(1, "payload"))
    write(WriteResult(2, "full"))
    out("link down", 0.0)
    assert bench.events() == [
        ReadFailed(1.0, TransferId(1), "payload"),
        WriteFailed(1.0, TransferId(2), "full"),
        CopyFailed(1.0, TransferId(4), "link down"),
    ]
    assert bench.stats.snapshot().transfers["disk_to_ram"].failed == {"payload": 1}


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        (READ, ReadFailed(1.0, TransferId(1), "internal")),
        (WRITE, WriteFailed(1.0, TransferId(2), "internal")),
        (TAIL, ReadFailed(1.0, TransferId(3), "internal")),
        (OUT, CopyFailed(1.0, TransferId(4), "OSError: port is broken")),
        (IN, CopyFailed(1.0, TransferId(5), "OSError: port is broken")),
    ],
)
def test_a_port_that_raises_is_a_transfer_that_failed(command: Any, failure: Event) -> None:
    bench = Bench()
    bench.refuse = True
    (bench.transfers.copy if isinstance(command, CopyOut | CopyIn) else bench.transfers.store_job)(command)
    assert bench.events() == [failure]
    assert len(bench.transfers) == 0


def test_a_completion_that_cannot_be_settled_is_a_failure_not_a_hang() -> None:
    bench = Bench()
    bench.transfers.store_job(READ)
    bench.settle_raises = True
    bench.done[0](ReadResult(1, "", KEY))
    assert bench.events() == [ReadFailed(1.0, TransferId(1), "internal")]


def test_without_a_store_reads_and_writes_fail_as_closed_and_orders_do_nothing() -> None:
    bench = Bench(with_store=False)
    bench.transfers.store_job(READ)
    bench.transfers.store_job(WRITE)
    bench.transfers.disk_order(PinDisk((KEY,)))
    bench.transfers.cancel(CancelTransfer(TransferId(1)))
    assert bench.events() == [ReadFailed(1.0, TransferId(1), "closed"), WriteFailed(1.0, TransferId(2), "closed")]
    assert bench.calls == []


def test_a_second_answer_is_counted_and_not_passed_on() -> None:
    bench = Bench()
    bench.transfers.store_job(READ)
    bench.transfers.copy(OUT)
    for done, outcome in ((bench.done[0], (ReadResult(1, "", KEY),)), (bench.done[1], (None, 0.1))):
        done(*outcome)
        done(*outcome)
    assert [type(event) for event in bench.events()] == [ReadDone, CopyDone]
    assert bench.transfers.duplicates == 2


def test_one_id_may_serve_a_read_and_then_the_copy_behind_it() -> None:
    bench = Bench()
    bench.transfers.store_job(READ)
    bench.done[0](ReadResult(1, "", KEY))
    assert [type(event) for event in bench.events()] == [ReadDone]
    bench.calls.clear()
    bench.transfers.copy(CopyIn(READ.transfer, SlotId(3), (0,), (PageId(1),)))
    bench.transfers.cancel(CancelTransfer(READ.transfer))  # a copy that was issued finishes
    assert [call[0] for call in bench.calls] == ["in"]
    bench.done[1](None, 0.1)
    assert [type(event) for event in bench.events()] == [CopyDone]
    assert (len(bench.transfers), bench.transfers.duplicates) == (0, 0)


def test_cancel_reaches_store_jobs_only_and_only_while_they_are_out() -> None:
    bench = Bench()
    bench.transfers.store_job(READ)
    bench.transfers.copy(OUT)
    bench.calls.clear()
    bench.transfers.cancel_all()
    assert bench.calls == [("cancel", 1)]
    bench.done[0](ReadResult(1, "cancelled"))
    assert bench.events() == [ReadFailed(1.0, TransferId(1), "cancelled")]
    bench.calls.clear()
    bench.transfers.cancel(CancelTransfer(TransferId(1)))
    assert bench.calls == []


def test_orders_and_losses_of_the_disk() -> None:
    bench = Bench()
    for order in (PinDisk((KEY,)), UnpinDisk((KEY,)), TouchDisk((KEY,))):
        bench.transfers.disk_order(order)
    assert [call[0] for call in bench.calls] == ["pin", "unpin", "touch"]
    bench.transfers.gone((KEY,))
    assert bench.events() == [DiskGone(1.0, (KEY,))]
