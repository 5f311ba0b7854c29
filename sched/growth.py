"""How lines follow their branches: a turn ends and its branch grows, or a new one begins; a session is pinned or let go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvalet.sched.board import Board
from kvalet.sched.lines import Line
from kvalet.sched.prefix import Node, common_prefix, covers
from kvalet.sched.records import let_go, trim
from kvalet.sched.resident import chunk_keys
from kvalet.sched.session import Branch, Session, Turn
from kvalet.store.ids import ChunkKey


def grown(board: Board, turn: Turn, ids: tuple[int, ...], kv_len: int, last: Node | None) -> None:
    """A turn has ended and left ``ids`` behind, the first ``kv_len`` of them with KV, which ends in ``last`` on the device.
    The branch that it went on from grows, unless another turn was faster; else a new one begins."""
    session, parent = turn.session, turn.branch
    decoded = (*turn.decoded, (turn.n_prompt, kv_len))
    if not tracked(board, session):
        branch = Branch(ids, turn.n_prompt, kv_len, turn.spec.secret, decoded)
        board.sessions.ended(session, turn.replaces, branch)
        return
    keys, tail = pieces_of(board, turn, ids, kv_len)
    if turn.replaces is not None and turn.replaces.id and any(turn.replaces is other for other in session.branches):
        name, left, fork_at = turn.replaces.id, turn.replaces.parent, turn.replaces.fork_at
    else:
        name = (tail or keys[-1]).hex()[:16]
        left, fork_at = (parent.id, common_prefix(parent.ids, ids)) if parent is not None else ("", 0)
    branch = Branch(ids, turn.n_prompt, kv_len, turn.spec.secret, decoded, name, left, fork_at)
    board.sessions.ended(session, turn.replaces, branch)
    _keep_line(board, session, branch, keys, tail, last)


def _keep_line(
    board: Board, session: Session, branch: Branch, keys: tuple[ChunkKey, ...], tail: ChunkKey | None, last: Node | None
) -> None:
    if session.closed:
        return
    line = session.lines.get(branch.id)
    if line is None:
        line = session.lines[branch.id] = Line(session, branch, keys, tail)
    else:
        board.lines.remove(line)
        let_go(board, line)
        _drop_covered_tail(board, line.branch.kv_len, last)
        _keep_what_stands(line, branch)
        line.branch, line.keys, line.tail, line.failures, line.refused = branch, keys, tail, 0, ""
    line.node, line.used = last, board.now
    board.lines.add(line)
    trim(board, session)
    if session.pinned or board.config.checkpoint_idle:
        want(board, line)
    elif board.disk.has(line.last):
        board.lines.due[line] = None


def _keep_what_stands(line: Line, grown: Branch) -> None:
    """Of what is durable and of the transcript, what agrees with the ids that the branch has now: a client may have changed
    its end."""
    shared = common_prefix(line.branch.ids, grown.ids)
    if line.saved is not None:
        line.saved = replace(line.saved, n_tokens=min(line.saved.n_tokens, shared))
    if line.told is not None:
        line.told = replace(line.told, spans=tuple(span for span in line.told.spans if span.end <= shared))


def _drop_covered_tail(board: Board, kv_len: int, last: Node | None) -> None:
    """The partial page where the branch ended before, ``kv_len`` tokens in: a checkpoint or a restore gave it a place in the
    chunk map, which kept it when a longer page began with its ids. Superseded, it leaves."""
    start = kv_len // board.config.page_tokens * board.config.page_tokens
    page = last
    while page is not None and page.start > start:
        page = page.parent
    if page is None or page.parent is None or page.start != start or not page.indexed:
        return
    for node in list(page.parent.children.values()):
        if len(node.ids) < len(page.ids) and node.chunk is not None and covers(page, node.ids, node.calls):
            moving = node.chunk.outgoing is not None or node.chunk.incoming is not None
            if not (node.pins or moving or board.step_leases(node.page)):
                board.remove_node(node)


def not_grown(board: Board, turn: Turn) -> None:
    """A turn has ended and left nothing behind: what it would have superseded is to be checkpointed after all."""
    branch = turn.replaces
    line = turn.session.lines.get(branch.id) if branch is not None else None
    wanted = turn.session.pinned or board.config.checkpoint_idle
    if line is not None and line.branch is branch and wanted and not line.complete:
        want(board, line)


def tracked(board: Board, session: Session) -> bool:
    """The disk is to know the session's branches."""
    return bool(session.name) or board.config.checkpoint_idle


def pieces_of(board: Board, turn: Turn, ids: tuple[int, ...], kv_len: int) -> tuple[tuple[ChunkKey, ...], ChunkKey | None]:
    """Keys of the whole chunks of ``ids[:kv_len]``, and of the tail after them."""
    size = board.config.chunk_tokens
    whole = tuple(chunk_keys(board, turn, ids)[: kv_len // size])
    rest = ids[len(whole) * size : kv_len]
    return whole, board.chunks.key_after(turn.spec.secret, whole[-1] if whole else None, rest) if rest else None


def want(board: Board, line: Line) -> None:
    """The line's chain is to be written. Its tail gets a place in the chunk map, so that it can be found there."""
    lines, node = board.lines, line.node
    line.failures, line.refused = 0, ""
    lines.stalled.pop(line, None)
    lines.checkpoints[line] = None
    if (
        node is not None
        and node.indexed
        and node.end == line.branch.kv_len
        and node.chunk is None
        and board.chunks.can_link(node)
    ):
        board.chunks.link(node, board.now).last_use = node.last_use


def pin(board: Board, session: Session, pinned: bool) -> None:
    """Pinned: its chains are written at the lowest class, now and after each turn. Unpinned: the records say so."""
    board.lines.set_pinned(session, pinned)
    for line in session.lines.values():
        if pinned and not line.complete:
            want(board, line)
        elif not pinned:
            let_go(board, line)
            if line.saved is not None and line.saved.pinned:
                board.lines.due[line] = None


def on_gone(board: Board, keys: Sequence[ChunkKey]) -> None:
    """The disk has lost pieces. If a tier above still has them, those of pinned sessions are written again."""
    gone = {key for key in keys if key in board.lines.pinned and not board.disk.has(key)}
    if not gone:
        return
    for session in board.sessions:
        for line in session.lines.values() if session.pinned else ():
            if not gone.isdisjoint(line.pieces):
                line.saved = None
                want(board, line)
