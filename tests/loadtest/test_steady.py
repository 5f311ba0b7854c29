"""Steady throughput: only while all sessions decode, tokens as the server counts them."""

from __future__ import annotations

import pytest
from kvalet.loadtest.outcome import Outcome
from kvalet.loadtest.steady import Batch, measure, medians, steady_window, tokens_between


def session(first: float, gap: float, chunks: int, tokens: int, sent: float = 0.0) -> Outcome:
    times = tuple(first + gap * k for k in range(chunks))
    return Outcome(sent, sent, times[-1], 200, "", times, finish_reasons=("length",), output_tokens=tokens)


def test_two_sessions_in_step() -> None:
    """Each gives a token every 100 ms from 1 s on: 20 tokens a second."""
    batch = measure([session(1.0, 0.1, 64, 64), session(1.0, 0.1, 64, 64)])
    assert batch.steady == pytest.approx(20.0)
    assert batch.gap_ms == pytest.approx(100.0)
    assert batch.ttft_ms == pytest.approx(1000.0)
    assert batch.end_to_end == pytest.approx(128 / 7.3)
    assert batch.window_s == pytest.approx(6.3)


def test_only_the_time_in_which_all_decode_counts() -> None:
    """The first session runs alone for 5 s; that says nothing about two."""
    outcomes = [session(1.0, 0.05, 101, 101), session(5.0, 0.1, 64, 64)]
    assert steady_window(outcomes) == (5.0, 6.0)
    assert measure(outcomes).steady == pytest.approx(30.0)


def test_sessions_that_never_met_have_no_steady_rate() -> None:
    batch = measure([session(1.0, 0.1, 5, 5), session(9.0, 0.1, 5, 5)])
    assert (batch.steady, batch.window_s) == (0.0, 0.0)


def test_chunks_of_several_tokens_are_spread() -> None:
    outcome = session(0.0, 1.0, 10, 40)
    assert tokens_between(outcome, 0.0, 9.0) == 36
    assert tokens_between(outcome, 0.5, 2.0) == 8


@pytest.mark.parametrize(
    "bad",
    [
        Outcome(0.0, 0.0, 1.0, 200, "device lost", (0.1, 0.2), output_tokens=2),
        Outcome(0.0, 0.0, 1.0, 200, "", (0.1, 0.2)),
        Outcome(0.0, 0.0, 1.0, 200, "", (0.1,), output_tokens=9),
    ],
)
def test_what_cannot_be_measured_is_refused(bad: Outcome) -> None:
    with pytest.raises(ValueError, match=r"device lost|without tokens"):
        measure([session(0.0, 0.1, 5, 5), bad])


def test_medians_are_field_by_field() -> None:
    assert medians([Batch(1, 9, 3, 4, 5), Batch(2, 8, 3, 4, 5), Batch(3, 7, 3, 4, 5)]) == Batch(2, 8, 3, 4, 5)
