"""One Triton kernel between the QKV projection and attention: q/k norm, rotary embedding, and K and V into their pages.

Plain twin: ``qkv_plain.qkv_to_pages_plain``. Both take the packed projection ``qkv`` [n, (Hq + 2 Hkv) * D], write K and V of
token i to place ``dest[i]`` (page * page_tokens + offset, int64) of the page-first pool and return q [n, Hq, D].
Rotary embedding in rotate-half order (Su et al. 2021, as Hugging Face folders store it); the norm is RMSNorm over head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(
    qkv, q_out, pool, dest, positions, cos_sin, norms,
    qkv_stride, q_stride, page_stride, layer_offset, kv_stride, token_stride,
    eps, page_tokens: tl.constexpr, n_q: tl.constexpr, n_kv: tl.constexpr, dim: tl.constexpr, norm: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = dim // 2
    lanes = tl.arange(0, half)
    source = qkv + token.to(tl.int64) * qkv_stride + head * dim
    first = tl.load(source + lanes).to(tl.float32)
    second = tl.load(source + half + lanes).to(tl.float32)
    if head < n_q + n_kv:
        if norm:
            scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / dim + eps)
            weight = norms + tl.where(head < n_q, 0, dim)
            first = (first * scale).to(qkv.dtype.element_ty).to(tl.float32) * tl.load(weight + lanes).to(tl.float32)
            second = (second * scale).to(qkv.dtype.element_ty).to(tl.float32) * tl.load(weight + half + lanes).to(tl.float32)
        angle = cos_sin + tl.load(positions + token).to(tl.int64) * dim
        cos = tl.load(angle + lanes)
        sin = tl.load(angle + half + lanes)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    place = tl.load(dest + token)
    if head < n_q:
        target = q_out + token.to(tl.int64) * q_stride + head * dim
    else:
        is_v = head >= n_q + n_kv
        kv_head = tl.where(is_v, head - n_q - n_kv, head - n_q)
        target = pool + (place // page_tokens) * page_stride + layer_offset + (place % page_tokens) * token_stride
        target += tl.where(is_v, kv_stride, 0) + kv_head * dim
    tl.store(target + lanes, first.to(q_out.dtype.element_ty))
    tl.store(target + half + lanes, second.to(q_out.dtype.element_ty))


def qkv_to_pages(
    qkv: Tensor, pool: Tensor, layer: int, dest: Tensor, positions: Tensor, cos_sin: Tensor,
    n_q_heads: int, norms: Tensor | None, eps: float, q_out: Tensor,
) -> Tensor:  # fmt: skip
    """``positions`` int32 [n]; ``cos_sin`` fp32 [positions, D] (cos, then sin, each D/2); ``norms`` [2, D]: weights of the q
    and the k norm, or None; ``dest`` int64 [n]."""
    _, _, _, page_tokens, n_kv, dim = pool.shape
    _kernel[(qkv.shape[0], n_q_heads + 2 * n_kv)](
        qkv, q_out, pool, dest, positions, cos_sin, cos_sin if norms is None else norms,
        qkv.stride(0), q_out.stride(0), pool.stride(0), layer * pool.stride(1), pool.stride(2), pool.stride(3),
        eps, page_tokens, n_q_heads, n_kv, dim, norms is not None, num_warps=1,
    )  # fmt: skip
    return q_out
