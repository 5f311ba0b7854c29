"""Weights as plain matrices on any device, stacked per product: what a CUDA decoder multiplies with, and what the CPU packs.

Each tensor is read straight into its place on the device, so that memory holds the weights once and nothing of them twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvalet.runtime.errors import ModelError
from kvalet.runtime.spec import ModelSpec
from kvalet.runtime.tensor_source import (
    EMBED,
    HEAD,
    NORM,
    PRODUCTS,
    ROPE_FACTORS,
    TensorSource,
    columns_of,
    has_bias,
    rows_of,
)
from torch import Tensor


@dataclass(slots=True)
class PlainLayer:
    """Matrices for ``x @ w.T``: qkv [qkv_width, hidden], out [hidden, q_heads * head_dim], gate_up [2 * ffn, hidden], down
    [hidden, ffn]; norms [hidden]; q_norm, k_norm [head_dim] or None; biases as long as their matrix has rows, or None."""

    norm_in: Tensor
    qkv: Tensor
    out: Tensor
    norm_post: Tensor
    gate_up: Tensor
    down: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(slots=True)
class PlainWeights:
    """``head`` is ``embed`` itself where the model ties them. ``rope_factors``: float32 [head_dim / 2] on the CPU, or None."""

    embed: Tensor
    norm: Tensor
    head: Tensor
    layers: list[PlainLayer]
    rope_factors: Tensor | None


def read_tensor(source: TensorSource, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device=device)
    source.load(role, out)
    return out


def stacked_matrix(
    source: TensorSource, spec: ModelSpec, layer: int, product: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[rows of all parts, columns] of one of ``PRODUCTS``."""
    parts = PRODUCTS[product]
    out = torch.empty(sum(rows_of(spec, p) for p in parts), columns_of(spec, product), dtype=dtype, device=device)
    _fill(source, spec, layer, parts, ".weight", out)
    return out


def stacked_bias(
    source: TensorSource, spec: ModelSpec, layer: int, product: str, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[rows of all parts]; None where the model has none there."""
    if not has_bias(spec, product):
        return None
    parts = PRODUCTS[product]
    out = torch.empty(sum(rows_of(spec, p) for p in parts), dtype=dtype, device=device)
    _fill(source, spec, layer, parts, ".bias", out)
    return out


def _fill(source: TensorSource, spec: ModelSpec, layer: int, parts: tuple[str, ...], ending: str, out: Tensor) -> None:
    begin = 0
    for part in parts:
        end = begin + rows_of(spec, part)
        source.load(f"blk.{layer}.{part}{ending}", out[begin:end])
        begin = end


def read_rope_factors(source: TensorSource, spec: ModelSpec) -> Tensor | None:
    if ROPE_FACTORS not in source:
        return None
    return read_tensor(source, ROPE_FACTORS, (spec.head_dim // 2,), torch.float32, torch.device("cpu"))


def refuse_surplus(source: TensorSource) -> None:
    """ModelError if the source holds a tensor that the decoder does not know: it would compute something else."""
    surplus = source.surplus()
    if surplus:
        raise ModelError(f"{source.label} has tensor {surplus[0]} ({len(surplus)} such), which is not supported")


def load_plain(source: TensorSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> PlainWeights:
    """All weights in ``dtype`` on ``device``. ModelError for a missing, short, misshapen or surplus tensor, by name."""
    refuse_surplus(source)

    def tensor(role: str, *shape: int) -> Tensor:
        return read_tensor(source, role, shape, dtype, device)

    def layer(number: int) -> PlainLayer:
        at = f"blk.{number}."
        matrix = {product: stacked_matrix(source, spec, number, product, dtype, device) for product in PRODUCTS}

        def bias(product: str) -> Tensor | None:
            return stacked_bias(source, spec, number, product, dtype, device)

        return PlainLayer(
            norm_in=tensor(at + "attn_norm.weight", spec.hidden),
            norm_post=tensor(at + "ffn_norm.weight", spec.hidden),
            q_norm=tensor(at + "attn_q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=tensor(at + "attn_k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            **matrix,
            qkv_bias=bias("qkv"),
            out_bias=bias("out"),
            gate_up_bias=bias("gate_up"),
            down_bias=bias("down"),
        )

    embed = tensor(EMBED, spec.vocab, spec.hidden)
    return PlainWeights(
        embed=embed,
        norm=tensor(NORM, spec.hidden),
        head=embed if spec.tied else tensor(HEAD, spec.vocab, spec.hidden),
        layers=[layer(number) for number in range(spec.n_layers)],
        rope_factors=read_rope_factors(source, spec),
    )
