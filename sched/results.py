"""What a finished step means: tokens accepted, pages indexed, turns ended."""

from __future__ import annotations

from kvalet.runtime.plan import EndedBy, RowResult, StepResult
from kvalet.sched import lifecycle
from kvalet.sched.board import Board
from kvalet.sched.calls import DECODED
from kvalet.sched.commands import Emit
from kvalet.sched.session import Turn
from kvalet.sched.states import TurnCause, TurnState
from kvalet.sched.turns import EndReason, Piece

MAX_PAGES_INDEXED = 256
"""Of one result: a piece of 8,192 tokens would hold the loop for milliseconds."""
END_REASONS = {
    EndedBy.STOP: EndReason.STOP,
    EndedBy.LENGTH: EndReason.LENGTH,
    EndedBy.GRAMMAR: EndReason.GRAMMAR,
}


def on_step_done(board: Board, result: StepResult) -> None:
    """Raises CoreDefect if the result is not that of the oldest step in flight, or lacks a live row."""
    if not board.steps or board.steps[0].step != result.step:
        raise board.story.defect(f"step {result.step} is done, in flight are {[r.step for r in board.steps]}")
    record = board.steps.pop(0)
    board.ledger.unlease_all(record.leases)
    by_row = {row.row: row for row in result.rows}
    budget = MAX_PAGES_INDEXED
    for turn, row, start, n, sample in record.rows:
        answer = by_row.get(row)
        if turn.row != row:
            board.counters.stale_results += answer is not None
            continue
        if answer is None or answer.kv_len != start + n:
            raise board.story.defect(f"step {result.step} answers {answer} for {n} tokens from {start} of {turn}")
        turn.pending -= sample
        turn.kv_len = answer.kv_len
        budget -= _index(board, turn, budget)
        _advance(board, turn, answer)


def _index(board: Board, turn: Turn, budget: int) -> int:
    """Up to ``budget`` pages of the prompt that are computed enter the index: after a long piece the rest follows with the next
    results, at the latest with the turn's end. Returns how many."""
    assert turn.cursor is not None
    begun = turn.cursor.end
    lifecycle.index_computed(board, turn, min(turn.kv_len, turn.n_prompt, begun + budget * board.config.page_tokens))
    return (turn.cursor.end - begun) // board.config.page_tokens if turn.cursor is not None else 0


def _advance(board: Board, turn: Turn, answer: RowResult) -> None:
    turn.ids.extend(answer.ids)
    if board.config.deterministic:
        turn.calls += (DECODED,) * len(answer.ids)
    if answer.ids:
        if not turn.first_token_at:
            turn.first_token_at = board.now
        if turn.state is TurnState.PREFILLING:
            board.move(turn, TurnCause.SAMPLED)
    if answer.ids or answer.text:
        board.out.append(Emit(turn.id, Piece(answer.ids, answer.text, answer.logprobs)))
    if answer.ended_by is not None:
        reusable = turn.n_prompt + answer.reusable_ids if answer.reusable_ids >= 0 else len(turn.ids)
        message = "the grammar allowed no token" if answer.ended_by is EndedBy.GRAMMAR else ""
        lifecycle.end(board, turn, END_REASONS[answer.ended_by], message, reusable)
