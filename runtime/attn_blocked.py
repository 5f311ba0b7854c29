"""Attention of prefill pieces as plain matrix products over blocks of queries, for processors without bf16 tiles (AMX).

There SDPA's flash kernel reaches a quarter of what a bf16 matrix product does. Here the query heads that share a KV head stand
in one product, a block of queries sees only the keys up to its own last token, and the scores of one block at a time exist:
[kv_heads, BLOCK * group, tokens so far]. The plain twin is ``attn_torch.SegmentAttention``; a test holds the two equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from kvalet.runtime.attn_torch import SegmentAttention, window_mask
from kvalet.runtime.batch import Span
from kvalet.runtime.kvpool import KVPool
from torch import Tensor

BLOCK = 128
"""Queries of a block: large enough for full-speed products, small enough that the scores stay in the cache."""

MIN_TOKENS = 16
"""Pieces shorter than this (forced runs, ends of prompts) go through SDPA."""


@functools.cache
def blocks_pay(dtype: torch.dtype) -> bool:
    """Whether products over blocks are the faster way on this processor: bf16 products without tiles.

    A property of the processor, not a measurement: it decides bits."""
    if dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not torch.cpu._is_amx_tile_supported()


class BlockedAttention:
    """Like ``SegmentAttention``: one segment's new tokens to their row, causally, one layer after the other.

    Holds one layer of the row's KV ([2, kv_head, row tokens, head_dim]) and the scores of one block."""

    def __init__(self, pool: KVPool, span: Span, group: int, windows: Sequence[int] = ()) -> None:
        """``group``: query heads per KV head. ``windows``: see ``SegmentAttention``."""
        segment, geometry = span.segment, pool.geometry
        self.begin, self.end = span.begin, span.end
        self._pool, self._start, self._total, self._group = pool, segment.start, segment.end, group
        past = geometry.pages_for(segment.start)
        self._table = torch.tensor(segment.pages[:past], dtype=torch.int64)
        heads, dim, dtype = geometry.n_kv_heads, geometry.head_dim, pool.pages.dtype
        self._gathered = torch.empty(2, past * geometry.page_tokens, heads, dim, dtype=dtype)
        self._kv = torch.empty(2, heads, segment.end, dim, dtype=dtype)
        block = min(BLOCK, segment.n)
        self._scores = torch.empty(heads * block * group * segment.end, dtype=dtype)
        self._mask = torch.full((block, block), -math.inf, dtype=dtype).triu_(1).repeat_interleave(group, dim=0)
        self._scale = dim**-0.5
        self._windows = windows
        self._window_masks: dict[tuple[int, int], Tensor] = {}

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q`` [n, q_heads, dim], ``k`` and ``v`` [n, kv_heads, dim] of this segment -> [n, q_heads * dim]."""
        start = self._start
        if start:
            self._pool.read_layer(self._table, layer, self._gathered)
            self._kv[:, :, :start] = self._gathered[:, :start].transpose(1, 2)
        self._kv[0, :, start:] = k.transpose(0, 1)
        self._kv[1, :, start:] = v.transpose(0, 1)
        n, heads, dim = k.shape
        out = q.new_empty(n, heads, self._group, dim)
        for first in range(0, n, BLOCK):
            last = min(first + BLOCK, n)
            queries = q[first:last].view(last - first, heads, self._group, dim).transpose(0, 1).reshape(heads, -1, dim)
            window = self._windows[layer] if self._windows else 0
            if 0 < window < start + last:
                found = self._attend_window(queries, start + first, start + last, window)
            else:
                found = self._attend(queries, start + first, start + last)
            out[first:last] = found.view(heads, last - first, self._group, dim).transpose(0, 1)
        return out.view(n, -1)

    def _attend(self, queries: Tensor, first: int, last: int) -> Tensor:
        """``queries`` [kv_heads, tokens * group, dim] of the row's tokens [first, last) -> the same shape."""
        heads, rows, _ = queries.shape
        keys, values = self._kv[:, :, :last]
        scores = self._scores[: heads * rows * last].view(heads, rows, last)
        torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=self._scale, out=scores)
        scores[:, :, first:] += self._mask[:rows, : last - first]
        return torch.bmm(torch.softmax(scores, -1), values)

    def _attend_window(self, queries: Tensor, first: int, last: int, window: int) -> Tensor:
        """``_attend`` over the tokens that any query of the block sees: from ``begin`` on."""
        heads, rows, _ = queries.shape
        begin = max(0, first - window + 1)
        mask = self._window_masks.get((first, window))
        if mask is None:
            mask = window_mask(first - begin, last - first, window, queries.dtype).repeat_interleave(self._group, dim=0)
            self._window_masks[first, window] = mask
        keys, values = self._kv[:, :, begin:last]
        scores = self._scores[: heads * rows * (last - begin)].view(heads, rows, last - begin)
        torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=self._scale, out=scores)
        scores += mask
        return torch.bmm(torch.softmax(scores, -1), values)


def prefill_attention(pool: KVPool, span: Span, group: int, windows: Sequence[int] = ()) -> SegmentAttention | BlockedAttention:
    """The faster of the two for this segment on this processor. ``windows``: see ``SegmentAttention``."""
    if span.segment.n >= MIN_TOKENS and blocks_pay(pool.pages.dtype):
        return BlockedAttention(pool, span, group, windows)
    return SegmentAttention(pool, span, windows)
