"""Rotary position embedding, rotate-half order, as tables of cosines and signed sines.

With ``rolled`` = x with its halves swapped, rotating is ``x * cos + rolled * sin``, where the first half of ``sin`` is negated.
Source: Su et al., "RoFormer", 2021; the scalings: ``runtime.rope_spec``.
"""

from __future__ import annotations

import math

import torch
from kvalet.runtime.rope_spec import RopeSpec
from torch import Tensor


def rope_frequencies(rope: RopeSpec, head_dim: int, context_tokens: int = 0, factors: Tensor | None = None) -> Tensor:
    """Radians per position of each pair, float64 [head_dim / 2].

    ``context_tokens``: what the engine serves; only "dynamic" depends on it. A page's KV may depend on nothing but the tokens
    before it, so its base is that of a sequence of the whole context, for every position, and never moves; up to the model's
    own context that is no scaling at all. ``factors`` [head_dim / 2] divide the frequencies (``rope_freqs`` of a GGUF).
    """
    base = rope.base
    if rope.kind == "dynamic" and context_tokens > rope.original_context:
        stretch = rope.factor * context_tokens / rope.original_context - (rope.factor - 1)
        base *= stretch ** (head_dim / max(1, head_dim - 2))
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, frequencies, head_dim)
    return frequencies if factors is None else frequencies / factors.double().to(frequencies.device)


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Short waves stay, long ones are divided by the factor, those between are a mixture."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = share.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn(rope: RopeSpec, frequencies: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn more than ``beta_fast`` times in the original context stay, those below ``beta_slow`` are divided by the
    factor, a linear ramp over the pairs between."""

    def pair(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / rope.factor * ramp


class Rope:
    """``cos`` and ``sin`` float32 [positions, head_dim]; 2 KB per position for heads of 256."""

    def __init__(
        self, head_dim: int, rope: RopeSpec, positions: int, factors: Tensor | None = None, context_tokens: int = 0
    ) -> None:
        """``factors`` and ``context_tokens``: see ``rope_frequencies``."""
        frequencies = rope_frequencies(rope, head_dim, context_tokens, factors)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
        cos, sin = angles.cos(), angles.sin()
        if rope.attention_factor != 1.0:
            cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
        cos, sin = cos.float(), sin.float()
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = torch.cat((-sin, sin), dim=-1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of ``positions`` int64 [n]: two float32 [n, 1, head_dim]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [n, heads, head_dim] rotated, in x's dtype; computed in float32."""
    rolled = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, rolled, sin).to(x.dtype)
