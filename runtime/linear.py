"""Matrix products of the decoder: one object per matrix, called with [n, in] and returning [n, out].

Which kernel is fastest depends on the number of rows and on the machine: int4 reads a quarter of the bytes and wins while
reading is what costs (few rows), bf16 wins where arithmetic does. ``Switched`` holds both and goes by the number of rows;
``runtime.calibrate`` finds the crossing point at start.

Facts (docs/numbers.md): a row of an int4 or int8 product has the same bits in any batch; a row of a bf16 product only at one
row count.
"""

from __future__ import annotations

from typing import Protocol

import torch
from kvalet.runtime.dequant import GROUP
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """``y = x @ w.T (+ bias)``, x [n, in] in the weights' activation dtype. ``nbytes``: memory it holds."""

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class Dense:
    """fp32 or bf16 weights [out, in] as they are, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Packed:
    """bf16 weights in oneDNN's own order, made once: with AMX the reordering at each call would cost more than the product.

    Without AMX the order is asked for ``FEW_ROWS`` rows: 16 rows through 30 layers take 14 ms instead of 24, many rows as long
    as before (oneDNN 3.12). It is a property of the processor, not a measurement: it may decide bits."""

    FEW_ROWS = 16

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        rows = 0 if torch.cpu._is_amx_tile_supported() else self.FEW_ROWS
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._run(x, self._packed, self._bias, "none", [], "")
        return y


def dense_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product with ``weight`` as it is: packed for oneDNN where that exists (bf16 on the CPU)."""
    on_cpu = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    if on_cpu and torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Packed(weight, bias)
    return Dense(weight, bias)


class Int4:
    """Q4_1 or Q4_0 blocks of the file through PyTorch's int4 product, bf16 activations. Scales and zeros are rounded to bf16.

    ``q`` int32 [out, in] in 0..15; ``scale_zero`` float [in / 32, out, 2] (``dequant.int4_parts``)."""

    def __init__(self, q: Tensor, scale_zero: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        self._scale_zero = scale_zero.to(torch.bfloat16).contiguous()
        self._bias = bias
        self._run = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self.nbytes = self._packed.nbytes + self._scale_zero.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._run(x, self._packed, GROUP, self._scale_zero)
        return y if self._bias is None else y.add_(self._bias)


class Int8:
    """int8 weights with one scale per output row, bf16 activations: the head in int4 mode, which GGUF files keep at 8 bits.

    Made from float32 weights [out, in]; the rounding is at most 1/254 of each row's largest weight."""

    def __init__(self, weight: Tensor) -> None:
        scale = weight.abs().amax(dim=1).clamp_(min=1e-12).div_(127.0).to(torch.bfloat16)
        self._q = torch.round(weight / scale.float().unsqueeze(1)).clamp_(-127, 127).to(torch.int8)
        self._scale = scale
        self._run = torch.ops.aten._weight_int8pack_mm.default
        self.nbytes = self._q.nbytes + scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._run(x, self._q, self._scale)
        return y


class Int8Rows:
    """int8 weights with one scale per output row and activations rounded to 8 bits with one scale per token, multiplied as
    integers (VNNI). For the head: of 320 reference tokens 313-315 agree, as with the others; the matrices of the layers would
    lose too much this way (291). A row's scale is its own: neighbours change a row only through the kernel for a row count.

    Made from float32 weights [out, in]."""

    def __init__(self, weight: Tensor) -> None:
        self._scale = weight.abs().amax(dim=1).clamp_(min=1e-12).div_(127.0)
        q = torch.round(weight / self._scale.unsqueeze(1)).clamp_(-127, 127).to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(q, None)
        self._zeros = torch.zeros(q.shape[0], dtype=torch.int32)
        self._run = torch.ops.onednn.qlinear_pointwise.default
        self.nbytes = q.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=1e-12).div_(127.0)
        shifted = (x / scale).add_(128.5).clamp_(1, 255).to(torch.uint8)
        y: Tensor = self._run(
            shifted, 1.0, 128, self._packed, self._scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y.mul_(scale).to(x.dtype)


def integer_products() -> bool:
    """Whether ``Int8Rows`` is the fast way for a head: integer products (VNNI), no bf16 tiles. A property of the processor."""
    known = torch._C._has_mkldnn and hasattr(torch.ops.onednn, "qlinear_pointwise")
    return known and torch.cpu._is_vnni_supported() and not torch.cpu._is_amx_tile_supported()


class Switched:
    """``few`` for at most ``switch_rows`` rows (0 until it is set), ``many`` beyond. Which one runs is a function of the number
    of rows of the call, so a row's bits depend on its batch: not for ``deterministic``."""

    def __init__(self, few: Linear, many: Linear, switch_rows: int = 0) -> None:
        self.few, self.many, self.switch_rows = few, many, switch_rows
        self.nbytes = few.nbytes + many.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if x.shape[0] <= self.switch_rows else self.many(x)
