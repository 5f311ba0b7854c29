"""From RAM (and where need be from the device) to disk, so that the disk stays closed under ancestors.

Before a chunk is written, every ancestor that the disk lacks is written, first chunk first. An ancestor that RAM holds is
written from its slot; one that is only on the device is copied, without being evicted, into a staging slot and written from
there: one such copy at a time. A child is only asked for when its parent is durable, so a failed write has no queued
descendants to cancel; their RAM copies stay. After a failure nothing is written for a while; RAM makes room otherwise.
"""

from __future__ import annotations

import math

from kvalet.sched import records
from kvalet.sched.board import Board
from kvalet.sched.chunks import Chunk
from kvalet.sched.commands import CopyOut, WriteChunk
from kvalet.sched.events import WriteDone
from kvalet.sched.spill import can_drain, pick_victim, unit_of
from kvalet.sched.states import TransferCause
from kvalet.sched.transfer_record import Transfer, TransferKind

MAX_WRITES = 4
MAX_WRITES_PER_USE = 3
MAX_CANDIDATES = 64
"""Chunks looked at for the next writes; the least valuable ones."""
RETRY_S = 1.0
MAX_RETRY_S = 30.0
"""The pause after a failed write doubles from the first to the second; a success ends it. Nobody wakes for a retry: it is
made at the next event that finds writes due (a drain does wake)."""
NOT_THE_DISKS_FAULT = frozenset({"cancelled", "ancestor", "blocked"})
EVICTION, CHECKPOINT = 1, 2
"""Classes of a write."""


def pump(board: Board) -> None:
    """Start what writes are due: RAM below its low watermark of reclaimable slots, up to the high one; all of it while a
    victim waits for a slot; nothing while the disk takes none."""
    if not can_drain(board) or (board.drain_deadline is not None and not board.turns):
        return  # the drain itself decides once no turn is left
    if board.chunks.book.n_slots == 0:
        _write_victim(board)
        return
    due = _due(board)
    if due <= 0 or writing(board) >= MAX_WRITES:
        return
    for chunk in board.chunks.in_ram.unwritten(MAX_CANDIDATES):
        if due <= 0 or writing(board) >= MAX_WRITES:
            return
        due -= toward_disk(board, chunk) is not None


def writing(board: Board) -> int:
    """Writes and ancestor copies under way."""
    return board.under_way[TransferKind.WRITE] + board.under_way[TransferKind.PERSIST]


def _due(board: Board) -> int:
    """How many more writes should be under way."""
    config, book = board.config, board.chunks.book
    reclaimable = book.free + board.chunks.in_ram.reclaimable
    low = max(1, math.ceil(config.ram_low_watermark * book.n_slots))
    high = max(low, math.ceil(config.ram_high_watermark * book.n_slots))
    if reclaimable < low or board.slot_wait_since is not None:
        board.writing = True
    elif reclaimable >= high:
        board.writing = False
    return high - reclaimable - writing(board) if board.writing else 0


def _write_victim(board: Board) -> None:
    """Without a RAM tier a victim goes straight to disk through a staging slot, while somebody waits for its pages."""
    if board.slot_wait_since is None:
        return
    unit = pick_victim(board)
    if unit is not None and board.chunks.can_link(unit.leaf):
        toward_disk(board, board.chunks.link(unit.leaf, board.now))


def first_missing(chunk: Chunk) -> Chunk:
    """The first of the chunk's ancestors that the disk lacks, or the chunk itself."""
    missing = chunk
    while missing.parent is not None and not missing.parent.on_disk:
        missing = missing.parent
    return missing


def toward_disk(board: Board, chunk: Chunk, klass: int = EVICTION) -> Transfer | None:
    """One step on the way of ``chunk`` to disk: its first ancestor (or itself) that the disk lacks. None if none began."""
    missing = first_missing(chunk)
    if missing.on_disk or missing.outgoing is not None or given_up(missing):
        return None
    if missing.slot is not None:
        began: Transfer | None = _write(board, missing, klass)
    elif missing.node is not None and board.under_way[TransferKind.PERSIST] == 0:
        began = _copy_out(board, missing, klass)
    else:
        began = None
    if began is not None:
        missing.writes = missing.writes + 1 if missing.written_use == missing.last_use else 1
        missing.written_use = missing.last_use
    return began


def given_up(chunk: Chunk) -> bool:
    """A disk smaller than what it is given evicts one chunk for the next: who was evicted is not written again and again,
    but only after it has been used again. A write that the disk failed does not count: the pause after it bounds those."""
    return chunk.writes >= MAX_WRITES_PER_USE and chunk.written_use == chunk.last_use


def _write(board: Board, chunk: Chunk, klass: int) -> Transfer:
    assert chunk.slot is not None
    transfer = board.start_transfer(TransferKind.WRITE, chunk)
    board.chunks.book.hold(chunk.slot)
    transfer.slot, transfer.klass = chunk.slot, klass
    board.advance(transfer, TransferCause.WRITE)
    board.out.append(WriteChunk(transfer.id, board.chunks.meta(chunk), chunk.slot, klass))
    return transfer


def _copy_out(board: Board, chunk: Chunk, klass: int) -> Transfer | None:
    assert chunk.node is not None
    unit = unit_of(board, chunk.node)
    if any(board.step_leases(page) for page in unit.pages):
        return None
    slot = board.take_staging_slot()
    if slot is None:
        return None
    transfer = board.start_transfer(TransferKind.PERSIST, chunk)
    transfer.slot, transfer.staging, transfer.klass = slot, True, klass
    transfer.pages, transfer.n_pages = list(unit.pages), len(unit.pages)
    board.ledger.lease_all(unit.pages)
    board.advance(transfer, TransferCause.COPY)
    board.out.append(CopyOut(transfer.id, unit.pages, slot, n_tokens=len(unit.ids)))
    return transfer


def on_copy_done(board: Board, transfer: Transfer) -> None:
    """The copy is in the staging slot: the pages are let go, the write begins."""
    chunk = transfer.chunk
    assert chunk is not None
    assert transfer.slot is not None
    board.free_pages(transfer)
    board.advance(transfer, TransferCause.WRITE)
    board.out.append(WriteChunk(transfer.id, board.chunks.meta(chunk), transfer.slot, transfer.klass))


def on_write_done(board: Board, transfer: Transfer, event: WriteDone) -> None:
    chunk = transfer.chunk
    assert chunk is not None
    board.write_failures = 0
    board.counters.written_chunks += 1
    board.counters.written_bytes += event.n_bytes
    board.chunks.remember_tail(chunk)
    board.counters.checkpointed_chunks += transfer.klass == CHECKPOINT
    board.chunks.set_on_disk(chunk, True)
    board.finish_transfer(transfer, TransferCause.COMPLETE)
    records.on_durable(board, chunk.key)
    records.taken(board, transfer.id)


def on_failed(board: Board, transfer: Transfer, reason: str) -> None:
    """Not durable. RAM and device copies stay as they were."""
    chunk = transfer.chunk
    assert chunk is not None
    board.counters.write_failures[reason] += 1
    if reason == "ancestor":
        at = chunk.parent
        while at is not None:
            board.chunks.set_on_disk(at, board.disk.has(at.key))
            at = at.parent
    if reason == "blocked":
        chunk.writes = MAX_WRITES_PER_USE  # it would fail again: only another use is worth another try
    if reason not in NOT_THE_DISKS_FAULT:
        chunk.writes = max(0, chunk.writes - 1)
        if reason != "budget" or transfer.klass != CHECKPOINT:
            board.write_failures += 1
            board.write_retry_at = board.now + min(RETRY_S * 2 ** (board.write_failures - 1), MAX_RETRY_S)
    board.finish_transfer(transfer, TransferCause.FAIL)
    records.refused(board, transfer.id, reason)
