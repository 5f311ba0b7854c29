"""The tensors of an open GGUF file as a ``TensorSource``; q and k of interleaved rope order are brought to rotate-half."""

from __future__ import annotations

import torch
from kvalet.runtime import dequant
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf import GgufFile, TensorInfo
from kvalet.runtime.spec import INTERLEAVED_ROPE, ModelSpec
from kvalet.runtime.tensor_source import ROPE_FACTORS, roles
from torch import Tensor


class GgufTensors:
    """See ``TensorSource``. The file stays open as long as this is used; closing it is its owner's."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self.label = f"model file {file.path}"
        self._file, self._spec = file, spec

    def __contains__(self, role: str) -> bool:
        return role in self._file.tensors

    def load(self, role: str, out: Tensor) -> None:
        values = self.values(role, tuple(out.shape))
        order = self._order(role)
        out.copy_(values if order is None else values[order])

    def surplus(self) -> list[str]:
        """The rope factors are applied by ``rope`` where the file has them."""
        return sorted(self._file.tensors.keys() - {role for role, _ in roles(self._spec)} - {ROPE_FACTORS})

    def values(self, role: str, shape: tuple[int, ...]) -> Tensor:
        """float32, in the file's own order of rows."""
        info = self._info(role, shape)
        return dequant.dequantize(self._file.data(role), info.kind, shape, role)

    def has_nibbles(self) -> bool:
        """All matrices of the layers can go through the int4 product."""
        kinds = {i.kind for i in self._file.tensors.values() if i.name.startswith("blk.") and len(i.shape) == 2}
        return bool(kinds) and kinds <= {dequant.Q4_0, dequant.Q4_1} and self._spec.hidden % 32 == 0

    def int4(self, role: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """``dequant.int4_parts`` of a matrix, rows in rotate-half order."""
        info = self._info(role, shape)
        q, scale_zero = dequant.int4_parts(self._file.data(role), info.kind, shape)
        order = self._order(role)
        return (q, scale_zero) if order is None else (q[order], scale_zero[:, order])

    def _info(self, role: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.tensors.get(role)
        if info is None:
            raise ModelError(f"{self.label} has no tensor {role}")
        if info.shape != shape:
            raise ModelError(f"tensor {role} of {self._file.path} has shape {list(info.shape)}, not {list(shape)}")
        return info

    def _order(self, role: str) -> Tensor | None:
        """Of the rows, where the file's order is another."""
        part = role.rpartition(".")[0].rpartition(".")[2]
        heads = {"attn_q": self._spec.n_q_heads, "attn_k": self._spec.n_kv_heads}.get(part)
        if heads is None or not INTERLEAVED_ROPE[self._spec.architecture]:
            return None
        return rope_order(heads * self._spec.head_dim, heads)


def rope_order(rows: int, interleaved_heads: int) -> Tensor:
    """Order of rows that brings interleaved rope pairs (2i, 2i + 1) of each head to rotate-half (i, i + dim / 2)."""
    order = torch.arange(rows)
    if interleaved_heads:
        order = order.view(interleaved_heads, -1, 2).transpose(1, 2).reshape(rows)
    return order
