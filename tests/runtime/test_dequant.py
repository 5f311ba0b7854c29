"""Block formats against the ``gguf`` package's own code, and the int4 product against plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from kvalet.runtime.dequant import dequantize, int4_parts
from kvalet.runtime.errors import ModelError
from kvalet.runtime.linear import Dense, Int4, Int8, Int8Rows, Switched, dense_linear, integer_products

QUANTISABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def stored(kind: Kind, rows: int = 24, columns: int = 96, seed: int = 3) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8)


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda kind: kind.name)
def test_every_format_equals_the_packages(kind: Kind) -> None:
    data = stored(kind)
    raw = data.view(np.float32) if kind == Kind.F32 else data.view(np.float16) if kind == Kind.F16 else data
    expected = quants.dequantize(raw, kind).reshape(24, 96).astype(np.float32)
    ours = dequantize(data.reshape(-1), kind, (24, 96), "x")
    assert ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy(), expected)


def test_a_type_nobody_can_read_is_named() -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.x is stored as I8"):
        dequantize(np.zeros(64, dtype=np.uint8), Kind.I8, (64,), "blk.0.x")


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_int4_parts_are_the_blocks_themselves(kind: Kind) -> None:
    data = stored(kind).reshape(-1)
    q, scale_zero = int4_parts(data, kind, (24, 96))
    assert q.min() >= 0
    assert q.max() <= 15
    scale = scale_zero[..., 0].transpose(0, 1).repeat_interleave(32, dim=1)
    zero = scale_zero[..., 1].transpose(0, 1).repeat_interleave(32, dim=1)
    torch.testing.assert_close((q.float() - 8) * scale + zero, dequantize(data, kind, (24, 96), "x"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33])
def test_int4_product_equals_the_dense_one(rows: int) -> None:
    data = stored(Kind.Q4_1, 64, 96).reshape(-1)
    q, scale_zero = int4_parts(data, Kind.Q4_1, (64, 96))
    bias = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact = x.float() @ dequantize(data, Kind.Q4_1, (64, 96), "x").T + bias.float()
    ours = Int4(q, scale_zero, bias)(x).float()
    assert (ours - exact).abs().max() < 0.02 * exact.abs().max()


def test_int8_product_is_near_and_its_rows_are_independent() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(5)).bfloat16()
    linear = Int8(weight)
    exact = x.float() @ weight.T
    assert (linear(x).float() - exact).abs().max() < 0.02 * exact.abs().max()
    assert torch.equal(linear(x)[3:4], linear(x[3:4]))


def test_int8_rows_are_near_and_their_own() -> None:
    """Rows of very different size, one of them zero: each is scaled by itself."""
    if not integer_products():
        pytest.skip("needs a processor with VNNI and without AMX: elsewhere it is never used")
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(5)) * torch.tensor([[1e-3], [1.0], [300.0], [0.0], [7.0]])
    x = x.bfloat16()
    linear = Int8Rows(weight)
    found, exact = linear(x).float(), x.float() @ weight.T
    assert found.shape == (5, 64)
    assert linear(x).dtype == torch.bfloat16
    for row, wanted in zip(found, exact, strict=True):
        assert (row - wanted).abs().max() <= 0.03 * wanted.abs().max()
    neighbours = x.clone()
    neighbours[[0, 1, 3, 4]] = 1000.0
    assert torch.equal(linear(neighbours)[2], linear(x)[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_linear_is_the_plain_product(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(6)).to(dtype)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(7)).to(dtype)
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(8)).to(dtype)
    ours, plain = dense_linear(weight, bias)(x), Dense(weight, bias)(x)
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_switched_goes_by_the_number_of_rows() -> None:
    few, many = Dense(torch.zeros(2, 2)), Dense(torch.ones(2, 2))
    switched = Switched(few, many, 3)
    assert switched(torch.ones(3, 2)).sum() == 0
    assert switched(torch.ones(4, 2)).sum() == 16
