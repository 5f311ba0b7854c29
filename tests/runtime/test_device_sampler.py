"""Sampling on the device against the host's sampler: the same noise bit for bit, the same tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kvalet.runtime.device_sampler import FIELDS, Draw, draw, ordered, pack, row_uniforms
from kvalet.runtime.noise import row_uniform, stream_start
from kvalet.runtime.plan import SamplingParams
from kvalet.runtime.sampler import RowSampling, sample

VOCAB = 1003


def drawn(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    packed = np.zeros((FIELDS, len(draws)), dtype=np.int64)
    pack(draws, packed)
    in_order = any(ordered(one.params) for one in draws)
    return draw(logits, torch.from_numpy(packed), in_order=in_order).tolist()


def twin(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    rows = []
    for one in draws:
        row = RowSampling(one.params, one.seed, logits.shape[1], [0] * one.position)
        assert row.plain
        rows.append(row)
    return [choice.token_id for choice in sample(logits, rows)]


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 1003])
def test_the_noise_is_the_hosts(n: int) -> None:
    pairs = [(0, 0), (5, 17), (-3, 2), (2**64 - 1, 100_000), (12345678901234567, 1)]
    starts = torch.from_numpy(np.array([stream_start(*pair) for pair in pairs], dtype=np.uint64).view(np.int64))
    mine = row_uniforms(starts, n)
    for row, pair in zip(mine, pairs, strict=True):
        assert np.array_equal(row.numpy(), row_uniform(*pair, n)), pair


PARAMS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product((0.3, 1.0, 1.7), (0, 1, 5, 2000), (1.0, 0.9, 0.2), (0.0, 0.05))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_the_hosts(dtype: torch.dtype) -> None:
    """bf16 makes many ties; they are decided the same way. Alone and in one batch."""
    torch.manual_seed(0)
    for seed in range(4):
        logits = (torch.randn(len(PARAMS), VOCAB) * 4).to(dtype)
        draws = [Draw(params, seed * 1000 + i, 7 * i) for i, params in enumerate(PARAMS)]
        expected = twin(logits, draws)
        assert drawn(logits, draws) == expected, seed
        alone = [drawn(logits[i : i + 1], [one])[0] for i, one in enumerate(draws)]
        assert alone == expected, seed


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, [3, 900]] = 1.0
    draws = [Draw(SamplingParams(temperature=1.0), 1, 0), Draw(SamplingParams(temperature=1.0, top_p=0.99), 1, 0)]
    for position in range(50):
        at = [Draw(one.params, one.seed, position) for one in draws]
        assert set(drawn(logits, at)) <= {3, 900}


def test_the_race_follows_the_softmax() -> None:
    """20,000 draws of one row; 4 sigma."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    n = 20_000
    draws = [Draw(SamplingParams(temperature=1.0), 3, position) for position in range(n)]
    counts = np.bincount(drawn(logits.expand(n, 4), draws), minlength=4) / n
    expected = logits[0].softmax(0).numpy()
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected * (1 - expected) / n))
