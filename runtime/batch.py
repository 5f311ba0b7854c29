"""From a step's rows to the packed tensors of one call of the model.

A call holds segments, one per row, standing one after the other: a decode (one token, or the forced run of a grammar) or a
prefill piece. Pure of model and pool: ints in, index tensors out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvalet.runtime.errors import EngineError
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One row's part of a call: ``ids`` are fed at positions ``start`` .. ``start + n - 1``. ``pages``: its page table, which
    covers them. ``row``: the row's name, for its contiguous copy. ``sample``: the last position's logits are wanted."""

    row: int
    start: int
    ids: tuple[int, ...]
    pages: tuple[int, ...]
    decode: bool
    sample: bool

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a segment's tokens stand in the packed call: [begin, end)."""

    segment: Segment
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One call. int64 tensors: ``ids``, ``positions`` and ``places`` (page * page_tokens + offset; padding writes into page 0)
    [n]; ``sampled``: packed index of each sampled segment's last token, in order of segments; ``keep``: the tokens whose final
    state is computed (None: all, then ``sampled`` picks from them). ``padding``: tokens at the end that belong to nobody."""

    spans: tuple[Span, ...]
    ids: Tensor
    positions: Tensor
    places: Tensor
    sampled: Tensor
    keep: Tensor | None
    padding: int = 0

    @property
    def n(self) -> int:
        return self.ids.shape[0]


def make_batch(segments: Sequence[Segment], page_tokens: int, pad_to: int = 0) -> Batch:
    """Pack the segments. ``pad_to`` > 0 adds padding up to so many tokens and computes the final state of all of them, so that
    no product's row count depends on who is in the call.

    Raises EngineError for a page table that does not cover what is fed, and for more tokens than ``pad_to``.
    """
    ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    sampled: list[int] = []
    spans = []
    for segment in segments:
        if segment.end > len(segment.pages) * page_tokens or segment.n < 1 or segment.start < 0:
            raise EngineError(f"row {segment.row}: {len(segment.pages)} pages do not cover [{segment.start}, {segment.end})")
        spans.append(Span(segment, len(ids), len(ids) + segment.n))
        ids += segment.ids
        for position in range(segment.start, segment.end):
            positions.append(position)
            places.append(segment.pages[position // page_tokens] * page_tokens + position % page_tokens)
        if segment.sample:
            sampled.append(len(ids) - 1)
    padding = max(0, pad_to - len(ids)) if pad_to else 0
    if pad_to and len(ids) > pad_to:
        raise EngineError(f"{len(ids)} tokens in a call of {pad_to}")
    for filled in (ids, positions, places):
        filled.extend([0] * padding)
    keep = None if pad_to or len(sampled) == len(ids) else torch.tensor(sampled, dtype=torch.int64)
    return Batch(
        spans=tuple(spans),
        ids=torch.tensor(ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        places=torch.tensor(places, dtype=torch.int64),
        sampled=torch.tensor(sampled, dtype=torch.int64),
        keep=keep,
        padding=padding,
    )
