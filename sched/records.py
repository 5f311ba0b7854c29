"""Records: what the disk is told of each branch of a named session, last of all.

A record is written when everything it names is durable: at eviction time, when the last piece of a branch has gone to disk; at
a checkpoint; in a drain. It is replaced as its branch grows. Keys named by a record under way are pinned in the store until
the answer. A record that cannot be written costs the history it would have told, never a chunk. How a session comes back by
its records is in ``resume.py``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from kvalet.sched.board import Board
from kvalet.sched.commands import DropRecord, PinDisk, UnpinDisk, WriteRecord
from kvalet.sched.events import RecordDone, RecordFailed, TransferId
from kvalet.sched.lines import Line, RecordJob, Saved
from kvalet.sched.session import Session
from kvalet.store.ids import ChunkKey
from kvalet.store.record import Record

MAX_RECORDS = 4
"""Records under way."""
MAX_FAILURES = 3
"""After so many failures in a row a line waits for its next turn, a drain, or a disk that takes something again."""
MAX_RETRY_S = 30.0
BUDGET_PAUSE_S = 60.0
PASSING = frozenset({"cancelled", "closed", "missing", "busy", "record"})
"""Why a record failed without the disk being at fault."""


def number(board: Board, count: int = 1) -> TransferId:
    """The first of ``count`` numbers for jobs that are no transfers of bytes between slots."""
    first = TransferId(board.next_transfer)
    board.next_transfer += count
    return first


# what the disk is owed


def durable(board: Board, line: Line) -> int:
    """Tokens from position 0 on that the disk has, whole chunk by whole chunk and then the tail."""
    has = board.disk.has
    n = next((i for i, key in enumerate(line.keys) if not has(key)), len(line.keys))
    if n == len(line.keys) and line.tail is not None and has(line.tail):
        return line.branch.kv_len
    return n * board.config.chunk_tokens


def on_durable(board: Board, key: ChunkKey) -> None:
    """A piece has gone to disk: whose last one was it? A last whole chunk counts where no tail can follow."""
    for line in board.lines.by_end.get(key, ()):
        if key == line.last or line.tail is None or not _above_disk(board, line, line.tail):
            board.lines.due[line] = None


def _above_disk(board: Board, line: Line, key: ChunkKey) -> bool:
    chunk = board.chunks.get(key)
    if chunk is not None and (chunk.node is not None or chunk.slot is not None):
        return True
    return key == line.tail and line.node is not None and line.node.end == line.branch.kv_len and line.node.indexed


def pump(board: Board) -> None:
    """Send the records that are due, a few at a time."""
    lines = board.lines
    if not lines.due or board.now < lines.record_retry_at or not board.disk.accepts_writes():
        return
    for line in list(islice(lines.due, 2 * MAX_RECORDS)):
        if len(lines.jobs) >= MAX_RECORDS:
            return
        if line.sending is None:
            del lines.due[line]
            _send(board, line)


def _send(board: Board, line: Line) -> None:
    session, branch = line.session, line.branch
    n_tokens = durable(board, line)
    saved = Saved(branch, n_tokens, session.pinned)
    successor = board.sessions.find(session.tenant, session.name) or session  # of a session that the book had forgotten
    if not session.name or session.closed or successor is not session or n_tokens == 0 or line.says(n_tokens):
        let_go(board, line)
        return
    keys = line.keys[: n_tokens // board.config.chunk_tokens]
    tail = line.tail if n_tokens == branch.kv_len else None
    job = RecordJob(line, saved, keys if tail is None else (*keys, tail))
    told = line.told or Record(session.tenant, session.name, branch.id, (), 0, 0)
    record = replace(
        told, ids=branch.ids, boundary=branch.boundary, kv_len=n_tokens, decoded=branch.decoded, space=branch.space,
        chunk_keys=keys, tail_key=tail, parent=branch.parent, fork_at=branch.fork_at, pinned=session.pinned,
    )  # fmt: skip
    transfer = number(board)
    board.lines.jobs[transfer] = job
    line.sending = saved
    board.out.append(PinDisk(job.keys))
    board.out.append(WriteRecord(transfer, record))


def on_done(board: Board, event: RecordDone) -> None:
    job = _answered(board, event)
    line = job.line
    line.saved, line.failures, line.refused = job.saved, 0, ""
    if job.saved.pinned != line.session.pinned and line.session.lines.get(line.branch.id) is line:
        board.lines.due[line] = None  # pinned or unpinned while this record was under way
    board.counters.written_records += 1
    board.counters.record_bytes += event.n_bytes
    if line not in board.lines.checkpoints:
        let_go(board, line)


def on_failed(board: Board, event: RecordFailed) -> None:
    """The record before it still stands; the line is tried again a few times."""
    line = _answered(board, event).line
    board.counters.record_failures[event.reason] += 1
    line.failures += 1
    line.refused = event.reason
    if event.reason not in PASSING:
        board.lines.record_retry_at = board.now + min(2.0 ** (line.failures - 1), MAX_RETRY_S)
    if line.failures < MAX_FAILURES and event.reason != "closed" and line.session.lines.get(line.branch.id) is line:
        board.lines.due[line] = None
        board.wake(board.lines.record_retry_at)
    else:
        let_go(board, line)


def _answered(board: Board, event: RecordDone | RecordFailed) -> RecordJob:
    job = board.lines.jobs.pop(event.transfer, None)
    if job is None:
        raise board.story.defect(f"an answer for record {event.transfer}, which is over: {event}")
    job.line.sending = None
    board.out.append(UnpinDisk(job.keys))
    return job


def hold(board: Board, line: Line) -> None:
    """Pin the chain (present, in flight or to be written) in the store until its record is durable."""
    if not line.held:
        line.held = line.pieces
        board.out.append(PinDisk(line.held))


def let_go(board: Board, line: Line) -> None:
    if line.held:
        board.out.append(UnpinDisk(line.held))
        line.held = ()


def sweep(board: Board, *, every: bool) -> bool:
    """A drain asks for records: of the lines that are whole on disk, then (``every``) of all; latest used first. Whether
    some are still due or under way."""
    lines = board.lines
    if not lines.swept or (every and not lines.flushed):
        lines.swept, lines.flushed = True, every
        found = [line for session in board.sessions for line in session.lines.values() if not line.complete]
        for line in sorted(found, key=lambda line: -line.used):
            if every or board.disk.has(line.last):
                line.failures = 0
                lines.due[line] = None
        pump(board)
    return bool(lines.jobs) or (bool(lines.due) and board.disk.accepts_writes())


def left(board: Board) -> int:
    """Branches of named sessions without a record that says all of them."""
    return sum(not line.complete for session in board.sessions if session.name for line in session.lines.values())


def taken(board: Board, transfer: TransferId) -> None:
    """The disk took a chunk. Lines that it had refused too often may try again."""
    lines = board.lines
    lines.writing.pop(transfer, None)
    if lines.stalled:
        lines.checkpoints.update(lines.stalled)
        lines.stalled.clear()


def refused(board: Board, transfer: TransferId, reason: str) -> None:
    """The disk did not take a chunk. If it was a checkpoint's: after a pause again, a few times."""
    lines = board.lines
    line = lines.writing.pop(transfer, None)
    if line is None:
        return
    board.counters.checkpoint_refusals[reason] += 1
    line.failures += 1
    line.refused = reason
    pause = BUDGET_PAUSE_S if reason == "budget" else min(2.0 ** (line.failures - 1), MAX_RETRY_S)
    lines.checkpoint_retry_at = board.now + pause
    if line in lines.checkpoints:
        if line.failures >= MAX_FAILURES:
            stall(board, line)
        else:
            board.wake(lines.checkpoint_retry_at)


def stall(board: Board, line: Line) -> None:
    """Its record says what did become durable."""
    board.lines.checkpoints.pop(line, None)
    board.lines.stalled[line] = None
    board.lines.due[line] = None


# what a session's end does


def trim(board: Board, session: Session) -> None:
    """Drop the lines of branches that the session has forgotten."""
    if len(session.lines) > len(session.branches):
        known = {branch.id for branch in session.branches}
        for line in [line for line in session.lines.values() if line.branch.id not in known]:
            drop(board, line)


def drop(board: Board, line: Line) -> None:
    """The session has forgotten this branch."""
    board.lines.remove(line)
    let_go(board, line)
    del line.session.lines[line.branch.id]
    if line.session.name and (line.saved is not None or line.sending is not None):
        board.out.append(DropRecord(line.session.tenant, line.session.name, line.branch.id))


def stored(board: Board, tenant: str, name: str) -> list[str]:
    """Branches that the disk has records of, but for those whose end was decided with this tick's commands."""
    dropped = {c.branch for c in board.out if isinstance(c, DropRecord) and (c.tenant, c.session) == (tenant, name)}
    return [branch for branch in board.disk.branches(tenant, name) if branch not in dropped]


def close(board: Board, session: Session | None, tenant: str, name: str) -> None:
    """All records of the session go, read or not; nothing is written for it any more."""
    branches = dict.fromkeys(stored(board, tenant, name))
    if session is not None:
        session.closed = True
        for line in session.lines.values():
            board.lines.remove(line)
            let_go(board, line)
            if line.saved is not None or line.sending is not None:
                branches[line.branch.id] = None
        session.lines.clear()
    for branch in branches:
        board.out.append(DropRecord(tenant, name, branch))


def forget(board: Board, session: Session) -> None:
    """The book has no room for the session: what its records do not say yet is written now, as far as it is durable; asked
    for again, it is read back."""
    for line in session.lines.values():
        board.lines.remove(line)
        let_go(board, line)
        if not line.complete and board.disk.has(line.pieces[0]):
            board.lines.due[line] = None


def may_forget(board: Board, session: Session) -> bool:
    """Nobody uses it, and of what is pinned the disk has all that there is to have."""
    if session.turns or session.loading is not None:
        return False
    lines = board.lines
    queues = (lines.due, lines.checkpoints, lines.stalled)
    return not session.pinned or not any(line.sending or any(line in q for q in queues) for line in session.lines.values())
