"""The GPU step engine by plans: lag 1, rows sampled on the host, pages spilled, poisoned and restored elsewhere."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from devicekit import Driver, RandomTensors, Session
from kvalet.runtime.plain_ops import PlainOps
from kvalet.runtime.plain_weights import load_plain
from kvalet.runtime.plan import EndedBy, PageId, Row, RowId, RowOpen, SamplingParams, SlotId, StepPlan
from kvalet.runtime.rope_spec import RopeSpec
from kvalet.runtime.spec import ModelSpec

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
SPEC = ModelSpec(
    architecture="qwen3", name="small", n_layers=3, hidden=256, n_q_heads=6, n_kv_heads=2, head_dim=64, ffn=512, vocab=1000,
    context=2000, eps=1e-6, rope=RopeSpec(1e6), qk_norm=True,
)  # fmt: skip
GEOMETRY = SPEC.geometry("bf16")
FAMILIES = {
    "own head and biases": replace(SPEC, qk_norm=False, qkv_bias=True, out_bias=True, mlp_bias=True),
    "tied, heads of 128, group of 7": replace(SPEC, tied=True, head_dim=128, n_q_heads=7, n_kv_heads=1),
    "windows in some layers": replace(SPEC, window=40, window_layers=frozenset((0, 2))),
    "a window in all": replace(SPEC, window=33, window_layers=frozenset((0, 1, 2))),
    "a layer without rotation": replace(SPEC, nope_layers=frozenset((1,))),
}


class NoText:
    def token_bytes(self, token_id: int) -> bytes:
        return b""


@pytest.fixture(scope="module")
def engine():  # type: ignore[no-untyped-def]
    assert torch.cuda.is_available(), "a GPU test was asked for and there is no CUDA device"
    return make_engine(SPEC)


def make_engine(spec: ModelSpec, ops: Any = None, **options: Any) -> Any:
    """On the GPU, or on ``ops``: the same random tensors, in bf16."""
    from kvalet.runtime.cuda_decoder import CudaDecoder
    from kvalet.runtime.cuda_engine import CudaEngine
    from kvalet.runtime.cuda_ops import CudaOps
    from kvalet.runtime.cuda_pool import CudaPool
    from kvalet.runtime.rows import TextContext

    ops = ops if ops is not None else CudaOps(DEVICE)
    pool = CudaPool(spec.geometry("bf16"), 200, ops.device)
    pool.poison(range(1, 200))
    weights = load_plain(RandomTensors(spec), spec, torch.bfloat16, ops.device)
    decoder = CudaDecoder(spec, weights, pool.pages, 2048, ops)
    text = TextContext(vocabulary=NoText(), vocab_size=spec.vocab, end_ids=frozenset())
    return CudaEngine(decoder, pool, text, **{"max_rows": 8, "max_step_tokens": 512, **options})


STEPS = itertools.count()
ROWS = itertools.count(1)


def generate(  # type: ignore[no-untyped-def]
    engine, ids: list[int], pages: list[int], n: int, params: SamplingParams = GREEDY, *, kv_len: int = 0, lag: int = 1
) -> list[int]:
    """``n`` tokens, with the host ``lag`` steps behind."""
    row = RowId(next(ROWS))
    opened = RowOpen(row, tuple(ids), len(ids), kv_len, tuple(PageId(p) for p in pages), params)
    plans = [StepPlan(next(STEPS), (Row(row, kv_len, len(ids) - kv_len, False, True),), opens=(opened,))]
    plans += [StepPlan(next(STEPS), (Row(row, len(ids) + k, 1, True, True),)) for k in range(n - 1)]
    plans.append(StepPlan(next(STEPS), (), closes=(row,)))
    in_flight = []
    accepted: list[int] = []
    for plan in plans:
        in_flight.append(engine.launch(plan))
        while len(in_flight) > lag:
            accepted += [token for result in engine.finish(in_flight.pop(0)).rows for token in result.ids]
    for launched in in_flight:
        accepted += [token for result in engine.finish(launched).rows for token in result.ids]
    return accepted


def prompt(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=n)


def test_lag_one_equals_lag_zero(engine) -> None:  # type: ignore[no-untyped-def]
    ids = prompt(45, 1)
    fast = generate(engine, ids, list(range(1, 11)), 40)
    assert len(fast) == 40
    assert generate(engine, ids, list(range(20, 30)), 40, lag=0) == fast


def test_host_sampled_rows_follow_their_seed(engine) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=1000, ignore_eos=True, logprobs=2)
    one = generate(engine, prompt(20, 2), list(range(1, 8)), 12, params)
    assert generate(engine, prompt(20, 2), list(range(30, 37)), 12, params) == one
    assert generate(engine, prompt(20, 2), list(range(30, 37)), 12, replace(params, seed=6)) != one


def test_end_by_length_drops_the_surplus(engine) -> None:  # type: ignore[no-untyped-def]
    row = RowId(next(ROWS))
    ids = prompt(16, 3)
    opened = RowOpen(row, tuple(ids), 16, 0, (PageId(1), PageId(2)), replace(GREEDY, max_tokens=2))
    plans = [StepPlan(next(STEPS), (Row(row, 0, 16, False, True),), opens=(opened,))]
    plans += [StepPlan(next(STEPS), (Row(row, 16 + k, 1, True, True),)) for k in range(2)]
    first = engine.launch(plans[0])
    second = engine.launch(plans[1])
    assert engine.finish(first).rows[0].ended_by is None
    third = engine.launch(plans[2])
    ended = engine.finish(second).rows[0]
    assert ended.ended_by is EndedBy.LENGTH
    assert ended.kv_len == 17
    assert engine.finish(third).rows == ()
    engine.finish(engine.launch(StepPlan(next(STEPS), (), closes=(row,))))


def test_spilled_poisoned_and_moved_pages_restore_bit_for_bit(engine) -> None:  # type: ignore[no-untyped-def]
    """P32 on the device: out to the slab, pool poisoned, back into other pages; same KV bits, same tokens."""
    from kvalet.runtime.cuda_pool import CudaCopier
    from kvalet.runtime.cuda_slab import CudaHostMemory, RegisteredSlab
    from kvalet.runtime.slab import Slab

    slab = Slab(GEOMETRY, 3, populate=False)
    registered = RegisteredSlab(slab, CudaHostMemory())
    copier = CudaCopier(engine.pool, registered, engine.decoder.ops)

    def wait(start) -> None:  # type: ignore[no-untyped-def]
        done = threading.Event()
        errors: list[str | None] = []
        start(lambda error, ms: (errors.append(error), done.set()))
        assert done.wait(30)
        assert errors == [None]

    ids = prompt(100, 4)
    pages = [3, 4, 5, 9, 8, 7, 1]
    expected = generate(engine, ids, [*pages, 40, 41], 20)
    before = engine.kv_digest(pages, 96)
    wait(lambda done: copier.copy_out([PageId(p) for p in pages], SlotId(1), 0, done, 100))
    tail = registered.payload(1, GEOMETRY)[6][: GEOMETRY.page_bytes].view(6, 16, -1)
    assert not tail[:, 4:].any()
    assert tail[:, :4].any()
    engine.pool.poison(range(1, 200))
    torch.cuda.synchronize()
    moved = [50, 52, 51, 70, 71, 72, 73]
    wait(lambda done: copier.copy_in(SlotId(1), list(range(7)), [PageId(p) for p in moved], done))
    assert engine.kv_digest(moved, 96) == before
    assert generate(engine, ids, [*moved, 80, 81], 20, kv_len=96) == expected
    copier.close()
    registered.close()
    slab.close()


def sessions(seed: int, params: list[SamplingParams]) -> list[Session]:
    rng = random.Random(seed)
    lengths = ((1, 12), (16, 30), (17, 9), (90, 25), (128, 40), (41, 7))
    return [
        Session(rng.choices(range(1000), k=length), n, replace(params[i % len(params)], max_tokens=n))
        for i, (length, n) in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_like_plain_torch_on_the_same_device(name: str) -> None:
    """bf16 rounds differently in other kernels: most ids are the same, and log-probabilities of equal beginnings are near."""
    asked = [replace(GREEDY, logprobs=0)]
    mine, theirs = sessions(5, asked), sessions(5, asked)
    Driver(make_engine(FAMILIES[name])).run(mine)
    Driver(make_engine(FAMILIES[name], PlainOps(DEVICE))).run(theirs)
    for one, other in zip(mine, theirs, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)) if a != b), len(one.ids))
        assert one.logprobs[: same + 1] == pytest.approx(other.logprobs[: same + 1], abs=0.15), name
    assert sum(one.ids[:4] == other.ids[:4] for one, other in zip(mine, theirs, strict=True)) >= 4


MIXED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.8, top_k=40, seed=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, ignore_eos=True, repetition_penalty=1.3),
]


def test_deterministic_ids_do_not_depend_on_neighbours_nor_on_lag() -> None:
    """Rule 11: alone, in company, with the host behind or not; drawn on the device and on the host."""
    engine = make_engine(SPEC, deterministic=True, decode_rows=4)
    alone, together, behind = sessions(6, MIXED), sessions(6, MIXED), sessions(6, MIXED)
    Driver(engine, lag=0, seed=1, piece=256).run(alone, at_once=1)
    Driver(engine, lag=0, seed=2, piece=256).run(together, at_once=6)
    Driver(engine, lag=1, seed=3, piece=256).run(behind, at_once=5)
    assert [s.ids for s in alone] == [s.ids for s in together] == [s.ids for s in behind]


def test_nothing_is_allocated_while_serving(engine: Any) -> None:
    """After one round the allocator has all it needs."""
    Driver(engine, seed=4).run(sessions(7, MIXED), at_once=6)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for seed in range(5):
        Driver(engine, seed=seed).run(sessions(seed, MIXED), at_once=6)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved


def test_drawn_on_the_device_like_on_the_host() -> None:
    """The noise bit for bit; the tokens up to the rounding of exp and log."""
    import numpy as np
    from kvalet.runtime.device_sampler import FIELDS, Draw, draw, pack, row_uniforms
    from kvalet.runtime.noise import row_uniform, stream_start
    from kvalet.runtime.sampler import RowSampling, sample

    params = [SamplingParams(temperature=t, top_k=k, top_p=p) for t in (0.5, 1.0) for k in (0, 20) for p in (0.9, 1.0)] * 40
    draws = [Draw(one, seed, 3 * seed) for seed, one in enumerate(params)]
    logits = torch.randn(len(draws), 151_936, generator=torch.Generator().manual_seed(1)) * 3
    packed = np.zeros((FIELDS, len(draws)), dtype=np.int64)
    pack(draws, packed)
    starts = torch.from_numpy(np.array([stream_start(d.seed, d.position) for d in draws], dtype=np.uint64).view(np.int64))
    uniforms = row_uniforms(starts[:4].to(DEVICE), 151_936).cpu()
    for row, one in zip(uniforms, draws, strict=False):
        assert np.array_equal(row.numpy(), row_uniform(one.seed, one.position, 151_936))
    mine = draw(logits.to(DEVICE), torch.from_numpy(packed).to(DEVICE), in_order=True).tolist()
    rows = [RowSampling(d.params, d.seed, 151_936, [0] * d.position) for d in draws]
    theirs = [choice.token_id for choice in sample(logits, rows)]
    assert sum(a == b for a, b in zip(mine, theirs, strict=True)) >= len(draws) - 2
