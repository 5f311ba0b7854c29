"""The Llama-family decoder on one CUDA device: packed weights, fused kernels, attention by plan; decode in CUDA graphs.

``CudaDecoder.hidden`` is one packed forward for any mix of rows; what differs between decode and prefill is the attention plan.
Weights are packed per layer (q, k, v in one matrix; gate, up in one) so that a layer is four matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kvalet.runtime import attn_flashinfer as fi
from kvalet.runtime.attn_flashinfer import PrefillPlan
from kvalet.runtime.qkv_triton import qkv_to_pages
from torch import Tensor
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, q [n, heads, dim], out of the same shape) -> out."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a Llama-family decoder. ``qk_norm``: RMSNorm of q and k per head (Qwen3)."""

    n_layers: int
    hidden: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float = 1e-6
    rope_base: float = 1e6
    qk_norm: bool = False
    tied: bool = False

    @property
    def qkv_width(self) -> int:
        return (self.n_q_heads + 2 * self.n_kv_heads) * self.head_dim


QWEN3_8B = DecoderShape(36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True)


@dataclass(slots=True)
class LayerWeights:
    """Matrices as stored for ``x @ w.T``: qkv [qkv_width, hidden], out [hidden, heads * dim], gate_up [2 * ffn, hidden],
    down [hidden, ffn]; norms [hidden]; qk_norm [2, head_dim] (q, then k) or None."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm_in: Tensor
    norm_post: Tensor
    qk_norm: Tensor | None = None


@dataclass(slots=True)
class PackedWeights:
    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: list[LayerWeights]

    @property
    def matrix_bytes(self) -> int:
        """Bytes that one decode step reads: all matrices and the head, not the embedding table."""
        return self.head.nbytes + sum(
            w.nbytes for layer in self.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )


def random_weights(
    shape: DecoderShape, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> PackedWeights:
    """Random weights of a real shape (``--load-format dummy``): scaled so that activations stay finite at any depth."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        w = torch.empty(rows, columns, dtype=dtype, device=device)
        return w.normal_(0, 1 / math.sqrt(columns), generator=generator)

    def ones(n: int) -> Tensor:
        return torch.ones(n, dtype=dtype, device=device)

    layers = [
        LayerWeights(
            matrix(shape.qkv_width, shape.hidden),
            matrix(shape.hidden, shape.n_q_heads * shape.head_dim),
            matrix(2 * shape.ffn, shape.hidden),
            matrix(shape.hidden, shape.ffn),
            ones(shape.hidden),
            ones(shape.hidden),
            ones(2 * shape.head_dim).view(2, -1) if shape.qk_norm else None,
        )
        for _ in range(shape.n_layers)
    ]
    embed = matrix(shape.vocab, shape.hidden)
    return PackedWeights(embed, embed if shape.tied else matrix(shape.vocab, shape.hidden), ones(shape.hidden), layers)


def rope_table(head_dim: int, base: float, positions: int, device: torch.device) -> Tensor:
    """fp32 [positions, head_dim]: cosines, then sines."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(device)


class CudaDecoder:
    """One model on one CUDA device. Not thread-safe: driven from the engine thread."""

    def __init__(self, shape: DecoderShape, weights: PackedWeights, pool: Tensor, max_positions: int) -> None:
        if pool.shape[1] != shape.n_layers or pool.shape[4:] != (shape.n_kv_heads, shape.head_dim):
            raise ValueError(f"the pool {tuple(pool.shape)} is not of this model's shape")
        self.shape, self.weights, self.pool = shape, weights, pool
        self.cos_sin = rope_table(shape.head_dim, shape.rope_base, max_positions, pool.device)

    def hidden(self, ids: Tensor, positions: Tensor, dest: Tensor, attend: Attend) -> Tensor:
        """Final normed states [n, hidden] of ``n`` tokens; their K and V are written to the places ``dest``."""
        shape = self.shape
        n = ids.shape[0]
        residual = functional.embedding(ids, self.weights.embed)
        q = residual.new_empty(n, shape.n_q_heads, shape.head_dim)
        attended = torch.empty_like(q)
        activated = residual.new_empty(n, shape.ffn)
        layers = self.weights.layers
        x = fi.rmsnorm(residual, layers[0].norm_in, shape.eps)
        for number, layer in enumerate(layers):
            qkv = functional.linear(x, layer.qkv)
            qkv_to_pages(qkv, self.pool, number, dest, positions, self.cos_sin, shape.n_q_heads, layer.qk_norm, shape.eps, q)
            x = functional.linear(attend(number, q, attended).view(n, -1), layer.out)
            fi.add_rmsnorm(x, residual, layer.norm_post, shape.eps)
            x = functional.linear(fi.silu_mul(functional.linear(x, layer.gate_up), activated), layer.down)
            after = layers[number + 1].norm_in if number + 1 < len(layers) else self.weights.norm
            fi.add_rmsnorm(x, residual, after, shape.eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab], in the weights' dtype."""
        return functional.linear(hidden, self.weights.head)


def prefill(decoder: CudaDecoder, plan: PrefillPlan, ids: Tensor, positions: Tensor, dest: Tensor) -> Tensor:
    """Hidden states of a packed prefill whose plan is set."""
    return decoder.hidden(ids, positions, dest, plan.run)
