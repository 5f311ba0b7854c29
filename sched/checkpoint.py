"""Checkpoints: the chains of idle branches written to disk although nobody needs their room, at the lowest class.

For pinned sessions, and for all with ``checkpoint_idle``: after each turn. A few writes at a time, none while a read waits for
a slot or an eviction for the disk. A turn that goes on from a branch supersedes the branch's checkpoint. What the disk refuses
is counted and tried again after a pause, ``MAX_FAILURES`` times; then the line waits for its next turn, or for a disk that
takes something again.
"""

from __future__ import annotations

from itertools import islice

from kvalet.sched import records
from kvalet.sched.board import Board
from kvalet.sched.chunks import Chunk
from kvalet.sched.lines import Line
from kvalet.sched.persist import CHECKPOINT, first_missing, given_up, toward_disk, writing
from kvalet.sched.spill import can_drain
from kvalet.store.ids import ChunkKey

MAX_CHECKPOINTS = 2
"""Writes of this kind under way."""
MAX_LOOKS = 4
"""Lines looked at per event."""


def pump(board: Board) -> None:
    """Take the next steps that may be taken now."""
    lines = board.lines
    if not lines.checkpoints or len(lines.writing) >= MAX_CHECKPOINTS or _in_the_way(board):
        return
    for line in list(islice(lines.checkpoints, MAX_LOOKS)):
        if superseded(board, line):
            del lines.checkpoints[line]
            records.let_go(board, line)
        else:
            _step(board, line)
        if len(lines.writing) >= MAX_CHECKPOINTS:
            return


def _in_the_way(board: Board) -> bool:
    """Something more urgent needs slots or disk, the disk takes nothing now, or a drain decides."""
    paused = board.now < board.lines.checkpoint_retry_at or not can_drain(board)
    evicting = writing(board) > len(board.lines.writing) or board.slot_wait_since is not None
    urgent = bool(board.waiting_reads) or evicting
    return paused or urgent or (board.drain_deadline is not None and not board.turns)


def superseded(board: Board, line: Line) -> bool:
    """A live turn goes on from this branch: its end asks for the next checkpoint."""
    return any(board.turns[turn].replaces is line.branch for turn in line.session.turns)


def _step(board: Board, line: Line) -> None:
    chunk = _deepest_missing(board, line)
    if chunk is None:
        del board.lines.checkpoints[line]
        board.lines.due[line] = None
        return
    if line.session.pinned:
        records.hold(board, line)
    if given_up(first_missing(chunk)):
        line.refused = "full"
        records.stall(board, line)
        return
    transfer = toward_disk(board, chunk, CHECKPOINT)
    if transfer is not None:
        board.lines.writing[transfer.id] = line


def _deepest_missing(board: Board, line: Line) -> Chunk | None:
    """The last piece of the line that the disk lacks and a tier above has (what comes before it is written first), or the
    first piece that is missing before what the disk has: it was damaged there."""
    pieces = line.pieces
    for key in reversed(pieces):
        if board.disk.has(key):
            break
        if (chunk := _above(board, key)) is not None:
            return chunk
    hole = records.durable(board, line) // board.config.chunk_tokens
    return _above(board, pieces[hole]) if hole < len(pieces) else None


def _above(board: Board, key: ChunkKey) -> Chunk | None:
    """A piece that a tier above the disk has and the disk has not."""
    chunk = board.chunks.get(key)
    above = chunk is not None and not chunk.on_disk and (chunk.slot is not None or chunk.node is not None)
    return chunk if above else None
