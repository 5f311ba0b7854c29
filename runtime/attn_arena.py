"""Attention of decodes over the contiguous copies of the arena: per sheet one batched product for all its rows.

Scores are q @ K^T, masked by length, softmax, @ V. A row without a copy is attended to by the same
functions at the same capacity, from its pages: equal bits. Prefill pieces and forced runs go through ``attn_blocked`` or
``attn_torch``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from kvalet.runtime.arena import Copy, Sheet, capacity_for, keys_lie_transposed, keys_like
from kvalet.runtime.attn_blocked import BlockedAttention, prefill_attention
from kvalet.runtime.attn_torch import SegmentAttention
from kvalet.runtime.batch import Batch, Span
from kvalet.runtime.kvpool import KVPool
from torch import Tensor

FEW_ROWS = 2
"""Up to so many rows, appending through views made once a step is faster than indexing in each layer."""


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one new token a row: [rows, q_heads * dim].

    ``q`` [rows, q_heads, dim], ``keys`` [rows, kv_heads, dim, capacity], ``values`` [rows, kv_heads, capacity, dim], additive
    ``mask`` [rows * kv_heads, q_heads / kv_heads, capacity]."""
    rows, kv_heads, dim, capacity = keys.shape
    scores = torch.baddbmm(mask, q.reshape(rows * kv_heads, -1, dim), keys.view(rows * kv_heads, dim, capacity), alpha=scale)
    weights = torch.softmax(scores, -1)
    return torch.bmm(weights, values.view(rows * kv_heads, capacity, dim)).view(rows, -1)


def length_mask(
    lengths: Sequence[int], capacity: int, kv_heads: int, group: int, dtype: torch.dtype, window: int = 0
) -> Tensor:
    """Additive mask [rows * kv_heads, group, capacity]: 0 below each row's length, -inf from there on and, with a ``window``,
    before the row's last ``window`` tokens."""
    places, ends = torch.arange(capacity), torch.tensor(lengths).unsqueeze(1)
    beyond = places >= ends
    if window:
        beyond |= places < ends - window
    mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -math.inf)
    return mask.view(-1, 1, 1, capacity).expand(-1, kv_heads, group, -1).reshape(-1, group, capacity)


class _LayerMasks:
    """``length_mask`` of some rows for each layer; one without windows, one per window that is shorter than a row."""

    def __init__(
        self,
        lengths: Sequence[int],
        capacity: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        windows: Sequence[int],
    ) -> None:
        """``heads``: KV heads, and query heads for each. ``windows``: see ``SegmentAttention``."""
        self._whole = length_mask(lengths, capacity, *heads, dtype)
        self._windows = windows
        self._windowed = {w: length_mask(lengths, capacity, *heads, dtype, w) for w in set(windows) if 0 < w < max(lengths)}

    def __getitem__(self, layer: int) -> Tensor:
        return self._windowed.get(self._windows[layer], self._whole) if self._windowed else self._whole


class _SheetDecodes:
    """The call's decodes whose copies are in one sheet; ``members`` in order of slot, one after the other in the call."""

    def __init__(self, sheet: Sheet, members: Sequence[tuple[Span, Copy]], group: int, windows: Sequence[int]) -> None:
        slots = [copy.slot for _, copy in members]
        positions = [span.segment.start for span, _ in members]
        self._sheet = sheet
        self.begin, self.end = members[0][0].begin, members[-1][0].end
        self._low, self._high = slots[0], slots[-1] + 1
        self._gaps = None if self._high - self._low == len(slots) else torch.tensor(slots) - self._low
        lengths = [1] * (self._high - self._low)  # a slot between that does not run: any one position, its result is not used
        for slot, position in zip(slots, positions, strict=True):
            lengths[slot - self._low] = position + 1
        kv_heads, dim = sheet.keys.shape[2], sheet.keys.shape[3]
        self._masks = _LayerMasks(lengths, sheet.capacity, (kv_heads, group), sheet.keys.dtype, windows)
        self._scale = dim**-0.5
        self._slots, self._positions = torch.tensor(slots), torch.tensor(positions)
        self._places = (
            [
                (sheet.keys[:, slot, :, :, position].unbind(0), sheet.values[:, slot, :, position].unbind(0))
                for slot, position in zip(slots, positions, strict=True)
            ]
            if len(slots) <= FEW_ROWS
            else []
        )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q``, ``k``, ``v`` of the members, in their order."""
        keys, values = self._sheet.key_layers[layer], self._sheet.value_layers[layer]
        if self._places:
            for i, (key_places, value_places) in enumerate(self._places):
                key_places[layer].copy_(k[i])
                value_places[layer].copy_(v[i])
        else:
            keys[self._slots, :, :, self._positions] = k
            values[self._slots, :, self._positions] = v
        part = slice(self._low, self._high)
        if self._gaps is None:
            return attend(q, keys[part], values[part], self._masks[layer], self._scale)
        spread = q.new_zeros(self._high - self._low, *q.shape[1:])
        spread[self._gaps] = q
        return attend(spread, keys[part], values[part], self._masks[layer], self._scale)[self._gaps]


class _LooseDecode:
    """One decode without a copy: its capacity's worth of one layer at a time, gathered from the pages."""

    def __init__(self, pool: KVPool, span: Span, group: int, transposed: bool, windows: Sequence[int]) -> None:
        geometry, segment = pool.geometry, span.segment
        self.begin, self.end = span.begin, span.end
        self._pool, self._start = pool, segment.start
        pages = geometry.pages_for(segment.start)
        self._table = torch.tensor(segment.pages[:pages], dtype=torch.int64)
        capacity, dtype = capacity_for(segment.end), pool.pages.dtype
        heads, dim = geometry.n_kv_heads, geometry.head_dim
        self._gathered = torch.empty(2, pages * geometry.page_tokens, heads, dim, dtype=dtype)
        self._keys = keys_like(torch.zeros(heads * dim * capacity, dtype=dtype), (1, heads, dim, capacity), transposed)
        self._values = torch.zeros(1, heads, capacity, dim, dtype=dtype)
        self._masks = _LayerMasks([segment.end], capacity, (heads, group), dtype, windows)
        self._scale = dim**-0.5

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = self._start
        if start:
            self._pool.read_layer(self._table, layer, self._gathered)
        self._keys[0, :, :, :start] = self._gathered[0, :start].permute(1, 2, 0)
        self._values[0, :, :start] = self._gathered[1, :start].transpose(0, 1)
        self._keys[0, :, :, start] = k[0]
        self._values[0, :, start] = v[0]
        return attend(q, self._keys, self._values, self._masks[layer], self._scale)


class ArenaAttention:
    """``model.Attend`` for a call whose decodes have been given copies (``copies``: one per span; None: no copy, or no decode).

    Decodes of one sheet must stand one after the other, in order of slot."""

    def __init__(
        self,
        pool: KVPool,
        batch: Batch,
        new_kv: Tensor,
        copies: Sequence[Copy | None],
        group: int,
        transposed: bool | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        """``group``: query heads per KV head. ``transposed``: as the arena's. ``windows``: see ``SegmentAttention``."""
        transposed = keys_lie_transposed() if transposed is None else transposed
        self._pool, self._batch, self._copies = pool, batch, copies
        self._new = new_kv[:, :, : batch.n]
        self._parts: list[_SheetDecodes | _LooseDecode | SegmentAttention | BlockedAttention] = []
        by_sheet: dict[int, list[tuple[Span, Copy]]] = {}
        for span, copy in zip(batch.spans, copies, strict=True):
            if copy is not None:
                by_sheet.setdefault(copy.sheet.first_block, []).append((span, copy))
            elif span.segment.decode and span.segment.n == 1:
                self._parts.append(_LooseDecode(pool, span, group, transposed, windows))
            else:
                self._parts.append(prefill_attention(pool, span, group, windows))
        self._parts += [_SheetDecodes(members[0][1].sheet, members, group, windows) for members in by_sheet.values()]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._new[layer, 0] = k
        self._new[layer, 1] = v
        if len(self._parts) == 1 and not self._batch.padding:
            return self._parts[0].run(layer, q, k, v)
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for part in self._parts:
            tokens = slice(part.begin, part.end)
            out[tokens] = part.run(layer, q[tokens], k[tokens], v[tokens])
        return out

    def commit(self) -> None:
        """Write the call's KV into the pages; the copies now hold one token more."""
        self._pool.write(self._new, self._batch.places)
        for span, copy in zip(self._batch.spans, self._copies, strict=True):
            if copy is not None:
                copy.length = span.segment.end
