"""The frozen picture that the core gives of itself."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from kvalet.sched.board import Board
from kvalet.sched.counters import CoreStatistics
from kvalet.sched.states import TurnState
from kvalet.sched.transfer_record import TransferKind


def statistics(board: Board) -> CoreStatistics:
    counters: dict[str, Any] = {}
    for field in dataclasses.fields(board.counters):
        value = getattr(board.counters, field.name)
        counters[field.name] = dict(value) if isinstance(value, Counter) else value
    counters["lost_chunks"] = board.chunks.lost_chunks
    turns = Counter(turn.state.value for turn in board.turns.values())
    return CoreStatistics(
        turns={state.value: turns[state.value] for state in TurnState if state is not TurnState.ENDED},
        queue_length=len(board.queue),
        steps_in_flight=len(board.steps),
        pages=board.ledger.statistics(),
        idle_pages=board.index.n_idle,
        ram=board.chunks.book.statistics(),
        staging=board.staging.statistics(),
        chunks=len(board.chunks),
        sessions=len(board.sessions),
        transfers={kind.value: sum(t.kind is kind for t in board.transfers.values()) for kind in TransferKind},
        counters=counters,
        draining=board.drain_deadline is not None,
        device_lost=bool(board.device_lost),
    )
