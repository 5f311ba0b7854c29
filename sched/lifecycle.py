"""What happens to a turn between its admission and its end: claims laid and given up, pages indexed, the record written."""

from __future__ import annotations

from kvalet.runtime.plan import PageId, RowId
from kvalet.sched import growth, restore, spill
from kvalet.sched.board import Board
from kvalet.sched.calls import calls_of
from kvalet.sched.commands import End, TouchDisk
from kvalet.sched.matching import Match, give_up_partial, resident_match
from kvalet.sched.prefix import Node, covers
from kvalet.sched.record import account, final_report
from kvalet.sched.resident import chunk_keys, resident_path
from kvalet.sched.session import Turn
from kvalet.sched.states import TurnCause, TurnState
from kvalet.sched.turns import Ended, EndReason
from kvalet.store.ids import ChunkKey


def admit(board: Board, turn: Turn, match: Match, pages: list[PageId]) -> None:
    """``turn`` leaves the queue with ``pages`` of its own, stands on what matched, and restores or starts to feed."""
    board.queue.remove(turn)
    board.index.pin(match.last)
    turn.cursor = match.last
    forget_want(board, turn)
    turn.row = RowId(board.next_row)
    board.next_row += 1
    board.rows[turn.row] = turn
    turn.admitted_at = board.now
    turn.spare.extend(pages)
    board.touch(match.last)
    turn.resident_base = match.last.end
    turn.tiers.clear()
    _touch_disk(board, turn, match)
    board.counters.prefix_query_tokens += len(turn.ids)
    if match.sources:
        _adopt_history(board, turn, match)
        board.move(turn, TurnCause.ADMITTED_TO_RESTORE)
        restore.begin(board, turn, match)
    else:
        board.move(turn, TurnCause.ADMITTED)
        start_feeding(board, turn)
    spill.keep(board)


def _adopt_history(board: Board, turn: Turn, match: Match) -> None:
    """Deterministic mode, no history known: where a stored tail ends, a call ended; the next one begins there."""
    last = match.sources[-1]
    end = last.start + last.n_tokens
    unknown = turn.branch is None and not turn.prefilled_once and not turn.decoded
    if board.config.deterministic and unknown and last.exact and end < turn.n_prompt:
        turn.decoded = [(end, end)]
        turn.calls = calls_of(turn, board.config.deterministic_piece)


def _touch_disk(board: Board, turn: Turn, match: Match) -> None:
    """One recency for the whole chain on disk, whichever tier serves it; once per turn."""
    if turn.prefilled_once or turn.preemptions:
        return
    keys = [node.chunk.key for node in match.path if node.chunk is not None and node.chunk.on_disk]
    for source in match.sources:
        if source.key is not None and (source.from_disk or (source.chunk is not None and source.chunk.on_disk)):
            keys.append(source.key)
    for source in reversed(match.sources):
        if source.chunk is not None:
            board.chunks.use(source.chunk, board.now)
    tail = _stored_tail(board, turn)
    if tail is not None and tail not in keys:
        keys.append(tail)
    if keys:
        board.out.append(TouchDisk(tuple(keys)))


def _stored_tail(board: Board, turn: Turn) -> ChunkKey | None:
    """The tail on disk that ends the branch which ``turn`` goes on from: a longer page on the device may stand for it, so that
    no match names it, but it is what the next restart will read."""
    branch, diverged = turn.branch, turn.report.diverged_at
    if branch is None or 0 <= diverged < branch.kv_len:
        return None
    size = board.config.chunk_tokens
    start = branch.kv_len // size * size
    ids = turn.known_ids()
    tail = branch.ids[start : branch.kv_len]
    if not tail or ids[start : branch.kv_len] != tail:
        return None
    parent = chunk_keys(board, turn, ids)[start // size - 1] if start else None
    key = board.chunks.key_after(turn.spec.secret, parent, tail)
    return key if board.disk.has(key) else None


def finish_restoring(board: Board, turn: Turn) -> None:
    """Its last restore has joined, or its run was cut short."""
    board.move(turn, TurnCause.RESTORED)
    start_feeding(board, turn)
    if turn.blocked:
        board.move(turn, TurnCause.BLOCKED)


def pages_wanted(board: Board, turn: Turn) -> int:
    """Pages that a running turn needs for what it can be fed next."""
    tokens = max(len(turn.ids), min(turn.fed + 1, turn.feeds_until))
    return -(-tokens // board.config.page_tokens)


def start_feeding(board: Board, turn: Turn) -> None:
    """All that could be had is on the device: take the pages over, fix the source of a partial page, and begin to feed."""
    assert turn.cursor is not None
    match = resident_match(board, turn, len(turn.ids) - 1)
    if match.partial is not None and not _can_copy(board, turn, match):
        give_up_partial(board, turn, match)
    if match.last is not turn.cursor:
        board.index.pin(match.last)
        board.index.unpin(turn.cursor)
        turn.cursor = match.last
    turn.table = [node.page for node in match.path]
    board.ledger.own_all(turn.table)
    turn.kv_len = match.last.end
    if match.partial is not None:
        turn.source, turn.source_tokens = match.partial
        board.index.pin(turn.source)
        turn.kv_len += turn.source_tokens
    turn.fed = turn.kv_len
    turn.pending = turn.sent = turn.duplicates = 0
    turn.opened = False
    turn.feed_end = len(turn.ids)
    _give_back_surplus(board, turn)
    account(board, turn)


def _can_copy(board: Board, turn: Turn, match: Match) -> bool:
    """Pages for everything after the match are at hand (a restored partial page may have used up the reserve)."""
    need = -(-len(turn.ids) // board.config.page_tokens) - len(match.path)
    while len(turn.spare) < need:
        page = board.ledger.take()
        if page is None:
            return False
        turn.spare.append(page)
    return True


def _give_back_surplus(board: Board, turn: Turn) -> None:
    """More may have matched than was reserved for: keep the prompt's pages and one of growth."""
    need = -(-len(turn.ids) // board.config.page_tokens) + 1 - len(turn.table)
    while len(turn.spare) > max(need, 0):
        board.ledger.disown(turn.spare.pop())


def index_computed(board: Board, turn: Turn, upto: int) -> None:
    """Whole pages below position ``upto`` enter the index; a page whose ids are there already stays private."""
    assert turn.cursor is not None
    size = board.config.page_tokens
    if turn.calls:
        _index_one_by_one(board, turn, upto)
        return
    start, end = turn.cursor.end, upto // size * size
    if start >= end:
        return
    pages = turn.table[start // size : end // size]
    last = board.insert_pages(turn.cursor, turn, pages, tuple(turn.ids[start:end]))
    run = [last] if last is not None else []
    while run[-1].parent is not turn.cursor:
        run.append(run[-1].parent)  # type: ignore[arg-type]  # the cursor is on the way up
    for node, page in zip(reversed(run), pages, strict=True):
        turn.duplicates += node.page != page
        turn.cursor = board.index.step_down(node)


def _index_one_by_one(board: Board, turn: Turn, upto: int) -> None:
    assert turn.cursor is not None
    size = board.config.page_tokens
    while turn.cursor.end + size <= upto:
        at = turn.cursor.end
        page = turn.table[at // size]
        node = board.insert_page(turn.cursor, turn, tuple(turn.ids[at : at + size]), page)
        if node is None:
            return  # what follows stays private: it is computed again another time
        turn.duplicates += node.page != page
        turn.cursor = board.index.step_down(node)


def _index_all(board: Board, turn: Turn, upto: int) -> Node:
    """As ``index_computed``, and the partial page at the end. Returns the last node."""
    index_computed(board, turn, upto)
    assert turn.cursor is not None
    size = board.config.page_tokens
    last: Node = turn.cursor
    rest = tuple(turn.ids[last.end : upto])
    if 0 < len(rest) < size and len(turn.table) > last.end // size:
        calls = turn.calls[last.end : upto]
        known = next((child for child in last.children.values() if covers(child, rest, calls)), None)
        last = known or board.insert_page(last, turn, rest, turn.table[last.end // size]) or last
    board.touch(last)
    return last


def release(board: Board, turn: Turn, upto: int) -> Node | None:
    """Give up every claim. Computed KV below ``upto`` stays cached in the index (of a slow reader as the first to leave);
    what steps in flight may still touch is leased to them. Returns where that KV ends in the index."""
    restore.detach(board, turn)
    if turn.cursor is None:
        return None
    assert turn.row is not None
    last = turn.cursor
    if turn.state is not TurnState.RESTORING:
        _drop_source(board, turn)
        last = _index_all(board, turn, min(upto, turn.kv_len))
    record = next((r for r in reversed(board.steps) if any(row[1] == turn.row for row in r.rows)), None)
    if record is not None:
        board.ledger.lease_all(turn.table)
        record.lease(turn.table)
    root = turn.cursor.root
    board.index.unpin(turn.cursor)
    turn.cursor = None
    if turn.blocked and last is not root:
        board.index.demote(last)
    board.ledger.disown_all(turn.table)
    board.ledger.disown_all(turn.spare)
    turn.table.clear()
    turn.spare.clear()
    if turn.opened:
        board.closes.append(turn.row)
    del board.rows[turn.row]
    turn.row, turn.opened = None, False
    turn.pending = 0
    turn.kv_high = max(turn.kv_high, turn.kv_len)
    turn.kv_len = turn.fed = 0
    return last


def _drop_source(board: Board, turn: Turn) -> None:
    """The partial page to copy was not copied yet: what it would have brought is not there."""
    if turn.source is not None:
        assert turn.cursor is not None
        board.index.unpin(turn.source)
        turn.source = None
        turn.kv_len = turn.cursor.end


def requeue(board: Board, turn: Turn, *, preempted: bool) -> None:
    """Back to the queue, owning nothing. ``preempted``: it counts, and readmission becomes harder each time."""
    release(board, turn, turn.kv_len)
    board.move(turn, TurnCause.REQUEUED)
    if preempted:
        turn.preemptions += 1
        turn.older_ended = False
        board.counters.preemptions += 1
    enqueue(board, turn)


def enqueue(board: Board, turn: Turn) -> None:
    turn.need = turn.looked_at = 0
    board.queue.append(turn)
    board.queue.sort(key=lambda t: t.order)
    if not turn.blocked:
        remember_want(board, turn)


def remember_want(board: Board, turn: Turn) -> None:
    """The policy ranks what a queued turn matches last; nothing is reserved."""
    root = board.index.root(turn.spec.secret, turn.spec.tenant)
    path = resident_path(board, root, turn, len(turn.ids) - 1)
    turn.want_node = path[-1] if path else root
    turn.want_node.want(turn)
    board.touch(turn.want_node)


def forget_want(board: Board, turn: Turn) -> None:
    node, turn.want_node = turn.want_node, None
    if node is not None:
        node.unwant(turn)
        board.index.prune(node.root)


def end(board: Board, turn: Turn, reason: EndReason, message: str = "", reusable: int | None = None) -> None:
    """The one end of an accepted turn. ``reusable``: tokens from position 0 that index and history may keep (all if None)."""
    if turn.state is TurnState.QUEUED:
        board.queue.remove(turn)
        forget_want(board, turn)
    keep = len(turn.ids) if reusable is None else reusable
    fed_once = turn.state in (TurnState.PREFILLING, TurnState.DECODING, TurnState.PAUSED)
    kv_len = min(keep, turn.kv_len)
    last = release(board, turn, keep)
    board.move(turn, TurnCause.END)
    turn.session.turns.discard(turn.id)
    del board.turns[turn.id]
    if fed_once and kv_len >= turn.n_prompt and not board.device_lost:
        growth.grown(board, turn, tuple(turn.ids[:keep]), kv_len, last)
    else:
        growth.not_grown(board, turn)
    for other in board.queue:
        other.older_ended = other.older_ended or other.order > turn.order
    board.counters.ended[reason.value] += 1
    board.out.append(End(turn.id, Ended(reason, final_report(turn), message)))
