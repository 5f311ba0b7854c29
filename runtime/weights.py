"""The weights of a model, from the tensors of its file to what the decoder multiplies with.

Per layer q, k, v are one matrix and gate, up another, so that a layer is four products. q and k rows are brought from the
file's interleaved rope order to rotate-half. The head is the embedding exactly when the file has no ``output.weight``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from kvalet.runtime import dequant
from kvalet.runtime.calibrate import measured_switch_rows
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf import GgufFile, TensorInfo
from kvalet.runtime.linear import Int4, Int8, Int8Rows, Linear, Switched, dense_linear, integer_products
from kvalet.runtime.spec import INTERLEAVED_ROPE, ModelSpec
from torch import Tensor

IGNORED = frozenset({"rope_freqs.weight"})
"""Global tensors that are no matrix of the decoder: the rope factors are applied in ``rope``."""


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


def load_weights(file: GgufFile, spec: ModelSpec, mode: str) -> ModelWeights:
    """Weights for ``mode`` ("auto", "bf16", "fp32", "int4").

    Raises ModelError for a missing, surplus or misshapen tensor, by name, and for "int4" where the file has no 4-bit blocks;
    "auto" is then bf16.
    """
    loader = _Loader(file, spec)
    quantised = loader.has_nibbles()
    if mode == "int4" and not quantised:
        raise ModelError(f"model file {file.path} holds no Q4_0 or Q4_1 matrices, so --weights int4 is not possible")
    loader.path = "bf16" if mode == "auto" and not quantised else mode
    weights = loader.load()
    weights.calibrate(spec.hidden)
    surplus = sorted(file.tensors.keys() - loader.used - IGNORED)
    if surplus:
        raise ModelError(f"model file {file.path} has tensor {surplus[0]} ({len(surplus)} such), which is not supported")
    return weights


@dataclass(slots=True)
class _Loader:
    file: GgufFile
    spec: ModelSpec
    path: str = "bf16"
    used: set[str] = field(default_factory=set)

    def has_nibbles(self) -> bool:
        """All matrices of the layers can go through the int4 product."""
        kinds = {i.kind for i in self.file.tensors.values() if i.name.startswith("blk.") and len(i.shape) == 2}
        return bool(kinds) and kinds <= {dequant.Q4_0, dequant.Q4_1} and self.spec.hidden % 32 == 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.path == "fp32" else torch.bfloat16

    def info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.file.tensors.get(name)
        if info is None:
            raise ModelError(f"model file {self.file.path} has no tensor {name}")
        if info.shape != shape:
            raise ModelError(f"tensor {name} of {self.file.path} has shape {list(info.shape)}, not {list(shape)}")
        self.used.add(name)
        return info

    def values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        info = self.info(name, shape)
        return dequant.dequantize(self.file.data(name), info.kind, shape, name)

    def vector(self, name: str, size: int) -> Tensor:
        return self.values(name, (size,)).to(self.dtype)

    def optional(self, name: str, size: int) -> Tensor | None:
        return self.vector(name, size) if name in self.file.tensors else None

    def load(self) -> ModelWeights:
        spec = self.spec
        table = self.values("token_embd.weight", (spec.vocab, spec.hidden))
        embed = table.to(self.dtype)
        own = None if spec.tied else self.values("output.weight", (spec.vocab, spec.hidden))
        head = self.head(embed if own is None else own.to(self.dtype), table if own is None else own)
        factors = self.file.tensors.get("rope_freqs.weight")
        return ModelWeights(
            dtype=self.dtype,
            path=self.path,
            embed=embed,
            layers=[self.layer(f"blk.{i}.") for i in range(spec.n_layers)],
            norm=self.vector("output_norm.weight", spec.hidden),
            head=head,
            rope_factors=None if factors is None else self.values("rope_freqs.weight", (spec.head_dim // 2,)),
        )

    def layer(self, prefix: str) -> LayerWeights:
        spec = self.spec
        q_width, kv_width = spec.n_q_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        heads = {"attn_q": (q_width, spec.n_q_heads), "attn_k": (kv_width, spec.n_kv_heads), "attn_v": (kv_width, 0)}
        return LayerWeights(
            norm_in=self.vector(prefix + "attn_norm.weight", spec.hidden),
            qkv=self.product(prefix, heads, spec.hidden),
            out=self.product(prefix, {"attn_output": (spec.hidden, 0)}, q_width),
            norm_post=self.vector(prefix + "ffn_norm.weight", spec.hidden),
            gate_up=self.product(prefix, {"ffn_gate": (spec.ffn, 0), "ffn_up": (spec.ffn, 0)}, spec.hidden),
            down=self.product(prefix, {"ffn_down": (spec.hidden, 0)}, spec.ffn),
            q_norm=self.optional(prefix + "attn_q_norm.weight", spec.head_dim),
            k_norm=self.optional(prefix + "attn_k_norm.weight", spec.head_dim),
        )

    def product(self, prefix: str, parts: dict[str, tuple[int, int]], columns: int) -> Linear:
        """One product of the stacked ``parts``: name -> (rows, heads whose rows are in interleaved order; 0: none)."""
        interleaved = INTERLEAVED_ROPE[self.spec.architecture]
        orders = {name: rope_order(rows, heads if interleaved else 0) for name, (rows, heads) in parts.items()}
        bias = self.bias(prefix, parts, orders)
        dense = None if self.path == "int4" else self.dense(prefix, parts, orders, columns, bias)
        if self.path not in ("int4", "auto"):
            assert dense is not None
            return dense
        int4 = self.int4(prefix, parts, orders, columns, bias)
        return int4 if dense is None else Switched(int4, dense)

    def dense(
        self, prefix: str, parts: dict[str, tuple[int, int]], orders: dict[str, Tensor], columns: int, bias: Tensor | None
    ) -> Linear:
        stacked = [
            self.values(f"{prefix}{name}.weight", (rows, columns))[orders[name]].to(self.dtype)
            for name, (rows, _) in parts.items()
        ]
        return dense_linear(torch.cat(stacked) if len(stacked) > 1 else stacked[0], bias)

    def int4(
        self, prefix: str, parts: dict[str, tuple[int, int]], orders: dict[str, Tensor], columns: int, bias: Tensor | None
    ) -> Linear:
        quants, scales = [], []
        for name, (rows, _) in parts.items():
            info = self.info(f"{prefix}{name}.weight", (rows, columns))
            q, scale_zero = dequant.int4_parts(self.file.data(info.name), info.kind, (rows, columns))
            quants.append(q[orders[name]])
            scales.append(scale_zero[:, orders[name]])
        return Int4(torch.cat(quants), torch.cat(scales, dim=1), bias)

    def bias(self, prefix: str, parts: dict[str, tuple[int, int]], orders: dict[str, Tensor]) -> Tensor | None:
        """The stacked biases; zeros where only some parts have one; None where none has."""
        names = [f"{prefix}{name}.bias" for name in parts]
        if not any(name in self.file.tensors for name in names):
            return None
        stacked = []
        for name, (part, (rows, _)) in zip(names, parts.items(), strict=True):
            known = self.optional(name, rows)
            stacked.append(torch.zeros(rows, dtype=self.dtype) if known is None else known[orders[part]])
        return torch.cat(stacked)

    def head(self, weight: Tensor, exact: Tensor) -> Linear:
        if self.path in ("fp32", "bf16"):
            return dense_linear(weight)
        if self.path == "auto" and integer_products():
            return Int8Rows(exact)
        int8 = Int8(exact)
        if self.path == "int4":
            return int8
        return Switched(int8, dense_linear(weight))


def rope_order(rows: int, interleaved_heads: int) -> Tensor:
    """Order of rows that brings interleaved rope pairs (2i, 2i + 1) of each head to rotate-half (i, i + dim / 2)."""
    order = torch.arange(rows)
    if interleaved_heads:
        order = order.view(interleaved_heads, -1, 2).transpose(1, 2).reshape(rows)
    return order
