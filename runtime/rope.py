"""Rotary position embedding, rotate-half order, as tables of cosines and signed sines.

With ``rolled`` = x with its halves swapped, rotating is ``x * cos + rolled * sin``, where the first half of ``sin`` is negated.
Source: Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rope:
    """``cos`` and ``sin`` float32 [positions, head_dim]; 2 KB per position for heads of 256."""

    def __init__(self, head_dim: int, base: float, positions: int, scale: float = 1.0, factors: Tensor | None = None) -> None:
        """``scale`` divides positions; ``factors`` [head_dim / 2] divide the frequencies (``rope_freqs`` of a GGUF)."""
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        if factors is not None:
            frequencies = frequencies / factors.double()
        angles = torch.outer(torch.arange(positions, dtype=torch.float64) / scale, frequencies)
        cos, sin = angles.cos().float(), angles.sin().float()
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = torch.cat((-sin, sin), dim=-1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of ``positions`` int64 [n]: two float32 [n, 1, head_dim]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [n, heads, head_dim] rotated, in x's dtype; computed in float32."""
    rolled = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, rolled, sin).to(x.dtype)
