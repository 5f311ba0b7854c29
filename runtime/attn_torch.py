"""The plain reference of paged attention, for any device: gather a row's pages, one SDPA per segment.

Also what prefill pieces run on: they gather once per piece and layer. The fast path of decodes is ``attn_arena``; a test holds
the two equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from kvalet.runtime.batch import Batch, Span
from kvalet.runtime.kvpool import KVPool
from torch import Tensor
from torch.nn import functional


class SegmentAttention:
    """Attention of one segment's new tokens to their row: its past from the pages, then themselves, causally.

    Holds one layer of one row's KV at a time: [2, row tokens, kv_head, head_dim]."""

    def __init__(self, pool: KVPool, span: Span, windows: Sequence[int] = ()) -> None:
        """``windows``: per layer, how many tokens a token sees, itself included; 0 or no entry: all before it."""
        segment, geometry = span.segment, pool.geometry
        self.begin, self.end = span.begin, span.end
        self._pool, self._start, self._total = pool, segment.start, segment.end
        past = geometry.pages_for(segment.start)
        self._past = past * geometry.page_tokens
        self._table = torch.tensor(segment.pages[:past], dtype=torch.int64)
        shape = (2, max(self._past, segment.end), geometry.n_kv_heads, geometry.head_dim)
        self._kv = torch.empty(shape, dtype=pool.pages.dtype)
        self._mask = causal_mask(segment.start, segment.n, pool.pages.dtype)
        self._windows = windows
        self._window_masks = {
            window: window_mask(segment.start, segment.n, window, pool.pages.dtype)
            for window in set(windows)
            if 0 < window < segment.end
        }

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q`` [n, q_heads, dim], ``k`` and ``v`` [n, kv_heads, dim] of this segment -> [n, q_heads * dim]."""
        if self._past:
            self._pool.read_layer(self._table, layer, self._kv[:, : self._past])
        self._kv[0, self._start : self._total] = k
        self._kv[1, self._start : self._total] = v
        keys, values = self._kv[:, : self._total].transpose(1, 2).unsqueeze(1)
        mask = self._window_masks.get(self._windows[layer], self._mask) if self._windows else self._mask
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and q.shape[0] > 1,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).reshape(q.shape[0], -1)


def causal_mask(start: int, n: int, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [n, start + n]: 0 where token i may look (its own position included), -inf elsewhere; None where SDPA's own
    causal mask, or none at all, says the same."""
    if n == 1 or start == 0:
        return None
    return torch.full((n, start + n), -math.inf, dtype=dtype).triu_(diagonal=start + 1)


def window_mask(start: int, n: int, window: int, dtype: torch.dtype) -> Tensor:
    """Like ``causal_mask``, with -inf also ``window`` tokens and more before token i."""
    distance = torch.arange(start, start + n).unsqueeze(1) - torch.arange(start + n)
    return torch.zeros(n, start + n, dtype=dtype).masked_fill_((distance < 0) | (distance >= window), -math.inf)


class PlainAttention:
    """``model.Attend`` for a whole call, segment by segment; keeps the new KV and writes it into the pages at the end."""

    def __init__(self, pool: KVPool, batch: Batch, new_kv: Tensor, windows: Sequence[int] = ()) -> None:
        """``new_kv`` [layer, 2, >= n, kv_head, head_dim]: room for the call's KV. ``windows``: see ``SegmentAttention``."""
        self._pool, self._batch = pool, batch
        self._new = new_kv[:, :, : batch.n]
        self._segments = [SegmentAttention(pool, span, windows) for span in batch.spans]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._new[layer, 0] = k
        self._new[layer, 1] = v
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for segment in self._segments:
            part = slice(segment.begin, segment.end)
            out[part] = segment.run(layer, q[part], k[part], v[part])
        return out

    def commit(self) -> None:
        """Write the call's KV into the pages."""
        self._pool.write(self._new, self._batch.places)
