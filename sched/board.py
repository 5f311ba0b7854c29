"""The core's whole mutable state, and the few operations that every part of the core needs.

One ``Board`` per core. The parts (matching, restore, spill, persist, lifecycle, admission, planner) are modules of
functions over it; they import each other downwards only, in the order just given. Commands are appended to ``out``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvalet.runtime.plan import PageId, RowId, SlotId
from kvalet.sched.chunks import Chunk, ChunkMap
from kvalet.sched.commands import CancelTransfer, Command, UnpinDisk, WakeAt
from kvalet.sched.config import SchedConfig
from kvalet.sched.counters import Counters
from kvalet.sched.events import TransferId
from kvalet.sched.lines import LineBook
from kvalet.sched.pages import PageLedger
from kvalet.sched.ports import DiskView
from kvalet.sched.prefix import Node, PageIndex
from kvalet.sched.session import Turn
from kvalet.sched.session_book import SessionBook
from kvalet.sched.states import (
    IllegalTransition,
    TransferCause,
    TransferState,
    TurnCause,
    next_turn_state,
)
from kvalet.sched.story import Story
from kvalet.sched.transfer_record import Transfer, TransferKind
from kvalet.sched.turns import TurnId
from kvalet.sched.waiting import WaitingRestores
from kvalet.store.ram import RamBook


@dataclass(slots=True)
class StepRecord:
    """A step in flight. ``rows``: (turn, row, start, n, sample). ``leases``: pages it may touch whose turn has let go."""

    step: int
    rows: list[tuple[Turn, RowId, int, int, bool]]
    leases: list[PageId] = field(default_factory=list)
    leased: set[PageId] = field(default_factory=set)

    def lease(self, pages: list[PageId]) -> None:
        self.leases.extend(pages)
        self.leased.update(pages)


class Board:
    def __init__(self, config: SchedConfig, disk: DiskView) -> None:
        self.config = config
        self.disk = disk
        self.story = Story()
        self.counters = Counters()
        self.ledger = PageLedger(config.n_pages)
        self.index = PageIndex(self.ledger, config.page_tokens)
        self.chunks = ChunkMap(config, disk)
        self.staging = RamBook(config.staging_slots, first=config.ram_slots)
        self.sessions = SessionBook(config.max_sessions)
        self.lines = LineBook()
        self.turns: dict[TurnId, Turn] = {}
        self.rows: dict[RowId, Turn] = {}
        self.queue: list[Turn] = []
        """Sorted by ``Turn.order``."""
        self.transfers: dict[TransferId, Transfer] = {}
        self.under_way = dict.fromkeys(TransferKind, 0)
        """Live transfers by kind."""
        self.waiting_reads = WaitingRestores()
        """Restores that have no slot yet."""
        self.waiting_copies = WaitingRestores()
        """Restores that hold the slot with their bytes; ``copies_in``: how many copies to the device are out."""
        self.copies_in = 0
        self.restoring_pages = 0
        """Pages leased by restores that somebody waits for."""
        self.spill_frees = 0
        """Pages that come free when the spills under way are done."""
        self.steps: list[StepRecord] = []
        self.closes: list[RowId] = []
        """Rows to close with the next plan."""
        self.stopwatch: Callable[[], float] = lambda: 0.0
        """Seconds, for the record only: the core has no clock of its own, and nothing is decided by this one."""
        self.out: list[Command] = []
        self.unsettled = False
        """An event came in from which decisions may follow."""
        self.now = 0.0
        self.next_row = 0
        self.next_step = 0
        self.next_transfer = 0
        # pressure
        self.victims_left = 0
        """How many more may be looked for in this ``decide``."""
        self.spilling = False
        self.slot_wait_since: float | None = None
        self.writing = False
        self.write_retry_at = 0.0
        self.write_failures = 0
        self.retry_wake = 0.0
        """The retry that a drain has asked to be woken for."""
        # ends
        self.device_lost = ""
        self.drain_deadline: float | None = None
        self.drained = False
        usable = config.n_pages - 1
        self.low_pages = math.ceil(config.low_watermark * usable)
        self.high_pages = max(self.low_pages, math.ceil(config.high_watermark * usable))

    # turns

    def move(self, turn: Turn, cause: TurnCause) -> None:
        try:
            turn.state = next_turn_state(turn.state, cause)
        except IllegalTransition as error:
            raise self.story.defect(f"{error}: {turn}") from error

    def running(self) -> list[Turn]:
        """Turns that can be fed, oldest of the highest class first."""
        return sorted((t for t in self.rows.values() if t.running), key=lambda t: t.order)

    def wake(self, at: float) -> None:
        self.out.append(WakeAt(at))

    # pages

    def insert_page(self, parent: Node, turn: Turn, ids: tuple[int, ...], page: PageId) -> Node | None:
        """Index one page after ``parent`` as ``turn`` computed or restored it, and tell the chunk map where a whole chunk
        ends. None, and nothing is changed, if that chunk is on the device already as other calls computed it."""
        calls = turn.calls[parent.end : parent.end + len(ids)]
        if calls and (parent.end + len(ids)) % self.config.chunk_tokens == 0:
            child = parent.children.get(ids + calls)
            if child is None and not self.chunks.free_to_link(parent, ids):
                return None
        node = self.index.insert(parent, ids, calls, page, self.now)
        if node.end % self.config.chunk_tokens == 0:
            self.chunks.link(node, self.now)
        return node

    def insert_pages(self, parent: Node, turn: Turn, pages: list[PageId], ids: tuple[int, ...]) -> Node | None:
        """``insert_page`` page after page, ``ids`` in whole pages but the last. None where deterministic mode stops."""
        size, chunk_tokens = self.config.page_tokens, self.config.chunk_tokens
        if turn.calls:
            node: Node | None = parent
            for i, page in enumerate(pages):
                assert node is not None
                node = self.insert_page(node, turn, ids[i * size : i * size + size], page)
                if node is None:
                    return None
            return node
        at, last = 0, parent
        while at < len(pages):  # up to the end of one chunk after the other
            n = (chunk_tokens - last.end % chunk_tokens) // size
            last = self.index.insert_run(last, ids[at * size : (at + n) * size], pages[at : at + n], self.now)
            at += n
            if last.end % chunk_tokens == 0:
                ordinal = last.end // chunk_tokens - 1
                self.chunks.link(last, self.now, turn.keys[ordinal] if ordinal < len(turn.keys) else None)
        return last

    def touch(self, node: Node) -> None:
        """A turn uses ``node`` and all before it, on the device and in RAM."""
        for chunk in self.index.touch(node, self.now):
            self.chunks.use(chunk, self.now)

    def remove_node(self, node: Node) -> None:
        """Take an idle leaf off the device; its chunk may lose its last copy by it."""
        self.chunks.unlink(node)
        self.index.remove(node)

    def remove_nodes(self, nodes: Sequence[Node]) -> None:
        """``remove_node`` one after the other: a leaf, its parent, and so on."""
        if nodes:
            for node in nodes:
                self.chunks.unlink(node)
            self.index.remove_run(nodes)

    def step_leases(self, page: PageId) -> bool:
        """A step in flight may still touch this page although its turn has gone."""
        return any(page in record.leased for record in self.steps)

    # transfers

    def start_transfer(self, kind: TransferKind, chunk: Chunk | None) -> Transfer:
        transfer = Transfer(TransferId(self.next_transfer), kind, chunk, started_at=self.now)
        self.next_transfer += 1
        self.transfers[transfer.id] = transfer
        self.under_way[kind] += 1
        if chunk is not None:
            if kind is TransferKind.RESTORE:
                chunk.incoming = transfer
            else:
                chunk.outgoing = transfer
        return transfer

    def advance(self, transfer: Transfer, cause: TransferCause) -> None:
        try:
            transfer.take(cause)
        except IllegalTransition as error:
            raise self.story.defect(f"{error}: {transfer}") from error

    def book_of(self, transfer: Transfer) -> RamBook:
        return self.staging if transfer.staging else self.chunks.book

    def free_pages(self, transfer: Transfer) -> None:
        """The transfer gives up its leases."""
        if transfer.kind is TransferKind.RESTORE and not transfer.abandoned:
            self.restoring_pages -= len(transfer.pages)
        self.ledger.unlease_all(transfer.pages)
        transfer.pages.clear()

    def unpin_disk(self, transfer: Transfer) -> None:
        if transfer.pinned and transfer.chunk is not None:
            transfer.pinned = False
            self.out.append(UnpinDisk((transfer.chunk.key,)))

    def finish_transfer(self, transfer: Transfer, cause: TransferCause) -> None:
        """Last answer in, or given up before the first command: leases, slot and pin are released, the chunk let go."""
        self.advance(transfer, cause)
        del self.transfers[transfer.id]
        self.under_way[transfer.kind] -= 1
        self.waiting_reads.discard(transfer)
        self.waiting_copies.discard(transfer)
        self.spill_frees -= transfer.frees
        self.free_pages(transfer)
        self.unpin_disk(transfer)
        if transfer.slot is not None:
            self.book_of(transfer).release(transfer.slot)
        self.detach_chunk(transfer)

    def detach_chunk(self, transfer: Transfer) -> None:
        """The chunk no longer counts on this transfer."""
        chunk = transfer.chunk
        if chunk is None:
            return
        if chunk.incoming is transfer:
            chunk.incoming = self._other_restore(chunk, transfer) if chunk.tail else None
        if chunk.outgoing is transfer:
            self.let_go(chunk)
        self.chunks.settle(chunk)

    def let_go(self, chunk: Chunk) -> None:
        """No transfer takes the chunk anywhere any more."""
        chunk.outgoing = None
        if chunk.node is not None:
            self.index.ranking.push(chunk.node)

    def _other_restore(self, chunk: Chunk, ended: Transfer) -> Transfer | None:
        """Two turns may have asked which tail the disk has and been brought the same one."""
        for other in self.transfers.values():
            if other.chunk is chunk and other.kind is TransferKind.RESTORE and other is not ended and not other.abandoned:
                return other
        return None

    def cancel_transfer(self, transfer: Transfer) -> None:
        if transfer.state is not TransferState.RESERVED:
            self.out.append(CancelTransfer(transfer.id))

    def take_ram_slot(self) -> SlotId | None:
        slot = self.chunks.book.take()
        return None if slot is None else SlotId(slot)

    def take_staging_slot(self) -> SlotId | None:
        slot = self.staging.take()
        return None if slot is None else SlotId(slot)
