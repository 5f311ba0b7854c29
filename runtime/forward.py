"""One step's segments through the model: split into calls, attention chosen, KV written, logits of the sampled positions.

Without ``deterministic`` everything is one call. With it the bits of a row may depend on nothing but the row: decodes go in calls
of one fixed row count, padded with tokens on the scratch page, and each prefill piece alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvalet.runtime.attn_torch import PlainAttention
from kvalet.runtime.batch import Batch, Segment, make_batch
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.errors import EngineError
from kvalet.runtime.kvpool import KVPool
from kvalet.runtime.model import Decoder
from torch import Tensor


class Forward:
    """The forward pass of one engine. Its buffers are sized at construction and do not grow."""

    def __init__(self, config: EngineConfig, decoder: Decoder, pool: KVPool) -> None:
        self._config, self._decoder, self._pool = config, decoder, pool
        geometry = pool.geometry
        self._max_tokens = max(config.max_step_tokens, config.decode_rows)
        shape = (geometry.n_layers, 2, self._max_tokens, geometry.n_kv_heads, geometry.head_dim)
        self._new_kv = torch.zeros(shape, dtype=pool.pages.dtype)
        self._calls = 0

    def __call__(self, segments: Sequence[Segment]) -> Tensor:
        """Logits [sampled, vocab] of the segments that sample, in order. Raises EngineError beyond ``max_step_tokens``."""
        n = sum(segment.n for segment in segments)
        if n > self._max_tokens:
            raise EngineError(f"{n} tokens in one step; the engine was made for {self._max_tokens}")
        parts: dict[int, Tensor] = {}
        for indices, pad_to in self._calls_of(segments):
            members = [segments[i] for i in indices]
            logits = self.run(make_batch(members, self._pool.geometry.page_tokens, pad_to))
            parts.update(zip((i for i in indices if segments[i].sample), logits, strict=True))
            if len(indices) == len(segments):
                return logits
        vocab = self._decoder.spec.vocab
        return torch.stack([parts[i] for i in sorted(parts)]) if parts else torch.empty(0, vocab)

    def _calls_of(self, segments: Sequence[Segment]) -> list[tuple[list[int], int]]:
        """(indices of a call's segments, tokens to pad it to; 0: not)."""
        if not segments:
            return []
        if not self._config.deterministic:
            return [(list(range(len(segments))), 0)]
        rows = self._config.decode_rows
        decodes = [i for i, segment in enumerate(segments) if segment.decode]
        if any(segments[i].n != 1 for i in decodes):
            raise EngineError("deterministic decodes are fed one token at a time")
        calls = [(decodes[at : at + rows], rows) for at in range(0, len(decodes), rows)]
        return calls + [([i], 0) for i, segment in enumerate(segments) if not segment.decode]

    def run(self, batch: Batch) -> Tensor:
        """One call: its KV is written to the pages; returns the logits of its sampled positions."""
        self._calls += 1
        attention = PlainAttention(self._pool, batch, self._new_kv)
        hidden = self._decoder.hidden(batch.ids, batch.positions, attention, batch.keep)
        attention.commit()
        logits = self._decoder.logits(hidden)
        return logits if batch.keep is not None or len(batch.sampled) == batch.n else logits[batch.sampled]

    def release(self, row: int) -> None:
        """The row is closed."""

    def stats(self) -> dict[str, float]:
        return {"calls": float(self._calls)}
