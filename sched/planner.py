"""Board + token budget -> StepPlan. Decodes first, then prefill pieces of the oldest turns.

A plan only uses pages that turns own already (``admission`` got them): a row without a page sits this step out. Bounds:
``max_rows`` rows, all of them open in the engine; ``step_tokens`` tokens in a step in which somebody decodes, else
``idle_step_tokens``. Several prefilling turns: the oldest takes what it can of the budget, then the next.

Deterministic mode: a prefill piece runs to the next multiple of ``deterministic_piece``, to where decoding once began, or to
the end of what is known, and is never cut by the budget (one piece may exceed it); positions that decode steps computed
are computed by decode rows again, one a step.
"""

from __future__ import annotations

from kvalet.runtime.plan import PageId, Row, RowId, RowOpen, StepPlan
from kvalet.sched import calls
from kvalet.sched.board import Board, StepRecord
from kvalet.sched.session import Turn


class _Draft:
    """The plan being made."""

    def __init__(self, board: Board) -> None:
        self.rows: list[Row] = []
        self.opens: list[RowOpen] = []
        self.copies: list[tuple[PageId, PageId]] = []
        self.record = StepRecord(board.next_step, [])


def plan(board: Board) -> StepPlan | None:
    """None: nothing to do, or ``lag`` + 1 steps in flight, or no device."""
    if len(board.steps) > board.config.lag or board.device_lost:
        return None
    draft = _Draft(board)
    decodes, feeds = _sort_turns(board)
    budget = board.config.step_tokens
    for turn in decodes:
        n = 1 if board.config.deterministic else turn.ahead
        if budget >= n or not draft.rows:
            budget -= _add_row(board, draft, turn, n, decode=True)
    if not draft.rows:
        budget = board.config.idle_step_tokens
    for turn in feeds:
        budget -= _feed(board, draft, turn, budget)
    if not draft.rows and not board.closes:
        return None
    closes = tuple(board.closes)
    board.closes.clear()
    board.steps.append(draft.record)
    board.next_step += 1
    board.counters.steps += 1
    return StepPlan(draft.record.step, tuple(draft.rows), tuple(draft.opens), closes, tuple(draft.copies))


def _sort_turns(board: Board) -> tuple[list[Turn], list[Turn]]:
    """(turns that decode now, turns with known tokens left to feed), each oldest first; only as many as rows may be open."""
    turns = board.running()
    rows_left = board.config.max_rows - sum(t.opened for t in board.rows.values())
    decodes: list[Turn] = []
    feeds: list[Turn] = []
    for turn in turns:
        if turn.ahead < 1:
            continue
        if not turn.opened:
            if rows_left < 1:
                continue
            rows_left -= 1
        (decodes if turn.fed >= turn.feed_end else feeds).append(turn)
    return decodes, feeds


def _feed(board: Board, draft: _Draft, turn: Turn, budget: int) -> int:
    """One piece of what the turn knows; returns the tokens it took."""
    if not board.config.deterministic:
        n = min(turn.feed_end - turn.fed, budget)
        return _add_row(board, draft, turn, n, decode=n == 1 and turn.fed >= turn.n_prompt) if n > 0 else 0
    n, decode = calls.next_piece(turn, board.config.deterministic_piece)
    if n > budget and draft.rows:
        return 0
    return _add_row(board, draft, turn, n, decode=decode)


def _add_row(board: Board, draft: _Draft, turn: Turn, n: int, *, decode: bool) -> int:
    """Feed ``n`` tokens, or as many as there are pages for (a deterministic piece only whole). Returns how many."""
    size = board.config.page_tokens
    room = turn.n_pages * size - turn.fed
    if room < n and (board.config.deterministic or room < 1):
        return 0
    n = min(n, room)
    while len(turn.table) * size < turn.fed + n:
        turn.table.append(turn.spare.popleft())
    assert turn.row is not None
    if not turn.opened:
        _open(board, draft, turn, turn.row)
        new_pages: tuple[PageId, ...] = ()
    else:
        new_pages = tuple(turn.table[turn.sent :])
    turn.sent = len(turn.table)
    sample = turn.fed + n == len(turn.ids) + turn.pending
    draft.rows.append(Row(turn.row, turn.fed, n, decode, sample, new_pages))
    draft.record.rows.append((turn, turn.row, turn.fed, n, sample))
    turn.fed += n
    turn.pending += sample
    return n


def _open(board: Board, draft: _Draft, turn: Turn, row: RowId) -> None:
    params = turn.params
    draft.opens.append(RowOpen(row, tuple(turn.ids), turn.n_prompt, turn.kv_len, tuple(turn.table), params))
    turn.opened = True
    if turn.source is not None:
        assert turn.cursor is not None
        target = turn.table[turn.cursor.end // board.config.page_tokens]
        draft.copies.append((turn.source.page, target))
        board.ledger.lease(turn.source.page)
        draft.record.lease([turn.source.page])
        board.index.unpin(turn.source)
        turn.source = None
