"""The plain twin of the kernel in ``qkv_triton``: q/k norm, rotary embedding, and K and V into their pages, in torch alone.

It defines what the kernel computes, so it runs anywhere: the GPU's tests compare the kernel with it, the CPU's tests compare it
with the CPU decoder's own norm and rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [n, heads, D] fp32; ``cos``, ``sin`` [n, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def qkv_to_pages_plain(
    qkv: Tensor, pool: Tensor, layer: int, dest: Tensor, positions: Tensor, cos_sin: Tensor,
    n_q_heads: int, norms: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Arguments as ``qkv_triton.qkv_to_pages``, on any device: ``positions`` int [n]; ``cos_sin`` fp32 [positions, D] (cosines,
    then sines, each D/2); ``norms`` [2, D]: weights of the q and the k norm, or None; ``dest`` int64 [n]. Computes in fp32,
    rounds the normed values and the result to ``qkv``'s dtype. Writes K and V to ``pool``, returns q [n, Hq, D]."""
    _, _, _, page_tokens, n_kv, dim = pool.shape
    heads = qkv.view(qkv.shape[0], n_q_heads + 2 * n_kv, dim)
    q, k, v = heads.split((n_q_heads, n_kv, n_kv), dim=1)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        y = x.float()
        if weight is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
            y = y.to(x.dtype).float() * weight.float()
        return rotate_half(y, cos, sin).to(x.dtype)

    page, offset = dest // page_tokens, dest % page_tokens
    pool[page, layer, 0, offset] = turned(k, norms[1] if norms is not None else None)
    pool[page, layer, 1, offset] = v
    return turned(q, norms[0] if norms is not None else None)
