"""Teacher forcing: the logits a model gives along a known sequence, without sampling. For tests and for checking answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvalet.runtime.attn_torch import PlainAttention
from kvalet.runtime.batch import Segment, make_batch
from kvalet.runtime.kvpool import KVPool
from kvalet.runtime.model import Decoder
from torch import Tensor


@torch.inference_mode()
def forced_logits(decoder: Decoder, ids: Sequence[int], first: int, kv_dtype: str, piece: int = 256) -> Tensor:
    """float32 [len(ids) - first, vocab]: row i is what the model says after reading ids[: first + i] (first >= 1).

    Reads in pieces of ``piece`` tokens over pages of its own; memory: the KV of ``ids`` and the logits. Raises ValueError for a
    ``first`` outside of 1..len(ids).
    """
    if not 1 <= first <= len(ids):
        raise ValueError(f"first must be in 1..{len(ids)}, not {first}")
    geometry = decoder.spec.geometry(kv_dtype)
    pool = KVPool(geometry, geometry.pages_for(len(ids)) + 1)
    pages = tuple(range(1, pool.n_pages))
    shape = (geometry.n_layers, 2, piece, geometry.n_kv_heads, geometry.head_dim)
    new_kv = torch.empty(shape, dtype=pool.pages.dtype)
    windows = decoder.spec.windows if decoder.spec.window_layers else ()
    found = []
    for start in range(0, len(ids), piece):
        fed = tuple(ids[start : start + piece])
        batch = make_batch([Segment(0, start, fed, pages, False, True)], geometry.page_tokens, pad_to=len(fed))
        attention = PlainAttention(pool, batch, new_kv, windows)
        hidden = decoder.hidden(batch.ids, batch.positions, attention)
        attention.commit()
        found.append(decoder.logits(hidden[max(0, first - 1 - start) :]).float())
    return torch.cat(found)[: len(ids) - first]
