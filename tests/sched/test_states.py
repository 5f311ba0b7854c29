"""The lifecycle tables: complete, drawn as they are, and illegal pairs raise."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvalet.runtime.plan import SamplingParams
from kvalet.sched.board import Board
from kvalet.sched.session import Session, Turn
from kvalet.sched.states import (
    TRANSFER_TABLE,
    TURN_TABLE,
    IllegalTransition,
    TransferCause,
    TransferState,
    TurnCause,
    TurnState,
    next_transfer_state,
    next_turn_state,
    render_lifecycle,
)
from kvalet.sched.story import STORY_LINES, CoreDefect, Story
from kvalet.sched.turns import TurnId, TurnSpec
from schedworld import SECRET, NoDisk, config

DOCS = Path(__file__).parents[2] / "docs" / "lifecycle.md"


def test_the_page_in_docs_is_drawn_from_the_tables() -> None:
    assert DOCS.read_text() == render_lifecycle(), "run: python -m kvalet.sched.states > docs/lifecycle.md"


def test_every_state_has_a_row_and_can_be_reached() -> None:
    for table, states, first in (
        (TURN_TABLE, TurnState, TurnState.QUEUED),
        (TRANSFER_TABLE, TransferState, TransferState.RESERVED),
    ):
        assert set(table) == set(states)
        reached = {first}
        for _ in states:
            reached |= {to for state in reached for to in table[state].values()}  # type: ignore[index]
        assert reached == set(states)


def test_every_cause_is_used() -> None:
    assert {cause for row in TURN_TABLE.values() for cause in row} == set(TurnCause)
    assert {cause for row in TRANSFER_TABLE.values() for cause in row} == set(TransferCause)


def test_every_live_turn_state_can_end() -> None:
    """A client may go at every stage."""
    for state in TurnState:
        if state is not TurnState.ENDED:
            assert next_turn_state(state, TurnCause.END) is TurnState.ENDED


@pytest.mark.parametrize("cause", TurnCause)
def test_an_ended_turn_takes_nothing(cause: TurnCause) -> None:
    with pytest.raises(IllegalTransition):
        next_turn_state(TurnState.ENDED, cause)


@pytest.mark.parametrize("cause", TransferCause)
@pytest.mark.parametrize("state", [TransferState.DONE, TransferState.FAILED])
def test_a_transfer_that_is_over_takes_nothing(state: TransferState, cause: TransferCause) -> None:
    with pytest.raises(IllegalTransition):
        next_transfer_state(state, cause)


def test_an_illegal_pair_raises_with_the_story() -> None:
    board = Board(config(), NoDisk())
    board.story.add("event", "the last thing that happened")
    spec = TurnSpec(TurnId(1), (1, 2), SamplingParams(), SECRET)
    turn = Turn(spec, Session("", ""), spec.params, 0.0, [1, 2])
    with pytest.raises(CoreDefect, match="the last thing that happened"):
        board.move(turn, TurnCause.SAMPLED)


def test_the_story_is_bounded_and_tells_the_latest() -> None:
    story = Story()
    for i in range(STORY_LINES + 50):
        story.add("event", f"number {i}")
    lines = story.tell().splitlines()
    assert len(lines) == STORY_LINES
    assert lines[0].endswith("number 50")
    story.add("event", "x" * 10_000)
    assert len(story.tell().splitlines()[-1]) < 500
