"""Sampling on the device: temperature, min_p, top_k, top_p and the seeded Gumbel race for a whole batch, in torch alone.

The meaning is that of ``runtime.sampler`` (its plain twin), the noise that of ``runtime.noise``, bit for bit: a token depends
on the request's seed and position only, not on its neighbours, nor on where it is sampled beyond the rounding of exp and log.
Rows whose logits must be edited first (penalties, biases, bans, grammars) or that want log-probabilities are sampled on the
host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kvalet.runtime.noise import stream_start
from kvalet.runtime.plan import SamplingParams
from numpy.typing import NDArray
from torch import Tensor

FIELDS = 5
"""Rows of the packed parameters: start of the noise stream, temperature, top_k, top_p, log(min_p)."""
DRAW_ROWS = 32
"""Rows drawn at a time: the work of one row is some 100 bytes per token of the vocabulary."""
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's next token: its parameters, seed, and the position of the token to be drawn."""

    params: SamplingParams
    seed: int
    position: int


def ordered(params: SamplingParams) -> bool:
    """Whether the row's tokens must be put in order: top_k or top_p."""
    return params.top_k > 0 or params.top_p < 1.0


def pack(draws: Sequence[Draw], out: NDArray[np.int64]) -> None:
    """Write the parameters to ``out`` [FIELDS, >= len(draws)]; floats by their bits."""
    starts = [stream_start(draw.seed, draw.position) for draw in draws]
    params = [draw.params for draw in draws]
    out[0, : len(draws)] = np.array(starts, dtype=np.uint64).view(np.int64)
    numbers = np.array(
        [(p.temperature, p.top_p, math.log(p.min_p) if p.min_p > 0 else -math.inf) for p in params], dtype=np.float64
    ).reshape(-1, 3)
    out[2, : len(draws)] = [p.top_k for p in params]
    for row, column in ((1, 0), (3, 1), (4, 2)):
        out[row, : len(draws)] = np.ascontiguousarray(numbers[:, column]).view(np.int64)


def draw(logits: Tensor, packed: Tensor, *, in_order: bool) -> Tensor:
    """Ids int64 [n] for ``logits`` [n, vocab] (not changed) and ``packed`` int64 [FIELDS, n] on the same device. ``in_order``:
    any row has top_k or top_p. A row's logits must hold a finite value."""
    if logits.shape[0] > DRAW_ROWS:
        pairs = zip(logits.split(DRAW_ROWS), packed.split(DRAW_ROWS, dim=1), strict=True)
        return torch.cat([draw(part, of, in_order=in_order) for part, of in pairs])
    starts, top_k = packed[0], packed[2]
    temperature, top_p, min_p = (packed[row].contiguous().view(torch.float64) for row in (1, 3, 4))
    work = logits.float()
    uniform = row_uniforms(starts, logits.shape[1])
    if not in_order:
        scores = (work - work.amax(1, keepdim=True)).div_(temperature.float()[:, None])
        scores.masked_fill_(scores < min_p.float()[:, None], -math.inf)
        return scores.sub_(uniform.neg_().log1p_().neg_().log_()).argmax(dim=1)
    values, ids = work.sort(dim=1, descending=True, stable=True)
    scaled = (values.double() - values[:, :1].double()) / temperature[:, None]
    kept = kept_prefix(scaled, top_k, top_p, min_p)
    noise = uniform.gather(1, ids).double()
    scores = (scaled - (-torch.log1p(-noise)).log_()).masked_fill_(~kept, -math.inf)
    return ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


def kept_prefix(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens stay, bool [n, vocab], for (logit - largest) / temperature in falling order, float64. top_p counts of what
    min_p and top_k left."""
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    kept = (scaled >= min_p[:, None]) & (scaled > -math.inf)
    kept &= (top_k[:, None] == 0) | (rank < top_k[:, None])
    weights = torch.where(kept, scaled.exp(), 0.0)
    before = weights.cumsum(dim=1).sub_(weights)
    enough = (top_p[:, None] * weights.sum(dim=1, keepdim=True)).masked_fill_(top_p[:, None] >= 1.0, math.inf)
    return kept & ((before < enough) | (rank == 0))


def row_uniforms(starts: Tensor, n: int) -> Tensor:
    """``noise.row_uniform`` of every row, float32 [rows, n], for ``starts`` int64 [rows] (``noise.stream_start``)."""
    pairs = torch.arange(1, (n + 1) // 2 + 1, dtype=torch.int64, device=starts.device) * _signed(_GOLDEN)
    x = starts[:, None] + pairs
    x ^= _shifted(x, 30)
    x *= _signed(_MIX1)
    x ^= _shifted(x, 27)
    x *= _signed(_MIX2)
    x ^= _shifted(x, 31)
    halves = torch.stack((x & 0xFFFFFFFF, _shifted(x, 32)), dim=-1).flatten(1)[:, :n]
    u = halves.float().add_(0.5).mul_(2.0**-32)
    return u.clamp_(max=1.0 - 2.0**-24)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right of 64-bit words in int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
