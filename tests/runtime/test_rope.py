"""Rotary embedding: what a rotation must preserve, and what scale and factors divide."""

from __future__ import annotations

import math

import pytest
import torch
from kvalet.runtime.rope import Rope, rotate
from kvalet.runtime.rope_spec import RopeSpec
from torch import Tensor

DIM = 8


def randn(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_pair_turns_by_its_own_angle() -> None:
    """Pair (i, i + D / 2) of position p by p * base ** (-2i / D), in the complex plane."""
    rope = Rope(DIM, RopeSpec(100.0), 40)
    x = randn(3, 2, DIM)
    positions = [0, 5, 39]
    turned = rotate(x, *rope.at(torch.tensor(positions)))
    for n, position in enumerate(positions):
        for i in range(DIM // 2):
            angle = position * 100.0 ** (-2 * i / DIM)
            pair = torch.complex(x[n, :, i].double(), x[n, :, i + DIM // 2].double())
            expected = pair * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(turned[n, :, i].double(), expected.real, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(turned[n, :, i + DIM // 2].double(), expected.imag, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shift", [1, 17, 500])
def test_scores_depend_on_distances_only(shift: int) -> None:
    """The reason for it all: q at p and k at r score as q at p + shift and k at r + shift."""
    rope = Rope(DIM, RopeSpec(10_000.0), 1000)
    q, k = randn(6, 1, DIM, seed=1), randn(6, 1, DIM, seed=2)
    at = torch.tensor([0, 3, 4, 100, 250, 400])

    def scores(move: int) -> Tensor:
        turned = (rotate(x, *rope.at(at + move))[:, 0] for x in (q, k))
        return next(turned) @ next(turned).T

    torch.testing.assert_close(scores(shift), scores(0), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores(0), q[:, 0] @ k[:, 0].T, atol=0.1)


def test_linear_scaling_is_reading_at_a_fraction_of_the_position() -> None:
    plain, scaled = Rope(DIM, RopeSpec(100.0), 50), Rope(DIM, RopeSpec(100.0, "linear", 4.0), 200)
    assert torch.equal(scaled.cos[::4], plain.cos)
    assert torch.equal(scaled.sin[::4], plain.sin)


def test_factors_divide_their_own_frequency() -> None:
    """A factor of 2 in one pair: that pair at position 2p is the plain one at p, the others are as they were."""
    factors = torch.ones(DIM // 2)
    factors[1] = 2.0
    plain, other = Rope(DIM, RopeSpec(100.0), 50), Rope(DIM, RopeSpec(100.0), 50, factors=factors)
    for table, changed in ((plain.cos, other.cos), (plain.sin, other.sin)):
        torch.testing.assert_close(changed[::2, 1::4], table[:25, 1::4])
        kept = [i for i in range(DIM) if i % 4 != 1]
        assert torch.equal(changed[:, kept], table[:, kept])


def test_far_positions_keep_their_precision() -> None:
    """Angles are made in float64: at 131071, float32 products would be off by several thousandths."""
    rope = Rope(64, RopeSpec(1e6), 131_072)
    for i in (0, 1, 5):
        angle = 131_071 * 1e6 ** (-2 * i / 64)
        assert float(rope.cos[-1, i]) == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(rope.sin[-1, i + 32]) == pytest.approx(math.sin(angle), abs=1e-6)
        assert float(rope.sin[-1, i]) == -float(rope.sin[-1, i + 32])


def test_half_precision_is_rotated_in_single_and_rounded_once() -> None:
    rope = Rope(DIM, RopeSpec(100.0), 40)
    x = randn(7, 3, DIM).bfloat16()
    tables = rope.at(torch.arange(7) * 5)
    turned = rotate(x, *tables)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), *tables).bfloat16())


def test_positions_outside_the_table_are_an_error() -> None:
    with pytest.raises(IndexError):
        Rope(DIM, RopeSpec(100.0), 40).at(torch.tensor([40]))
