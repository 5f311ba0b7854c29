"""The Llama-family decoder: one packed forward pass for any mix of rows.

Tokens of all rows stand one after the other; only attention knows which belong together. It is handed in as ``Attend`` and also
keeps the new K and V.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kvalet.runtime.rope import Rope, rotate
from kvalet.runtime.spec import ModelSpec
from kvalet.runtime.weights import LayerWeights, ModelWeights
from torch import Tensor
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [n, q_heads, dim], k [n, kv_heads, dim], v like k) -> [n, q_heads * dim]; q and k are rotated if the layer is."""


class Decoder:
    """One model's weights and forward pass. Holds no state of rows."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, positions: int) -> None:
        """``positions``: how many the rope tables cover (one more than the context, for the surplus token)."""
        self.spec = spec
        self.weights = weights
        self.rope = Rope(spec.head_dim, spec.rope, positions, weights.rope_factors, positions - 1)

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """Final normed states [kept, hidden] of the tokens ``ids`` int64 [n] at ``positions`` int64 [n].

        ``keep`` int64 [kept]: the tokens whose state is wanted (None: all). The last layer is computed for these only, after
        its K and V went to ``attend`` for all.
        """
        layers = self.weights.layers
        cos, sin = self.rope.at(positions)
        nope = self.spec.nope_layers
        x = functional.embedding(ids, self.weights.embed)
        for number, layer in enumerate(layers):
            attended = attend(number, *self._qkv(layer, x, cos, sin, number not in nope))
            if number == len(layers) - 1 and keep is not None:
                x, attended = x[keep], attended[keep]
            if x.shape[0]:
                x = self._rest(layer, x, attended)
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab] in the weights' dtype."""
        if not hidden.shape[0]:
            return hidden.new_empty(0, self.spec.vocab)
        return self.weights.head(hidden)

    def _qkv(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, rotated_layer: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, n = self.spec, x.shape[0]
        qkv = layer.qkv(self._norm(x, layer.norm_in)).view(n, -1, spec.head_dim)
        n_rotated = spec.n_q_heads + spec.n_kv_heads
        rotated, v = qkv[:, :n_rotated], qkv[:, n_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(rotated[:, : spec.n_q_heads], layer.q_norm)
            rotated = torch.cat((q, self._norm(rotated[:, spec.n_q_heads :], layer.k_norm)), dim=1)
        if rotated_layer:
            rotated = rotate(rotated, cos, sin)
        return rotated[:, : spec.n_q_heads], rotated[:, spec.n_q_heads :], v

    def _rest(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """From the attention's result to the end of the layer."""
        ffn = self.spec.ffn
        x = x + layer.out(attended)
        gate_up = layer.gate_up(self._norm(x, layer.norm_post))
        return x.add_(layer.down(functional.silu(gate_up[:, :ffn]).mul_(gate_up[:, ffn:])))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.eps)
