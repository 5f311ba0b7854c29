"""One step's segments through the model: split into calls, attention chosen, KV written, logits of the sampled positions.

Without ``deterministic`` everything is one call. With it the bits of a row may depend on nothing but the row: decodes go in
calls of one fixed row count, padded with tokens on the scratch page, and each prefill piece alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from kvalet.runtime.arena import Arena, Copy
from kvalet.runtime.attn_arena import ArenaAttention
from kvalet.runtime.batch import Segment, make_batch
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
        self._group = decoder.spec.n_q_heads // decoder.spec.n_kv_heads
        self._windows = decoder.spec.windows if decoder.spec.window_layers else ()
        self.arena = Arena(geometry, config.arena_tokens)
        self._calls = 0

    def __call__(self, segments: Sequence[Segment]) -> Tensor:
        """Logits [sampled, vocab] of the segments that sample, in order. Raises EngineError beyond ``max_step_tokens``."""
        n = sum(segment.n for segment in segments)
        if n > self._max_tokens:
            raise EngineError(f"{n} tokens in one step; the engine was made for {self._max_tokens}")
        parts: dict[int, Tensor] = {}
        for indices, pad_to in self._calls_of(segments):
            logits = self.run([segments[i] for i in indices], pad_to)
            if len(indices) == len(segments):
                return logits
            parts.update(zip((i for i in indices if segments[i].sample), logits, strict=True))
        return torch.stack([parts[i] for i in sorted(parts)]) if parts else torch.empty(0, self._decoder.spec.vocab)

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

    def run(self, segments: Sequence[Segment], pad_to: int = 0) -> Tensor:
        """One call: its KV is written to the pages; returns the logits of its sampled positions, in order of ``segments``."""
        self._calls += 1
        copies = self._copies(segments)
        order = sorted(range(len(segments)), key=lambda i: _place_in_call(copies[i]))
        batch = make_batch([segments[i] for i in order], self._pool.geometry.page_tokens, pad_to)
        sampling = [i for i in order if segments[i].sample]
        if sampling != sorted(sampling):
            back = torch.tensor(sampling).argsort()
            batch = replace(batch, sampled=batch.sampled[back], keep=None if pad_to else batch.sampled[back])
        ordered = [copies[i] for i in order]
        attention = ArenaAttention(self._pool, batch, self._new_kv, ordered, self._group, self.arena.transposed, self._windows)
        hidden = self._decoder.hidden(batch.ids, batch.positions, attention, batch.keep)
        attention.commit()
        logits = self._decoder.logits(hidden)
        return logits[batch.sampled] if pad_to else logits

    def _copies(self, segments: Sequence[Segment]) -> list[Copy | None]:
        """The arena's copies of the decodes, one per segment."""
        copies: list[Copy | None] = [None] * len(segments)
        decodes = [i for i, segment in enumerate(segments) if segment.decode and segment.n == 1]
        wanted = [(segments[i].row, segments[i].start, segments[i].pages) for i in decodes]
        for i, copy in zip(decodes, self.arena.ready(self._pool, wanted), strict=True):
            copies[i] = copy
        return copies

    def release(self, row: int) -> None:
        """The row is closed: its copy goes."""
        self.arena.release(row)

    def stats(self) -> dict[str, float]:
        """Counters since the start; ``int4_rows``: calls of at most so many tokens compute from int4 weights (auto only)."""
        switch_rows = self._decoder.weights.switch_rows
        return {"calls": float(self._calls), "arena_fills": float(self.arena.fills), "int4_rows": float(switch_rows)}


def _place_in_call(copy: Copy | None) -> tuple[int, int]:
    """Decodes with copies first, by sheet and slot, so that a sheet's rows are neighbours in the call."""
    return (1 << 30, 0) if copy is None else (copy.sheet.first_block, copy.slot)
