"""How the demo compares answers, the plain model that judges, and that both can say no."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kvalet.api.demo_check import Forced, PlainModel, check, compare, first_difference, same_work
from kvalet.loadtest.outcome import Outcome
from kvalet.loadtest.runner import Turn
from numpy.typing import NDArray

ORACLE = Path(__file__).parent.parent / "oracles" / "smollm2_reference.json"


def turn(
    number: int = 0, ids: tuple[int, ...] = (1, 2), prompt: tuple[int, ...] = (9,), fault: str = "", **record: int
) -> Turn:
    outcome = Outcome(0.0, 0.0, 1.0, 200, fault, (0.1,), token_ids=ids, prompt_ids=prompt, record=record)
    return Turn("a", number, outcome, fault)


class ScriptedJudge:
    """Says what it was told to say, and remembers what it was asked."""

    def __init__(self, *results: Forced) -> None:
        self._results = list(results)
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = []

    def force(self, prompt: Sequence[int], answer: Sequence[int], must_call: bool) -> Forced:
        self.asked.append((tuple(prompt), tuple(answer), must_call))
        return self._results.pop(0)


def test_equal_work_is_compared_token_for_token() -> None:
    judge = ScriptedJudge()
    result = check([turn(), turn(1)], [turn(), turn(1)], 1, judge)
    assert (result.token_for_token, result.teacher_forced, result.equal) == (2, 0, True)
    assert judge.asked == []


def test_other_tokens_after_equal_work_are_a_difference() -> None:
    result = check([turn(ids=(1, 3))], [turn()], 1, ScriptedJudge())
    assert not result.equal
    assert "differs from token 1" in result.differences[0]


@pytest.mark.parametrize(
    "changed",
    [turn(computed_tokens=5), turn(prompt=(8,), computed_tokens=1), turn(computed_tokens=1, recomputed_tokens=1)],
)
def test_more_work_is_no_equal_work(changed: Turn) -> None:
    reference = turn(computed_tokens=4)
    assert same_work(turn(computed_tokens=4), reference)
    assert same_work(turn(computed_tokens=3), reference)
    assert not same_work(changed, reference)


def test_what_was_computed_again_goes_to_the_judge() -> None:
    judge = ScriptedJudge(Forced(10, 10, 0.0), Forced(6, 5, 0.7))
    turns = [turn(0, ids=(4,), prompt=(5, 6), computed_tokens=9), turn(1, ids=(7,), prompt=(5,), computed_tokens=9)]
    result = check(turns, [turn(0), turn(1)], 1, judge)
    assert judge.asked == [((5, 6), (4,), True), ((5,), (7,), False)]
    assert (result.teacher_forced, result.forced_tokens, result.forced_agree, result.forced_margin) == (2, 16, 15, 0.7)
    assert result.equal


@pytest.mark.parametrize(
    ("forced", "word"), [(Forced(100, 93, 0.1), "first choice"), (Forced(100, 99, 0.76), "below the largest")]
)
def test_the_judge_can_say_no(forced: Forced, word: str) -> None:
    result = check([turn(computed_tokens=9)], [turn()], 1, ScriptedJudge(forced))
    assert not result.equal
    assert word in result.differences[0]


def test_faults_and_missing_turns_are_differences() -> None:
    result = check([turn(fault="status 500"), turn(3)], [turn()], 1, ScriptedJudge())
    assert [word in text for word, text in zip(("status 500", "nothing to compare"), result.differences, strict=True)] == [
        True,
        True,
    ]


class ListMatcher:
    """Allows, position by position, the ids that it was given (the surface of ``runtime.grammar.Matcher``)."""

    def __init__(self, *allowed: set[int]) -> None:
        self._allowed = list(allowed)

    def bitmask(self) -> NDArray[np.int32]:
        word = sum(1 << bit for bit in self._allowed[0])
        return np.array([word], dtype=np.uint32).view(np.int32)

    def consume(self, token_id: int) -> bool:
        return token_id in self._allowed.pop(0)


def test_margins_are_against_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.5], [3.0, 0.0, 0.0]])
    assert compare(logits, (1, 0), None) == Forced(2, 2, 0.0)
    assert compare(logits, (2, 0), None) == Forced(2, 1, 0.5)


def test_margins_are_against_what_the_grammar_allows() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.5], [3.0, 0.0, 0.0]])
    masked = compare(logits, (2, 0), ListMatcher({0, 2}, {0, 1}))  # type: ignore[arg-type]
    assert masked == Forced(2, 2, 0.0)
    forbidden = compare(logits, (1, 0), ListMatcher({0, 2}, {0}))  # type: ignore[arg-type]
    assert math.isinf(forbidden.margin)


def test_first_difference() -> None:
    assert "token 2 on (3 and 2 tokens)" in first_difference((1, 2, 3), (1, 2))


@pytest.fixture(scope="module")
def plain_model(model_path: Path) -> PlainModel:
    return PlainModel(model_path)


def test_the_plain_model_finds_the_reference_answers_likely(plain_model: PlainModel) -> None:
    """bf16 against the float32 reference: the tolerance that the demo uses holds on known answers."""
    results = [
        plain_model.force(case["prompt_ids"], case["greedy_ids_64_ignoring_eos"], False)
        for case in json.loads(ORACLE.read_text())["cases"]
    ]
    assert sum(result.agree for result in results) >= 300
    assert max(result.margin for result in results) <= 0.75


def test_the_plain_model_finds_a_wrong_history_unlikely(plain_model: PlainModel) -> None:
    """A mutant: sixteen tokens of the prompt are not those that the answer was made from, as if a page had been swapped."""
    case = json.loads(ORACLE.read_text())["cases"][1]
    prompt = list(case["prompt_ids"])
    place = len(prompt) // 2
    prompt[place : place + 16] = prompt[:16]
    right = plain_model.force(case["prompt_ids"], case["greedy_ids_64_ignoring_eos"], False)
    wrong = plain_model.force(prompt, case["greedy_ids_64_ignoring_eos"], False)
    assert wrong.margin > 0.75 >= right.margin
    assert wrong.agree < right.agree
