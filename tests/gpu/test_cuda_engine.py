"""The GPU step engine by plans: lag 1, rows sampled on the host, pages spilled, poisoned and restored elsewhere."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace

import pytest
import torch
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.plan import EndedBy, PageId, Row, RowId, RowOpen, SamplingParams, SlotId, StepPlan

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
GEOMETRY = KVGeometry(3, 2, 64)


class NoText:
    def token_bytes(self, token_id: int) -> bytes:
        return b""


@pytest.fixture(scope="module")
def engine():  # type: ignore[no-untyped-def]
    assert torch.cuda.is_available(), "a GPU test was asked for and there is no CUDA device"
    from kvalet.runtime.cuda_decoder import CudaDecoder, DecoderShape, random_weights
    from kvalet.runtime.cuda_engine import CudaEngine
    from kvalet.runtime.cuda_pool import CudaPool
    from kvalet.runtime.rows import TextContext

    shape = DecoderShape(3, 256, 6, 2, 64, 512, 1000, qk_norm=True)
    pool = CudaPool(GEOMETRY, 200, DEVICE)
    decoder = CudaDecoder(shape, random_weights(shape, DEVICE), pool.pages, 2048)
    text = TextContext(vocabulary=NoText(), vocab_size=1000, end_ids=frozenset())
    return CudaEngine(decoder, pool, text, max_rows=8, max_step_tokens=512)


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
    from kvalet.runtime.cuda_pool import CudaCopier, RegisteredSlab
    from kvalet.runtime.slab import Slab

    slab = Slab(GEOMETRY, 3)
    registered = RegisteredSlab(slab)
    copier = CudaCopier(engine.pool, registered)

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
