"""The last minutes: running turns may finish until the deadline, then what is worth it goes to disk, most valuable first; a
branch's record goes when the branch is whole on disk, and at the end with what of it is."""

from __future__ import annotations

from kvalet.sched import lifecycle, records
from kvalet.sched.board import Board
from kvalet.sched.chunks import Chunk
from kvalet.sched.commands import Drained
from kvalet.sched.persist import MAX_WRITES, toward_disk, writing
from kvalet.sched.policy import rank_chunk
from kvalet.sched.spill import can_drain, unit_of
from kvalet.sched.turns import EndReason


def begin(board: Board, deadline: float) -> None:
    """A second call can only bring the deadline nearer."""
    if board.drain_deadline is None or deadline < board.drain_deadline:
        board.drain_deadline = deadline
        board.wake(deadline)


def pump(board: Board) -> None:
    """Answers ``Drained`` once: when no turn runs and nothing is left to write, or at the deadline."""
    if board.drain_deadline is None or board.drained:
        return
    if board.now >= board.drain_deadline:
        for turn in sorted(board.turns.values(), key=lambda t: t.order):
            lifecycle.end(board, turn, EndReason.SHUTDOWN, "the server is shutting down")
        _finish(board)
        return
    if board.turns:
        return
    _link_leaves(board)
    left = _left(board)
    records.sweep(board, every=False)
    if can_drain(board):
        for chunk in sorted(left, key=rank_chunk, reverse=True):
            if writing(board) >= MAX_WRITES:
                break
            toward_disk(board, chunk)
    if not writing(board) and (not left or not board.disk.accepts_writes() or not _waits(board)):
        if not records.sweep(board, every=True):
            _finish(board)
    elif board.now < board.write_retry_at and board.retry_wake != board.write_retry_at:
        board.retry_wake = board.write_retry_at
        board.wake(board.write_retry_at)


def _waits(board: Board) -> bool:
    """Something will go on by itself: a retry of the disk, a step or copy that still uses the pages."""
    return board.now < board.write_retry_at or bool(board.steps) or bool(board.transfers)


def _link_leaves(board: Board) -> None:
    """Give tails that are only on the device a place in the chunk map, unless RAM or disk cover them."""
    if board.device_lost:
        return
    for leaf in board.index.leaves:
        if leaf.chunk is None:
            unit = unit_of(board, leaf)
            if not board.chunks.covered(unit.parent, leaf.root.secret, unit.ids) and board.chunks.can_link(leaf):
                board.chunks.link(leaf, board.now).last_use = leaf.last_use


def _left(board: Board) -> list[Chunk]:
    return [c for c in board.chunks if not c.on_disk and (c.slot is not None or c.node is not None)]


def _finish(board: Board) -> None:
    board.drained = True
    _link_leaves(board)
    counters = board.counters
    board.out.append(Drained(len(_left(board)), records.left(board), counters.lost_device_pages, counters.lost_device_chunks))
