"""From the stored blocks of a GGUF tensor to float32, and to the operands of PyTorch's int4 product.

Block formats (ggml-org/ggml, ggml-common.h), 32 elements each: Q4_0 = fp16 d, 16 bytes of nibbles: d * (q - 8); Q4_1 = fp16 d,
fp16 m, 16 bytes: d * q + m; Q8_0 = fp16 d, 32 int8: d * q. Byte i of the nibbles holds element i (low) and i + 16 (high).
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from kvalet.runtime.errors import ModelError
from numpy.typing import NDArray
from torch import Tensor

Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
F32, F16, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
GROUP = 32
"""Elements per block of the three formats above, and per group of the int4 product."""


def dequantize(data: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...], name: str) -> Tensor:
    """float32 tensor of ``shape``. Raises ModelError naming the type if nothing here can read it."""
    if kind == F32:
        values = torch.from_numpy(data.view(np.float32).copy())
    elif kind == F16:
        values = torch.from_numpy(data.view(np.float16).copy()).float()
    elif kind == BF16:
        values = torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16).float()
    elif kind in (Q4_0, Q4_1):
        d, m, q = nibble_blocks(data, kind)
        values = q.float().mul_(d.unsqueeze(-1)).add_(m.unsqueeze(-1))
    elif kind == Q8_0:
        blocks = torch.from_numpy(data.reshape(-1, 34).copy())
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        values = blocks[:, 2:].contiguous().view(torch.int8).float().mul_(scale)
    else:
        values = _by_package(data, kind, name)
    return values.reshape(shape)


def _by_package(data: NDArray[np.uint8], kind: GGMLQuantizationType, name: str) -> Tensor:
    """Formats that need no speed here: the ``gguf`` package's own code (numpy)."""
    try:
        blocks = data.reshape(-1, GGML_QUANT_SIZES[kind][1])
        return torch.from_numpy(np.ascontiguousarray(quants.dequantize(blocks, kind), dtype=np.float32))
    except NotImplementedError:
        raise ModelError(f"tensor {name} is stored as {kind.name}, which is not supported") from None


def nibble_blocks(data: NDArray[np.uint8], kind: GGMLQuantizationType) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, offsets and quants of a Q4_0 or Q4_1 tensor, in storage order: float32 [blocks], float32 [blocks], uint8
    [blocks, 32] with values 0..15, so that an element is ``d * q + m``."""
    n_head = 4 if kind == Q4_1 else 2
    blocks = torch.from_numpy(data.reshape(-1, n_head + GROUP // 2).copy())
    head = blocks[:, :n_head].contiguous().view(torch.float16).float()
    packed = blocks[:, n_head:]
    q = torch.cat((packed & 15, packed >> 4), dim=1)
    d = head[:, 0].contiguous()
    return d, (head[:, 1].contiguous() if kind == Q4_1 else d * -8.0), q


def int4_parts(data: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Operands of ``torch.ops.aten._weight_int4pack_mm_for_cpu`` before packing, from the file's own blocks: nothing is
    quantised again. ``q`` int32 [rows, columns] (0..15); ``scale_zero`` float32 [columns / 32, rows, 2].

    The product computes (q - 8) * scale + zero, so scale = d and zero = m + 8 d.
    """
    rows, columns = shape
    d, m, q = nibble_blocks(data, kind)
    scale_zero = torch.stack((d, m + 8.0 * d), dim=-1).view(rows, columns // GROUP, 2)
    return q.view(rows, columns).to(torch.int32), scale_zero.transpose(0, 1).contiguous()
