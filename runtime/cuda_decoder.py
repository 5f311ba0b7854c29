"""The Llama-family decoder of the device engine: stacked weights, fused kernels, attention by plan.

``CudaDecoder.hidden`` is one packed forward for any mix of rows; what differs between decode and prefill is the attention plan.
Nothing in here knows CUDA: the kernels are those of the ``DeviceOps`` it is given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kvalet.runtime.device_ops import DeviceOps
from kvalet.runtime.plain_weights import PlainLayer, PlainWeights
from kvalet.runtime.rope import rope_frequencies
from kvalet.runtime.spec import ModelSpec
from torch import Tensor
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, q [n, heads, dim], out of the same shape) -> out."""


def rope_table(spec: ModelSpec, positions: int, factors: Tensor | None, device: torch.device) -> Tensor:
    """float32 [positions, head_dim]: cosines, then sines, the attention factor of yarn in both."""
    frequencies = rope_frequencies(spec.rope, spec.head_dim, positions - 1, factors)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * spec.rope.attention_factor
    return table.float().to(device)


def matrix_bytes(weights: PlainWeights) -> int:
    """Bytes that one decode step reads: all matrices and the head, not the embedding table beside it."""
    layers = (matrix.nbytes for w in weights.layers for matrix in (w.qkv, w.out, w.gate_up, w.down))
    return weights.head.nbytes + sum(layers)


class CudaDecoder:
    """One model on one device. Holds no state of rows. Not thread-safe: driven from the engine thread."""

    def __init__(self, spec: ModelSpec, weights: PlainWeights, pool: Tensor, positions: int, ops: DeviceOps) -> None:
        """``pool``: see ``CudaPool.pages``. ``positions``: how many the rope table covers (one more than the context, for the
        surplus token)."""
        if pool.shape[1] != spec.n_layers or pool.shape[4:] != (spec.n_kv_heads, spec.head_dim):
            raise ValueError(f"the pool {tuple(pool.shape)} is not of this model's shape")
        self.spec, self.weights, self.pool, self.ops = spec, weights, pool, ops
        self.cos_sin = rope_table(spec, positions, weights.rope_factors, pool.device)
        self._still = torch.cat((torch.ones(1, spec.head_dim // 2), torch.zeros(1, spec.head_dim // 2)), dim=-1).to(pool.device)
        self._qk_norms = [_joined(layer) for layer in weights.layers]

    def hidden(self, ids: Tensor, positions: Tensor, dest: Tensor, attend: Attend) -> Tensor:
        """Final normed states [n, hidden] of ``n`` tokens; their K and V are written to the places ``dest``. int64 [n] each."""
        spec, ops = self.spec, self.ops
        n = ids.shape[0]
        residual = functional.embedding(ids, self.weights.embed)
        q = residual.new_empty(n, spec.n_q_heads, spec.head_dim)
        attended = torch.empty_like(q)
        activated = residual.new_empty(n, spec.ffn)
        layers = self.weights.layers
        nowhere = torch.zeros_like(positions) if spec.nope_layers else positions
        x = ops.rmsnorm(residual, layers[0].norm_in, spec.eps)
        for number, layer in enumerate(layers):
            qkv = functional.linear(x, layer.qkv, layer.qkv_bias)
            still = number in spec.nope_layers  # not rotated: the angle of position 0
            table, at = (self._still, nowhere) if still else (self.cos_sin, positions)
            ops.qkv_to_pages(qkv, self.pool, number, dest, at, table, self._qk_norms[number], spec.eps, q)
            x = functional.linear(attend(number, q, attended).view(n, -1), layer.out, layer.out_bias)
            ops.add_rmsnorm(x, residual, layer.norm_post, spec.eps)
            x = ops.silu_mul(functional.linear(x, layer.gate_up, layer.gate_up_bias), activated)
            x = functional.linear(x, layer.down, layer.down_bias)
            after = layers[number + 1].norm_in if number + 1 < len(layers) else self.weights.norm
            ops.add_rmsnorm(x, residual, after, spec.eps)
        return x

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, hidden] -> [n, vocab], in the weights' dtype; into ``out`` if it is given."""
        if out is None:
            return functional.linear(hidden, self.weights.head)
        return torch.mm(hidden, self.weights.head.t(), out=out)


def _joined(layer: PlainLayer) -> Tensor | None:
    """[2, head_dim]: weights of the q and the k norm, or None."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return torch.stack((layer.q_norm, layer.k_norm))
