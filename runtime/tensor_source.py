"""Where the tensors of a model come from, behind one small interface: a GGUF file, a folder of safetensors, or a seed.

Tensors are asked for by role, with the names that GGUF gives them: ``token_embd.weight``, ``output_norm.weight``,
``output.weight`` (the head, where it is not the embedding) and per layer ``blk.N.`` with attn_norm, attn_q, attn_k, attn_v,
attn_output, attn_q_norm, attn_k_norm, ffn_norm, ffn_gate, ffn_up, ffn_down; biases end in ``.bias``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvalet.runtime.spec import ModelSpec
from torch import Tensor

EMBED, NORM, HEAD, ROPE_FACTORS = "token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"


class TensorSource(Protocol):
    """``label``: how messages call it ("model file /path")."""

    label: str

    def __contains__(self, role: str) -> bool: ...

    def load(self, role: str, out: Tensor) -> None:
        """Fill ``out`` (any float dtype, any device, contiguous or a view) with the tensor, q and k rows in rotate-half order.

        Raises ModelError naming the tensor if it is missing, cut short, of another shape or of a type that cannot be read;
        never fills with anything else."""

    def surplus(self) -> list[str]:
        """Names in the source that are no tensor of the decoder and were not asked for, sorted; known harmless ones left
        out."""


def rows_of(spec: ModelSpec, part: str) -> int:
    """Output rows of one matrix of a layer."""
    q_width, kv_width = spec.n_q_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    rows = {"attn_q": q_width, "attn_k": kv_width, "attn_v": kv_width, "attn_output": spec.hidden}
    return (rows | {"ffn_gate": spec.ffn, "ffn_up": spec.ffn, "ffn_down": spec.hidden})[part]


PRODUCTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "out": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
"""The four products of a layer and the matrices that are stacked for each."""


def columns_of(spec: ModelSpec, product: str) -> int:
    """Input columns of a product."""
    return {"out": spec.n_q_heads * spec.head_dim, "down": spec.ffn}.get(product, spec.hidden)


def has_bias(spec: ModelSpec, product: str) -> bool:
    return {"qkv": spec.qkv_bias, "out": spec.out_bias}.get(product, spec.mlp_bias)


def roles(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of such a model: (role, shape)."""
    yield EMBED, (spec.vocab, spec.hidden)
    yield NORM, (spec.hidden,)
    if not spec.tied:
        yield HEAD, (spec.vocab, spec.hidden)
    for layer in range(spec.n_layers):
        at = f"blk.{layer}."
        yield at + "attn_norm.weight", (spec.hidden,)
        yield at + "ffn_norm.weight", (spec.hidden,)
        if spec.qk_norm:
            yield at + "attn_q_norm.weight", (spec.head_dim,)
            yield at + "attn_k_norm.weight", (spec.head_dim,)
        for product, parts in PRODUCTS.items():
            for part in parts:
                yield f"{at}{part}.weight", (rows_of(spec, part), columns_of(spec, product))
                if has_bias(spec, product):
                    yield f"{at}{part}.bias", (rows_of(spec, part),)
