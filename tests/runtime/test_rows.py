"""Rows: ends, held text, reusable ids, and the replay after a preemption (cases P13, P14, P16)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kvalet.runtime.plan import EndedBy, PageId, RowId, RowOpen, RowResult, SamplingParams, TokenLogprob
from kvalet.runtime.rows import RowState, TextContext
from kvalet.runtime.sampler import NO_TOKEN

EOS, EOT, CONTROL_ID = 256, 257, 258
VOCAB = 272
PROMPT = (1, 2, 3)
WORDS = {260: b"The", 261: b" qu", 262: b"ick", 263: b" br", 264: b"own", 265: b" fox", 266: "日".encode(), 267: b"k b"}


class Vocabulary:
    """Ids below 256 are bytes, some words, two ends of turn and a control token."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else WORDS.get(token_id, b"")


def context(**changes: object) -> TextContext:
    return TextContext(Vocabulary(), VOCAB, frozenset({EOS, EOT}), **changes)  # type: ignore[arg-type]


def open_row(params: SamplingParams, accepted: Sequence[int] = (), **changes: object) -> RowState:
    opened = RowOpen(RowId(7), (*PROMPT, *accepted), len(PROMPT), 0, (PageId(4), PageId(9)), params)
    return RowState(opened, context(**changes))


def run(row: RowState, ids: Sequence[int]) -> list[RowResult]:
    results = []
    for token_id in ids:
        if row.ended is not None:
            break
        results.append(row.accept(token_id))
    return results


def text_of(results: Sequence[RowResult]) -> str:
    return "".join(result.text for result in results)


def test_attributes_of_an_open_row() -> None:
    row = open_row(SamplingParams(), accepted=(260, 261))
    assert (row.row, row.ids, row.n_prompt, row.n_accepted) == (7, [*PROMPT, 260, 261], 3, 2)
    assert (row.kv_len, row.pages, row.ended) == (0, [4, 9], None)
    row.kv_len = 2
    assert row.progress() == RowResult(RowId(7), 2)
    assert row.accept(262) == RowResult(RowId(7), 2, ids=(262,), text="ick")


@pytest.mark.parametrize("end", [EOS, EOT])
def test_an_end_of_turn_id_ends_the_row(end: int) -> None:
    last = run(open_row(SamplingParams()), [260, end, 261])[-1]
    assert (last.ids, last.text, last.ended_by, last.reusable_ids) == ((end,), "", EndedBy.STOP, 1)


def test_a_stop_id_is_accepted_and_its_text_is_not_sent() -> None:
    results = run(open_row(SamplingParams(stop_token_ids=(264,))), [260, 263, 264])
    assert text_of(results) == "The br"
    assert (results[-1].ids, results[-1].ended_by, results[-1].reusable_ids) == ((264,), EndedBy.STOP, 2)


def test_ignore_eos_keeps_stop_ids() -> None:
    row = open_row(SamplingParams(ignore_eos=True, stop_token_ids=(264,)))
    results = run(row, [260, EOS, EOT, 261, 264])
    assert [result.ended_by for result in results] == [None, None, None, None, EndedBy.STOP]
    assert text_of(results) == "The qu"


@pytest.mark.parametrize("n", [1, 2, 5])
def test_max_tokens_counts_accepted_tokens(n: int) -> None:
    results = run(open_row(SamplingParams(max_tokens=n)), [260, 261, 262, 263, 264, 265])
    assert len(results) == n
    assert (results[-1].ended_by, results[-1].reusable_ids) == (EndedBy.LENGTH, n)


def test_an_end_of_turn_as_last_allowed_token_is_a_stop() -> None:
    assert run(open_row(SamplingParams(max_tokens=2)), [260, EOS])[-1].ended_by is EndedBy.STOP


def test_min_tokens_bans_and_ignores_early_ends() -> None:
    row = open_row(SamplingParams(min_tokens=2, stop_token_ids=(264,)))
    assert set(row.sampling().banned) == {EOS, EOT, 264}
    row.accept(260)
    assert set(row.sampling().banned) == {EOS, EOT, 264}
    assert row.accept(EOS).ended_by is None, "an end that comes all the same is ignored"
    assert row.sampling().banned == ()
    assert row.accept(264).ended_by is EndedBy.STOP


def test_min_tokens_with_ignore_eos_bans_stop_ids_only() -> None:
    row = open_row(SamplingParams(min_tokens=1, ignore_eos=True, stop_token_ids=(264, VOCAB + 5, -3)))
    assert row.sampling().banned == (264,)


def test_text_of_the_first_min_tokens_is_not_searched() -> None:
    results = run(open_row(SamplingParams(min_tokens=2, stop=("qu", "ick"))), [260, 261, 262])
    assert (text_of(results), results[-1].ended_by, results[-1].reusable_ids) == ("The qu", EndedBy.STOP, 2)


def test_held_text_is_released_at_the_end() -> None:
    """ "own" may begin "own fox": it is held, and comes with the end, whichever end that is."""
    for last, why in ((EOS, EndedBy.STOP), (263, EndedBy.LENGTH)):
        results = run(open_row(SamplingParams(stop=("own fox",), max_tokens=3)), [260, 264, last])
        assert [result.text for result in results[:2]] == ["The", ""]
        assert results[-1].text == ("own" if last == EOS else "own br")
        assert results[-1].ended_by is why


def test_a_cut_off_character_is_marked_once_at_the_end() -> None:
    half = list("日".encode())[:2]
    results = run(open_row(SamplingParams(max_tokens=3)), [260, *half])
    assert [result.text for result in results] == ["The", "", "\ufffd"]
    results = run(open_row(SamplingParams()), [260, *half, EOS])
    assert [result.text for result in results] == ["The", "", "", "\ufffd"]
    results = run(open_row(SamplingParams(max_tokens=4)), [260, *"日".encode()])
    assert text_of(results) == "The日"


def plain_reusable(ids: Sequence[int], start: int) -> int:
    """Tokens before the first one with a byte at or after the byte position ``start``."""
    position = 0
    for n, token_id in enumerate(ids):
        position += len(Vocabulary().token_bytes(token_id))
        if position > start:
            return n
    return len(ids)


@pytest.mark.parametrize(
    ("ids", "stop"),
    [
        ([260, 261, 262, 263, 264, 265], "own fox"),
        ([260, 261, 262, 263, 264, 265], "The"),
        ([260, 261, 262, 263, 264, 265], "k b"),
        ([260, 267, 265], "b f"),
        ([260, CONTROL_ID, 261, CONTROL_ID, 262], "qu"),
        ([260, CONTROL_ID, 261], " "),
        ([260, *"é日".encode(), 265], "日"),
        ([*"日本".encode(), 260], "本The"),
        ([260, 266, 266, 265], "日 "),
    ],
)
def test_reusable_ids_end_before_the_first_token_of_the_match(ids: list[int], stop: str) -> None:
    whole = b"".join(map(Vocabulary().token_bytes, ids)).decode()
    results = run(open_row(SamplingParams(stop=(stop,))), ids)
    assert text_of(results) == whole[: whole.index(stop)]
    assert results[-1].ended_by is EndedBy.STOP
    assert results[-1].reusable_ids == plain_reusable(ids, len(whole[: whole.index(stop)].encode()))


def test_logprobs_are_one_per_accepted_id() -> None:
    row = open_row(SamplingParams(logprobs=0))
    assert row.accept(260, TokenLogprob(260, -0.5)).logprobs == (TokenLogprob(260, -0.5),)
    assert row.accept(EOS, TokenLogprob(EOS, -1.5)).logprobs == (TokenLogprob(EOS, -1.5),)


def test_no_token_is_a_dead_end() -> None:
    result = run(open_row(SamplingParams(stop=("The end",))), [260, NO_TOKEN])[-1]
    assert (result.ids, result.text, result.ended_by, result.reusable_ids) == ((), "The", EndedBy.GRAMMAR, 1)


def test_a_row_that_ended_while_replayed_reports_it() -> None:
    row = open_row(SamplingParams(max_tokens=2), accepted=(260, 261, 262))
    assert row.ids == [*PROMPT, 260, 261, 262]
    result = row.accept(263)
    assert (result.ids, result.text, result.ended_by, result.reusable_ids) == ((), "", EndedBy.LENGTH, 2)


def test_unseeded_rows_draw_different_seeds() -> None:
    assert len({open_row(SamplingParams()).sampling().seed for _ in range(5)}) == 5
    assert open_row(SamplingParams(), draw_seed=lambda: 3).sampling().seed == 3
    assert open_row(SamplingParams(seed=0), draw_seed=lambda: 3).sampling().seed == 0


PARAMS = [
    SamplingParams(max_tokens=30),
    SamplingParams(stop=("own fox", "日k", "The qu"), max_tokens=30),
    SamplingParams(stop=("k b",), min_tokens=6, max_tokens=9),
    SamplingParams(stop_token_ids=(266,), ignore_eos=True, stop=("foxx",), max_tokens=25),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((260, 1.0),), seed=5),
]


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_a_row_rebuilt_at_any_cut_goes_on_the_same(params: SamplingParams) -> None:
    """Same remaining deltas, same ends, same sampler: bans, position, and what penalties do to a row of logits."""
    seed = 77
    rng = random.Random(seed)
    alphabet = [*WORDS, *WORDS, *"日é".encode(), CONTROL_ID, EOS]
    for case in range(40):
        ids = [rng.choice(alphabet) for _ in range(24)]
        whole = run(open_row(params), ids)
        for cut in range(len(whole)):
            rebuilt = open_row(params, accepted=ids[:cut])
            straight = open_row(params)
            run(straight, ids[:cut])
            one, other = straight.sampling(), rebuilt.sampling()
            assert (one.banned, one.position) == (other.banned, other.position)
            edited = [torch.linspace(-3, 3, VOCAB) for _ in range(2)]
            one.edit(edited[0])
            other.edit(edited[1])
            assert torch.equal(edited[0], edited[1])
            assert run(rebuilt, ids[cut:]) == whole[cut:], (seed, case, cut, ids)


def test_penalties_count_output_and_repetition_counts_the_prompt() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0)
    row = open_row(params, accepted=(260, 260))
    logits = torch.zeros(VOCAB)
    logits[1], logits[2] = 4.0, -4.0
    row.sampling().edit(logits)
    assert np.isclose(float(logits[260]), -2.0)
    assert (float(logits[1]), float(logits[2]), float(logits[5])) == (2.0, -8.0, 0.0)
