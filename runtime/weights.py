"""The weights of a model, from its tensors to what the decoder on the CPU multiplies with.

Per layer q, k, v are one matrix and gate, up another, so that a layer is four products. Peak memory is the weights once and one
matrix more, beside the embedding, which a tied head holds a second time in the order of its product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvalet.runtime.calibrate import measured_switch_rows
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf_tensors import GgufTensors
from kvalet.runtime.linear import Int4, Int8, Int8Rows, Linear, Switched, dense_linear, integer_products
from kvalet.runtime.plain_weights import read_rope_factors, read_tensor, refuse_surplus, stacked_bias, stacked_matrix
from kvalet.runtime.spec import ModelSpec
from kvalet.runtime.tensor_source import EMBED, HEAD, NORM, PRODUCTS, TensorSource, columns_of, rows_of
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(slots=True)
class LayerWeights:
    """One layer. Norms [hidden]; ``q_norm``/``k_norm`` [head_dim] or None."""

    norm_in: Tensor
    qkv: Linear
    out: Linear
    norm_post: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """``embed`` [vocab, hidden] in ``dtype`` (that of all activations); ``path``: which weights compute ("fp32", "bf16",
    "int4", "auto"); ``switch_rows``: with "auto", int4 computes calls of at most so many rows, and int8 the head of at most
    ``head_switch_rows``. ``rope_factors`` [head_dim / 2] divide the frequencies, None: no such tensor."""

    dtype: torch.dtype
    path: str
    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Linear
    switch_rows: int = 0
    head_switch_rows: int = 0
    rope_factors: Tensor | None = None

    def calibrate(self, hidden: int) -> None:
        """Measure which of two kinds of product serves how many rows, where there are two."""
        pairs = [layer.gate_up for layer in self.layers if isinstance(layer.gate_up, Switched)]
        if pairs:
            self.switch_rows = measured_switch_rows([p.few for p in pairs], [p.many for p in pairs], hidden)
        for layer in self.layers:
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
                if isinstance(product, Switched):
                    product.switch_rows = self.switch_rows
        if isinstance(self.head, Switched):
            self.head_switch_rows = measured_switch_rows([self.head.few], [self.head.many], hidden, repeats=3)
            self.head.switch_rows = self.head_switch_rows

    @property
    def nbytes(self) -> int:
        products = (p for w in self.layers for p in (w.qkv, w.out, w.gate_up, w.down))
        return self.embed.nbytes + self.head.nbytes + sum(p.nbytes for p in products)


def load_weights(source: TensorSource, spec: ModelSpec, mode: str) -> ModelWeights:
    """Weights for ``mode`` ("auto", "bf16", "fp32", "int4").

    Raises ModelError for a missing, surplus or misshapen tensor, by name, and for "int4" where there are no 4-bit blocks (only
    GGUF files have them); "auto" is then bf16.
    """
    refuse_surplus(source)
    blocks = source if isinstance(source, GgufTensors) and source.has_nibbles() else None
    if mode == "int4" and blocks is None:
        raise ModelError(f"{source.label} holds no Q4_0 or Q4_1 matrices, so --weights int4 is not possible")
    path = "bf16" if mode == "auto" and blocks is None else mode
    weights = _Loader(source, spec, path, blocks if path in ("int4", "auto") else None).load()
    weights.calibrate(spec.hidden)
    return weights


@dataclass(frozen=True, slots=True)
class _Loader:
    """``blocks``: the file whose 4-bit blocks are computed with, None where none are."""

    source: TensorSource
    spec: ModelSpec
    path: str
    blocks: GgufTensors | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.path == "fp32" else torch.bfloat16

    def tensor(self, role: str, *shape: int) -> Tensor:
        return read_tensor(self.source, role, shape, self.dtype, CPU)

    def load(self) -> ModelWeights:
        spec = self.spec
        embed, head = self.tables()
        return ModelWeights(
            dtype=self.dtype,
            path=self.path,
            embed=embed,
            layers=[self.layer(number) for number in range(spec.n_layers)],
            norm=self.tensor(NORM, spec.hidden),
            head=head,
            rope_factors=read_rope_factors(self.source, spec),
        )

    def tables(self) -> tuple[Tensor, Linear]:
        """Embedding and head."""
        shape = (self.spec.vocab, self.spec.hidden)
        embed = self.tensor(EMBED, *shape)
        role = EMBED if self.spec.tied else HEAD
        own = embed if self.spec.tied else self.tensor(HEAD, *shape)
        if self.blocks is None:
            return embed, dense_linear(own)
        exact = self.blocks.values(role, shape)
        if self.path == "auto" and integer_products():
            return embed, Int8Rows(exact)
        int8 = Int8(exact)
        return embed, int8 if self.path == "int4" else Switched(int8, dense_linear(own))

    def layer(self, number: int) -> LayerWeights:
        spec, at = self.spec, f"blk.{number}."
        norms = [self.tensor(f"{at}{name}.weight", spec.hidden) for name in ("attn_norm", "ffn_norm")]
        qk = [self.tensor(f"{at}{name}.weight", spec.head_dim) for name in ("attn_q_norm", "attn_k_norm") if spec.qk_norm]
        return LayerWeights(
            norm_in=norms[0],
            norm_post=norms[1],
            q_norm=qk[0] if qk else None,
            k_norm=qk[1] if qk else None,
            **{product: self.product(number, product) for product in PRODUCTS},
        )

    def product(self, number: int, product: str) -> Linear:
        bias = stacked_bias(self.source, self.spec, number, product, self.dtype, CPU)
        if self.path == "int4":
            return self.int4(number, product, bias)
        dense = dense_linear(stacked_matrix(self.source, self.spec, number, product, self.dtype, CPU), bias)
        return dense if self.blocks is None else Switched(self.int4(number, product, bias), dense)

    def int4(self, number: int, product: str, bias: Tensor | None) -> Linear:
        assert self.blocks is not None
        columns = columns_of(self.spec, product)
        found = [
            self.blocks.int4(f"blk.{number}.{part}.weight", (rows_of(self.spec, part), columns)) for part in PRODUCTS[product]
        ]
        return Int4(torch.cat([q for q, _ in found]), torch.cat([s for _, s in found], dim=1), bias)
