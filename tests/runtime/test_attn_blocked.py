"""Prefill over blocks of queries against its plain twin, and the choice between the two."""

from __future__ import annotations

import math

import pytest
import torch
from kvalet.runtime import attn_blocked
from kvalet.runtime.attn_blocked import BLOCK, MIN_TOKENS, BlockedAttention, blocks_pay, prefill_attention
from kvalet.runtime.attn_torch import SegmentAttention
from kvalet.runtime.batch import Segment, Span
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.kvpool import KVPool
from torch import Tensor

LAYERS, KV_HEADS, GROUP, DIM, P = 2, 2, 3, 16, 16


def segment_over(dtype: str, start: int, n: int, seed: int) -> tuple[KVPool, Span, Tensor, Tensor]:
    """A pool that holds the past of a segment on scattered pages, every other place NaN; the span; new q and kv."""
    g = torch.Generator().manual_seed(seed)
    geometry = KVGeometry(LAYERS, KV_HEADS, DIM, dtype)
    n_pages = geometry.pages_for(start + n)
    pool = KVPool(geometry, n_pages + 3)
    pool.poison(range(n_pages + 3))
    pages = tuple((torch.randperm(n_pages + 2, generator=g)[:n_pages] + 1).tolist())
    kind = pool.pages.dtype
    past = torch.randn(LAYERS, 2, start, KV_HEADS, DIM, generator=g).to(kind)
    if start:
        pool.write(past, torch.tensor([pages[i // P] * P + i % P for i in range(start)]))
    span = Span(Segment(1, start, (0,) * n, pages, False, True), 0, n)
    q = torch.randn(LAYERS, n, KV_HEADS * GROUP, DIM, generator=g).to(kind)
    return pool, span, q, torch.randn(LAYERS, 2, n, KV_HEADS, DIM, generator=g).to(kind)


SHAPES = [(0, 1), (0, 17), (0, BLOCK), (0, 2 * BLOCK + 5), (1, BLOCK + 1), (37, 2 * BLOCK), (3 * BLOCK + 9, 40), (500, 300)]


@pytest.mark.parametrize(("start", "n"), SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_equals_the_plain_twin(dtype: str, start: int, n: int) -> None:
    pool, span, q, kv = segment_over(dtype, start, n, seed=1000 * start + n)
    fast, plain = BlockedAttention(pool, span, GROUP), SegmentAttention(pool, span)
    fast._scores.fill_(math.nan)  # nothing of an earlier block may shine through
    bound = {"fp32": 2e-6, "bf16": 0.02}[dtype]
    for layer in range(LAYERS):
        found = fast.run(layer, q[layer], kv[layer, 0], kv[layer, 1]).clone()
        wanted = plain.run(layer, q[layer], kv[layer, 0], kv[layer, 1])
        assert found.shape == wanted.shape == (n, KV_HEADS * GROUP * DIM)
        torch.testing.assert_close(found.float(), wanted.float(), atol=bound, rtol=bound)


def test_a_token_sees_nothing_behind_it() -> None:
    """Changing the last token's KV changes the last token's result only, within its block and at its border."""
    for n in (BLOCK, BLOCK + 1, BLOCK + 2):
        pool, span, q, kv = segment_over("fp32", 20, n, seed=n)
        before = BlockedAttention(pool, span, GROUP).run(0, q[0], kv[0, 0], kv[0, 1]).clone()
        kv[0, :, -1] += 1.0
        after = BlockedAttention(pool, span, GROUP).run(0, q[0], kv[0, 0], kv[0, 1])
        assert torch.equal(before[:-1], after[:-1])
        assert not torch.equal(before[-1], after[-1])


def test_tokens_that_are_a_view_of_something_wider() -> None:
    """The decoder hands in slices of its packed q, k and v."""
    pool, span, q, kv = segment_over("fp32", 0, BLOCK + 3, seed=5)
    packed = torch.cat((q[0], kv[0, 0], kv[0, 1]), dim=1)
    heads = KV_HEADS * GROUP
    views = packed[:, :heads], packed[:, heads : heads + KV_HEADS], packed[:, heads + KV_HEADS :]
    found = BlockedAttention(pool, span, GROUP).run(0, *views)
    torch.testing.assert_close(found, SegmentAttention(pool, span).run(0, *views), atol=2e-6, rtol=2e-6)


def test_the_choice_is_by_processor_dtype_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not blocks_pay(torch.float32)
    if torch.cpu._is_amx_tile_supported():
        assert not blocks_pay(torch.bfloat16)
    monkeypatch.setattr(attn_blocked, "blocks_pay", lambda dtype: True)
    for n, kind in ((MIN_TOKENS - 1, SegmentAttention), (MIN_TOKENS, BlockedAttention)):
        pool, span, _, _ = segment_over("bf16", 0, n, seed=n)
        assert type(prefill_attention(pool, span, GROUP)) is kind


@pytest.mark.parametrize(("start", "n"), [(0, 40), (0, 2 * BLOCK + 5), (37, 2 * BLOCK), (500, 300)])
@pytest.mark.parametrize("window", [1, 16, 100, BLOCK + 1, 400, 10_000])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_windows_equal_the_plain_twin(dtype: str, window: int, start: int, n: int) -> None:
    """Layer 0 has the window, layer 1 none; what no query of a block sees is not even read (NaN there would show)."""
    pool, span, q, kv = segment_over(dtype, start, n, seed=start + n + window)
    windows = (window, 0)
    fast, plain = BlockedAttention(pool, span, GROUP, windows), SegmentAttention(pool, span, windows)
    fast._scores.fill_(math.nan)
    bound = {"fp32": 2e-6, "bf16": 0.02}[dtype]
    for layer in range(LAYERS):
        found = fast.run(layer, q[layer], kv[layer, 0], kv[layer, 1]).clone()
        wanted = plain.run(layer, q[layer], kv[layer, 0], kv[layer, 1])
        torch.testing.assert_close(found.float(), wanted.float(), atol=bound, rtol=bound)
    if window == 1:
        values = kv[0, 1].repeat_interleave(GROUP, dim=1).reshape(n, -1)
        torch.testing.assert_close(plain.run(0, q[0], kv[0, 0], kv[0, 1]).float(), values.float(), atol=bound, rtol=bound)
