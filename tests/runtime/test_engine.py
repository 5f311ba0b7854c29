"""The step engine on a small model: mixed steps, lag 1, ends, grown pages, poisoned pages, plans that contradict it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel, StepEngine
from kvalet.runtime.errors import EngineError, ModelError
from kvalet.runtime.plan import EndedBy, Row, RowId, RowOpen, SamplingParams, StepPlan
from stepping import GREEDY, Stepper, alone, tiny_model

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 99, n).tolist() for n in (1, 15, 16, 17, 33, 70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, LoadedModel]:
    return tiny_model(tmp_path_factory.mktemp("model"))


def engine_of(model: tuple[EngineConfig, LoadedModel], **changes: object) -> StepEngine:
    return StepEngine(dataclasses.replace(model[0], **changes), model[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("arena_tokens", [0, 1024, 32_768])
def test_batched_and_mixed_equals_alone(model: tuple[EngineConfig, LoadedModel], arena_tokens: int) -> None:
    """Rows join one per step, in pieces, while others decode; in fp32 each must say what it says alone."""
    engine = engine_of(model, arena_tokens=arena_tokens)
    expected = [alone(engine, ids, 12) for ids in PROMPTS]
    stepper = Stepper(engine)
    rows = [stepper.turn(ids) for ids in PROMPTS]
    for step in range(60):
        parts = []
        for row in rows[: step + 1]:
            if len(row.accepted) < 12:
                parts.append((row, min(7, row.n_prompt - row.kv_len) if row.kv_len < row.n_prompt else 1))
        if parts:
            stepper.step(*parts)
        engine.forward.arena.check()
    assert [row.accepted for row in rows] == expected


@pytest.mark.parametrize("piece", [1, 5, 16, 32, 69])
def test_chunked_prefill_equals_whole(model: tuple[EngineConfig, LoadedModel], piece: int) -> None:
    engine = engine_of(model)
    assert alone(engine, PROMPTS[-1], 8, piece) == alone(engine, PROMPTS[-1], 8)


def test_a_row_that_ended_is_left_out_of_the_next_step(model: tuple[EngineConfig, LoadedModel]) -> None:
    """Lag 1: step n + 1 was planned before the scheduler saw that the row ended in step n; its neighbour goes on."""
    engine = engine_of(model)
    stepper = Stepper(engine)
    short = stepper.turn(PROMPTS[1], dataclasses.replace(GREEDY, max_tokens=1))
    other = stepper.turn(PROMPTS[2])
    first = stepper.step((short, 15), (other, 16))
    assert [r.ended_by for r in first] == [EndedBy.LENGTH, None]
    before = stepper.digest(short, 15)
    plan = StepPlan(99, (Row(short.row, 15, 1, True, True, (short.pages[0],)), Row(other.row, 16, 1, True, True, (150,))))
    result = engine.finish(engine.launch(plan))
    assert result.step == 99
    assert [r.row for r in result.rows] == [other.row]
    assert result.rows[0].kv_len == 17
    assert stepper.digest(short, 15) == before
    assert engine.finish(engine.launch(StepPlan(100, (), closes=(short.row, other.row)))).rows == ()
    assert engine.rows == {}


def test_unsampled_pieces_report_progress_only(model: tuple[EngineConfig, LoadedModel]) -> None:
    stepper = Stepper(engine_of(model))
    row = stepper.turn(PROMPTS[-1])
    (result,) = stepper.step((row, 20))
    assert (result.kv_len, result.ids, result.text, result.ended_by) == (20, (), "", None)
    (result,) = stepper.step((row, 50))
    assert (result.kv_len, len(result.ids)) == (70, 1)


def test_stop_ids_end_a_turn(model: tuple[EngineConfig, LoadedModel]) -> None:
    engine = engine_of(model)
    first, second = alone(engine, PROMPTS[3], 2)
    stepper = Stepper(engine)
    stop = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, stop_token_ids=(second,))
    row = stepper.prefill(stepper.turn(PROMPTS[3], stop))
    if first != second:
        (result,) = stepper.step((row, 1))
        assert result.ids == (second,)
    assert row.ended


def test_a_reopened_row_goes_on_as_if_never_closed(model: tuple[EngineConfig, LoadedModel]) -> None:
    """Preemption: closed, its KV moved to other pages, opened under a new id with a few tokens fed again."""
    engine = engine_of(model)
    expected = alone(engine, PROMPTS[4], 20)
    stepper = Stepper(engine)
    row = stepper.prefill(stepper.turn(PROMPTS[4]))
    stepper.decode([row], 9)
    stepper.close(row, keep_pages=True)
    again = stepper.turn(row.ids, kv=row, kv_len=row.kv_len)
    again.n_prompt = len(PROMPTS[4])
    stepper.move(again)
    stepper.decode([again], 10)
    assert row.accepted + again.accepted == expected


def test_page_copies_come_before_the_step_writes(model: tuple[EngineConfig, LoadedModel]) -> None:
    """Two turns from one unaligned position: the partial page is copied, and neither sees the other's tokens."""
    engine = engine_of(model)
    prefix = PROMPTS[4][:25]
    tails = [[5, 6, 7], [80, 81, 82, 83]]
    expected = [alone(engine, prefix + tail, 5) for tail in tails]
    stepper = Stepper(engine)
    base = stepper.turn([*prefix, 9])
    stepper.step((base, 25))
    first_page, partial = base.pages
    rows = [
        RowOpen(RowId(50 + i), (*prefix, *tail), 25 + len(tail), 25, (first_page, 120 + i, 130 + i), GREEDY)
        for i, tail in enumerate(tails)
    ]
    steps = [Row(RowId(50 + i), 25, len(tail), False, True) for i, tail in enumerate(tails)]
    result = engine.launch(StepPlan(7, tuple(steps), tuple(rows), page_copies=((partial, 120), (partial, 121))))
    answers = [list(r.ids) for r in result.rows]
    for step in range(4):
        result = engine.launch(StepPlan(8 + step, tuple(Row(r.row, r.kv_len, 1, True, True) for r in result.rows)))
        for answer, r in zip(answers, result.rows, strict=True):
            answer += r.ids
    assert answers == expected


def test_a_wholly_cached_prompt_feeds_its_last_token(model: tuple[EngineConfig, LoadedModel]) -> None:
    """P25 at the engine: lengths around page borders, all KV there but the last token's."""
    engine = engine_of(model)
    for n in (15, 16, 17, 32, 128):
        ids = np.random.default_rng(n).integers(3, 99, n).tolist()
        expected = alone(engine, ids, 4)
        stepper = Stepper(engine)
        row = stepper.prefill(stepper.turn(ids))
        stepper.close(row, keep_pages=True)
        again = stepper.turn(ids, kv=row, kv_len=n - 1)
        stepper.step((again, 1), decode=False)
        stepper.decode([again], 3)
        assert again.accepted == expected, n


def test_plans_that_contradict_the_engine_are_defects(model: tuple[EngineConfig, LoadedModel]) -> None:
    engine = engine_of(model, max_step_tokens=32)
    opened = RowOpen(RowId(1), (5, 6, 7), 3, 0, (1,), GREEDY)
    for rows, opens, words in (
        ((Row(RowId(9), 0, 1, False, False),), (), "never opened"),
        ((), (opened, opened), "opened twice"),
        ((Row(RowId(1), 2, 1, False, True),), (), "kv_len is 0"),
        ((Row(RowId(1), 0, 4, False, True),), (), "of 3 ids"),
        ((Row(RowId(1), 0, 3, False, False),), (), "sample=False"),
        ((Row(RowId(2), 0, 17, False, True),), (RowOpen(RowId(2), (5,) * 17, 17, 0, (1,), GREEDY),), "do not cover"),
        (
            (Row(RowId(3), 0, 33, False, True),),
            (RowOpen(RowId(3), (5,) * 33, 33, 0, (1, 2, 3), GREEDY),),
            "33 tokens in one step",
        ),
    ):
        with pytest.raises(EngineError, match=words):
            engine.launch(StepPlan(0, rows, opens))


def test_forced_runs_are_fed_as_one_row(model: tuple[EngineConfig, LoadedModel]) -> None:
    """A decode row of several tokens (what a grammar forces) leaves the KV that single steps leave, and the copy goes on."""
    engine = engine_of(model)
    ids = PROMPTS[4]
    stepper = Stepper(engine)
    slow = stepper.prefill(stepper.turn(ids[:28]))
    del slow.ids[28:]
    slow.ids += ids[28:]
    engine.rows[slow.row].ids[28:] = ids[28:]
    stepper.step((slow, 1))
    stepper.step((slow, len(slow.ids) - slow.kv_len), decode=True)
    stepper.decode([slow], 6)
    assert slow.accepted[1:] == alone(engine, ids, 7)


def test_a_wrong_model_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model file at"):
        StepEngine(EngineConfig(tmp_path / "none.gguf", n_pages=4))


@pytest.mark.parametrize(
    "changes",
    [{"weights": "int3"}, {"n_pages": 1}, {"threads": -1}, {"decode_rows": 0}, {"deterministic": True, "forced_runs": True}],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        EngineConfig(Path("x"), **{"n_pages": 4, **changes})  # type: ignore[arg-type]
