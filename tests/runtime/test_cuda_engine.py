"""The device engine's logic without a device: the whole engine on plain torch against the CPU engine, which shares no
arithmetic with it but the products."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from devicekit import SMALL, Driver, Session, cpu_engine, device_engine
from kvalet.runtime.cuda_step import buckets_for
from kvalet.runtime.errors import EngineError
from kvalet.runtime.plan import EndedBy, PageId, Row, RowId, RowOpen, SamplingParams, StepPlan
from kvalet.runtime.rope_spec import RopeSpec, yarn_attention_factor
from kvalet.runtime.spec import ModelSpec


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products on several threads cost more than they save, on a busy machine a thousandfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
SPECS: dict[str, ModelSpec] = {
    "llama": SMALL,
    "own head, biases": replace(SMALL, tied=False, qkv_bias=True, out_bias=True, mlp_bias=True),
    "tied": replace(SMALL, tied=True, qkv_bias=True),
    "qk norm": replace(SMALL, qk_norm=True, head_dim=24),
    "group of 3": replace(SMALL, n_q_heads=6, n_kv_heads=2),
    "group of 7": replace(SMALL, n_q_heads=7, n_kv_heads=1),
    "no groups": replace(SMALL, n_q_heads=3, n_kv_heads=3),
    "windows": replace(SMALL, window=20, window_layers=frozenset((0, 2))),
    "window everywhere": replace(SMALL, window=17, window_layers=frozenset((0, 1, 2))),
    "layers without rotation": replace(SMALL, nope_layers=frozenset((1,))),
    "yarn without rotation": replace(
        SMALL, nope_layers=frozenset((2,)),
        rope=RopeSpec(10_000.0, "yarn", 4.0, 128, attention_factor=yarn_attention_factor(4.0)),
    ),
    "llama3 rope": replace(SMALL, rope=RopeSpec(10_000.0, "llama3", 8.0, 128)),
}  # fmt: skip


def sessions(spec: ModelSpec, seed: int, params: list[SamplingParams] | None = None) -> list[Session]:
    rng = random.Random(seed)
    lengths = [1, 15, 16, 17, 33, 90, 128, 41]
    chosen = params or [GREEDY]
    return [
        Session(rng.choices(range(spec.vocab), k=length), n, replace(chosen[i % len(chosen)], max_tokens=n))
        for i, (length, n) in enumerate(zip(lengths, (12, 1, 30, 9, 25, 7, 40, 2), strict=True))
    ]


@pytest.mark.parametrize("name", SPECS)
def test_every_family_like_the_cpu_engine(name: str) -> None:
    """Ids, and every token's log-probability to 1e-3: prefill in pieces, decode over page edges, rows that come and go."""
    spec = SPECS[name]
    with_logprobs = replace(GREEDY, logprobs=0)
    mine, theirs = sessions(spec, 1, [with_logprobs, GREEDY]), sessions(spec, 1, [with_logprobs, GREEDY])
    Driver(device_engine(spec)).run(mine)
    Driver(cpu_engine(spec), lag=0).run(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one.ids == other.ids
        assert len(one.ids) == one.n
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


MIXED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.8, seed=2, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=7, min_p=0.02, seed=3, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=((5, 50.0), (6, 51.0))),
    SamplingParams(temperature=1.0, top_k=3, seed=6, ignore_eos=True),
    SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True),
]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("at_once", [1, 5, 8])
def test_all_kinds_of_sampling_in_one_batch(lag: int, at_once: int) -> None:
    """Whatever shares the batch and however far the host is behind, the tokens are the CPU engine's."""
    mine, theirs = sessions(SMALL, 2, MIXED), sessions(SMALL, 2, MIXED)
    Driver(device_engine(SMALL), lag=lag, seed=at_once).run(mine, at_once)
    Driver(cpu_engine(SMALL), lag=0).run(theirs, 1)
    assert [s.ids for s in mine] == [s.ids for s in theirs]


@pytest.mark.parametrize("options", [{}, {"deterministic": True, "decode_rows": 3}], ids=["usual", "deterministic"])
def test_steps_of_more_rows_than_a_graph(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then graphs are replayed one after the other; drawn rows in each. Deterministic: a piece is a call of its own."""
    from kvalet.runtime import cuda_engine

    monkeypatch.setattr(cuda_engine, "buckets_for", lambda max_rows: (1, 2))
    mine, theirs = sessions(SMALL, 3, MIXED), sessions(SMALL, 3, MIXED)
    engine = device_engine(SMALL, **options)
    Driver(engine, seed=3).run(mine, 8)
    Driver(cpu_engine(SMALL), lag=0).run(theirs, 1)
    assert [s.ids for s in mine] == [s.ids for s in theirs]
    assert sorted(engine.forwards._graphs) == ([3] if options else [1, 2])


def test_warming_up_touches_the_scratch_page_only() -> None:
    engine = device_engine(SMALL)
    before = engine.pool.bytes[1:].clone()
    engine.forwards.warm_up(300, 8)
    assert torch.equal(engine.pool.bytes[1:], before)
    assert not engine.forwards.last_ids[1:].any()


def test_buckets() -> None:
    assert buckets_for(1) == (1,)
    assert buckets_for(16) == (1, 2, 4, 8, 16)
    assert buckets_for(17) == (1, 2, 4, 8, 16, 24)
    assert buckets_for(4096)[-1] == 256


STEPS, ROWS = itertools.count(10_000), itertools.count(10_000)


def opened(ids: list[int], pages: list[int], params: SamplingParams, kv_len: int = 0) -> RowOpen:
    return RowOpen(RowId(next(ROWS)), tuple(ids), len(ids), kv_len, tuple(PageId(p) for p in pages), params)


def test_a_row_that_ended_drops_its_surplus() -> None:
    engine = device_engine(SMALL)
    one = opened(list(range(16)), [1, 2], replace(GREEDY, max_tokens=2))
    first = engine.launch(StepPlan(next(STEPS), (Row(one.row, 0, 16, False, True),), (one,)))
    second = engine.launch(StepPlan(next(STEPS), (Row(one.row, 16, 1, True, True),)))
    assert engine.finish(first).rows[0].ended_by is None
    third = engine.launch(StepPlan(next(STEPS), (Row(one.row, 17, 1, True, True),)))
    ended = engine.finish(second).rows[0]
    assert (ended.ended_by, ended.kv_len) == (EndedBy.LENGTH, 17)
    assert engine.finish(third).rows == ()


def test_pages_that_are_copied_and_moved_give_the_same_tokens_and_the_same_digest() -> None:
    """Restored = never spilled: bytes through the host into other pages, the pool poisoned between."""
    engine = device_engine(SMALL)
    ids = random.Random(7).choices(range(SMALL.vocab), k=100)

    def generate(pages: list[int], kv_len: int) -> list[int]:
        one = opened(ids, pages, GREEDY, kv_len)
        row = Row(one.row, kv_len, len(ids) - kv_len, False, True)
        found = [engine.finish(engine.launch(StepPlan(next(STEPS), (row,), (one,))))]
        for k in range(20):
            found.append(engine.finish(engine.launch(StepPlan(next(STEPS), (Row(one.row, 100 + k, 1, True, True),)))))
        engine.finish(engine.launch(StepPlan(next(STEPS), (), closes=(one.row,))))
        return [token for result in found for row in result.rows for token in row.ids]

    pages = [3, 4, 5, 9, 8, 7, 1, 40]
    expected, before = generate(pages, 0), engine.kv_digest(pages, 96)
    kept = engine.pool.bytes[pages].clone()
    engine.pool.poison(range(1, 200))
    moved = [50, 52, 51, 70, 71, 72, 73, 80]
    engine.pool.bytes[moved[:6]] = kept[:6]
    assert engine.kv_digest(moved, 96) == before
    assert engine.kv_digest(moved[1:], 80) != before
    assert generate(moved, 96) == expected


def test_page_copies_of_a_plan_come_before_its_rows() -> None:
    engine = device_engine(SMALL)
    ids = random.Random(8).choices(range(SMALL.vocab), k=30)
    one = opened(ids, [1, 2], GREEDY)
    whole = engine.finish(engine.launch(StepPlan(next(STEPS), (Row(one.row, 0, 30, False, True),), (one,))))
    two = opened(ids, [1, 5], GREEDY, 29)
    plan = StepPlan(next(STEPS), (Row(two.row, 29, 1, False, True),), (two,), (one.row,), ((PageId(2), PageId(5)),))
    assert engine.finish(engine.launch(plan)).rows[0].ids == whole.rows[0].ids


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((Row(RowId(999), 0, 1, False, True),), "never opened"),
        ((Row(RowId(1), 0, 40, False, True),), "do not cover"),
        ((Row(RowId(1), 0, 32, False, True), Row(RowId(1), 0, 32, False, True)), "more than 40 tokens"),
    ],
)
def test_plans_that_contradict_what_is_held(rows: tuple[Row, ...], message: str) -> None:
    engine = device_engine(SMALL, max_rows=1, max_step_tokens=40)
    one = RowOpen(RowId(1), tuple(range(32)), 32, 0, (PageId(1), PageId(2)), GREEDY)
    with pytest.raises(EngineError, match=message):
        engine.launch(StepPlan(next(STEPS), rows, (one,)))
    engine.rows.clear()
    for again, text in ((RowOpen(RowId(2), (1,), 1, 0, (PageId(3),), GREEDY), "more rows are open"), (one, "opened twice")):
        engine.rows = {RowId(1): None}  # type: ignore[dict-item]
        with pytest.raises(EngineError, match=text):
            engine.launch(StepPlan(next(STEPS), (), (again,)))
