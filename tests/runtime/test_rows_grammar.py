"""Rows under a grammar: forced runs, ends, bans, dead ends, and the replay after a preemption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kvalet.runtime.grammar import GrammarCache
from kvalet.runtime.plan import EndedBy, GrammarSpec, RowId, RowOpen, RowResult, SamplingParams, TokenLogprob
from kvalet.runtime.rows import RowState, TextContext
from kvalet.runtime.tokenizer import Tokenizer
from smollm import read_tokenizer

SIR = GrammarSpec("regex", "(yes|no), sir, at once")
DIGITS = GrammarSpec("regex", "[0-9]*")
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return read_tokenizer(model_path)


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> TextContext:
    return TextContext(tokenizer, tokenizer.vocab_size, tokenizer.end_ids, GrammarCache(tokenizer), forced_runs=True)


def open_row(text: TextContext, params: SamplingParams, accepted: Sequence[int] = ()) -> RowState:
    return RowState(RowOpen(RowId(1), (1, 2, *accepted), 2, 0, (), params), text)


def allowed(row: RowState) -> set[int]:
    bitmask = row.sampling().bitmask
    assert bitmask is not None
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, allow_special=False)


def test_a_forced_run_is_accepted_with_its_token(tokenizer: Tokenizer, text: TextContext) -> None:
    result = open_row(text, SamplingParams(grammar=SIR)).accept(ids_of(tokenizer, "yes")[0])
    assert list(result.ids) == ids_of(tokenizer, "yes, sir, at once")
    assert (result.text, result.ended_by) == ("yes, sir, at once", EndedBy.STOP)
    assert result.reusable_ids == len(result.ids)


def test_without_forced_runs_tokens_come_one_by_one(tokenizer: Tokenizer, text: TextContext) -> None:
    row = open_row(TextContext(text.vocabulary, text.vocab_size, text.end_ids, text.grammars), SamplingParams(grammar=SIR))
    results = [row.accept(token_id) for token_id in ids_of(tokenizer, "yes, sir, at once")]
    assert all(len(result.ids) == 1 for result in results)
    assert [result.ended_by for result in results[:-1]] == [None] * (len(results) - 1)
    assert results[-1].ended_by is EndedBy.STOP


def test_a_forced_run_stops_at_max_tokens(tokenizer: Tokenizer, text: TextContext) -> None:
    result = open_row(text, SamplingParams(grammar=SIR, max_tokens=3)).accept(ids_of(tokenizer, "no")[0])
    assert (result.text, result.ended_by, len(result.ids)) == ("no, sir", EndedBy.LENGTH, 3)


def test_a_forced_run_stops_at_a_stop_string(tokenizer: Tokenizer, text: TextContext) -> None:
    result = open_row(text, SamplingParams(grammar=SIR, stop=("sir",))).accept(ids_of(tokenizer, "no")[0])
    assert (result.text, result.ended_by) == ("no, ", EndedBy.STOP)
    assert tokenizer.decode(result.ids) == "no, sir"
    assert result.reusable_ids == 2, "the token ' sir' overlaps the match"


def test_logprobs_keep_a_row_from_forced_runs(tokenizer: Tokenizer, text: TextContext) -> None:
    row = open_row(text, SamplingParams(grammar=SIR, logprobs=0))
    result = row.accept(ids_of(tokenizer, "no")[0], TokenLogprob(5, -1.0))
    assert (len(result.ids), len(result.logprobs), result.ended_by) == (1, 1, None)


def test_a_complete_text_ends_at_the_last_allowed_token_with_stop(tokenizer: Tokenizer, text: TextContext) -> None:
    n = len(ids_of(tokenizer, "yes, sir, at once"))
    result = open_row(text, SamplingParams(grammar=SIR, max_tokens=n)).accept(ids_of(tokenizer, "yes")[0])
    assert result.ended_by is EndedBy.STOP


def test_a_token_that_is_not_allowed_is_an_error(tokenizer: Tokenizer, text: TextContext) -> None:
    row = open_row(text, SamplingParams(grammar=DIGITS))
    assert row.accept(ids_of(tokenizer, "7")[0]).text == "7"
    result = row.accept(ids_of(tokenizer, "x")[0])
    assert (result.text, result.ended_by, result.reusable_ids) == ("", EndedBy.GRAMMAR, 1)


def test_a_grammar_that_cannot_be_used_never_gives_free_text(tokenizer: Tokenizer, text: TextContext) -> None:
    without = TextContext(text.vocabulary, text.vocab_size, text.end_ids)
    for context, spec in ((text, GrammarSpec("regex", "(")), (without, DIGITS)):
        row = open_row(context, SamplingParams(grammar=spec), accepted=ids_of(tokenizer, "12"))
        assert row.ids == [1, 2, *ids_of(tokenizer, "12")]
        result = row.accept(ids_of(tokenizer, "x")[0])
        assert (result.ids, result.text, result.ended_by) == ((), "", EndedBy.GRAMMAR)


def test_end_of_turn_in_a_text_that_may_end(tokenizer: Tokenizer, text: TextContext) -> None:
    row = open_row(text, SamplingParams(grammar=DIGITS))
    row.accept(ids_of(tokenizer, "7")[0])
    assert allowed(row) >= text.end_ids
    result = row.accept(EOS)
    assert (result.ids, result.ended_by, result.reusable_ids) == ((EOS,), EndedBy.STOP, 1)


@pytest.mark.parametrize(
    "params", [SamplingParams(grammar=DIGITS, min_tokens=2), SamplingParams(grammar=DIGITS, ignore_eos=True)]
)
def test_ends_are_taken_out_of_the_mask_while_they_are_not_wanted(text: TextContext, params: SamplingParams) -> None:
    row = open_row(text, params)
    assert allowed(row)
    assert not allowed(row) & text.end_ids


@pytest.mark.parametrize("params", [{"min_tokens": 5}, {"ignore_eos": True}])
def test_a_text_that_can_only_end_may_end(text: TextContext, params: dict[str, int]) -> None:
    """The empty text is all there is: an early end is better than a dead end."""
    row = open_row(text, SamplingParams(grammar=GrammarSpec("regex", ""), **params))  # type: ignore[arg-type]
    assert allowed(row) == text.end_ids
    assert row.accept(EOS).ended_by is EndedBy.STOP


def test_the_mask_s_words_are_not_changed_by_bans(text: TextContext) -> None:
    """Bit 31 of a word is the sign of an int32: banning id 31 (and allowing it) must not disturb the others."""
    spec = GrammarSpec("regex", ".*")
    free = allowed(open_row(text, SamplingParams(grammar=spec)))
    for banned in (31, 63, 32):
        assert banned in free
        row = open_row(text, SamplingParams(grammar=spec, stop_token_ids=(banned,), min_tokens=1))
        assert allowed(row) == free - {banned} - text.end_ids


@pytest.mark.parametrize("forced_runs", [False, True], ids=["alone", "forced"])
def test_a_row_rebuilt_between_any_two_results_goes_on_the_same(
    tokenizer: Tokenizer, text: TextContext, forced_runs: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"const": "get_weather"}, "city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
        "required": ["name", "city", "unit"],
        "additionalProperties": False,
    }
    context = TextContext(text.vocabulary, text.vocab_size, text.end_ids, text.grammars, forced_runs)
    params = SamplingParams(grammar=GrammarSpec("json_schema", json.dumps(schema)), stop=("日本!",))
    answer = '{"name": "get_weather", "city": "日本 😀", "unit": "C"}'

    def go_on(row: RowState, done: int) -> list[RowResult]:
        """Sample what is left of ``answer``: the first of its tokens that the row does not have yet."""
        ids = ids_of(tokenizer, answer)
        results = []
        while row.ended is None:
            assert row.ids[2:] == ids[: row.n_accepted], "forced tokens must be the answer's own"
            assert ids[row.n_accepted] in allowed(row)
            results.append(row.accept(ids[row.n_accepted]))
        return results[done:]

    whole = go_on(open_row(context, params), 0)
    assert "".join(result.text for result in whole) == answer
    assert whole[-1].ended_by is EndedBy.STOP
    assert any(len(result.ids) > 1 for result in whole) == forced_runs
    accepted: list[int] = []
    for n, result in enumerate(whole):
        assert go_on(open_row(context, params, accepted), 0) == whole[n:]
        accepted += result.ids
