"""The pool of a GPU: what fits, what is refused with its numbers, what is kept for everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvalet.api.config import EngineConfig
from kvalet.api.device_plan import DeviceMemory, overhead_bytes, plan_pool
from kvalet.api.memory_plan import DEVICE_RAM_SHARE, MOST_SHARE, PlanError, plan_memory
from kvalet.runtime.cuda_step import buckets_for
from kvalet.runtime.rope_spec import RopeSpec
from kvalet.runtime.spec import ModelSpec

GIB = 1 << 30
EIGHT_B = ModelSpec(
    architecture="qwen3", name="8b", n_layers=36, hidden=4096, n_q_heads=32, n_kv_heads=8, head_dim=128, ffn=12288,
    vocab=151_936, context=40_960, eps=1e-6, rope=RopeSpec(1e6), qk_norm=True,
)  # fmt: skip
KV = EIGHT_B.geometry("bf16")
WEIGHTS = int(16.4e9)
H200 = DeviceMemory(143_771 << 20, (143_771 << 20) - WEIGHTS)


def overhead(spec: ModelSpec = EIGHT_B, rows: int = 256, tokens: int = 8448) -> int:
    return overhead_bytes(spec, max_step_tokens=tokens, max_rows=rows, buckets=buckets_for(rows))


def pool(memory: DeviceMemory = H200, *, kept: int | None = None, **fields: Any) -> Any:
    kept = overhead() if kept is None else kept
    return plan_pool(EngineConfig(**fields), KV, memory, context_tokens=40_960, overhead=kept)


def test_an_8b_model_on_an_h200_leaves_most_of_the_card_to_the_pool() -> None:
    made = pool()
    n_bytes = made.n_pages * KV.page_stride_bytes
    assert n_bytes + overhead() + WEIGHTS <= 0.92 * H200.total_bytes
    assert n_bytes + overhead() + WEIGHTS > 0.92 * H200.total_bytes - KV.page_stride_bytes - 2
    assert n_bytes > 100 * GIB
    assert "chosen" in made.notes[0]


def test_the_overhead_grows_with_what_takes_it() -> None:
    base = overhead()
    assert 1 * GIB < base < 6 * GIB
    assert overhead(tokens=16_896) > base
    assert overhead(rows=16) < base
    assert overhead(replace(EIGHT_B, vocab=32_000)) < base
    one_more_plan = overhead(replace(EIGHT_B, window=4096, window_layers=frozenset((0,)))) - base
    assert one_more_plan == 512 << 20
    assert overhead(replace(EIGHT_B, window=4096, window_layers=frozenset(range(36)))) == base


def test_what_others_use_is_not_taken() -> None:
    alone, beside = pool(), pool(DeviceMemory(H200.total_bytes, H200.free_bytes - 50 * GIB))
    assert (alone.n_pages - beside.n_pages) * KV.page_stride_bytes == pytest.approx(50 * GIB, abs=2 * KV.page_stride_bytes)
    assert pool(device_share=0.5).n_pages < alone.n_pages


def test_a_given_pool_is_taken_or_refused_with_the_numbers() -> None:
    made = pool(pool_tokens=100_000)
    assert made.n_pages == 100_000 // 16 + 1
    assert made.notes == ()
    with pytest.raises(
        PlanError, match=r"A pool of 2,000,000 tokens takes 27\d\.\d\d GiB; the device has 140\.40 GiB"
    ) as caught:
        pool(pool_tokens=2_000_000)
    assert "smaller --pool-tokens" in str(caught.value)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"does not fit: the device has 24\.00 GiB, 23\.00 GiB are used .* 0\.00 GiB are left"):
        pool(DeviceMemory(24 * GIB, 1 * GIB))


def test_a_pool_below_the_context_is_told() -> None:
    assert any("smaller than the context" in note for note in pool(pool_tokens=10_000).notes)


def test_beside_a_pool_of_its_own_memory_is_for_the_tiers() -> None:
    """No arena, the pool's bytes do not count, and the RAM tier may have half of what is available."""
    n_pages = pool().n_pages
    made = plan_memory(EngineConfig(max_rows=256), KV, context_tokens=40_960, available_bytes=100 * GIB, device_pages=n_pages)
    assert (made.n_pages, made.arena_tokens) == (n_pages, 0)
    assert made.pool_bytes > MOST_SHARE * 100 * GIB
    assert DEVICE_RAM_SHARE * 100 * GIB - KV.slot_bytes < made.ram_bytes <= DEVICE_RAM_SHARE * 100 * GIB
    with pytest.raises(PlanError, match="are available"):
        plan_memory(
            EngineConfig(max_rows=256, ram_bytes=90 * GIB), KV, context_tokens=40_960, available_bytes=100 * GIB, device_pages=9
        )
