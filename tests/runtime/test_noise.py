"""The sampler's noise: SplitMix64's published outputs, one value per (seed, position, id), and the right distribution."""

from __future__ import annotations

import math

import numpy as np
from kvalet.runtime.noise import gumbel, ids_uniform, mix64, row_uniform, stream_start

GOLDEN = 0x9E3779B97F4A7C15


def test_splitmix64_gives_its_known_outputs() -> None:
    """The first outputs for seed 1234567, as published with the reference implementation's ports."""
    outputs = [mix64(1234567 + i * GOLDEN) for i in range(1, 6)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_the_row_is_the_plain_function_of_each_id() -> None:
    for seed, position in ((0, 0), (42, 7), (-1, 8191), (2**63, 1)):
        start = stream_start(seed, position)
        for token_id, u in enumerate(row_uniform(seed, position, 101)):
            pair = mix64(start + (token_id // 2 + 1) * GOLDEN)
            half = pair >> 32 if token_id % 2 else pair & 0xFFFFFFFF
            exact = (half + 0.5) / 2.0**32
            assert abs(float(u) - exact) <= exact * 1e-6


def test_some_ids_are_cut_from_the_row() -> None:
    ids = np.array([0, 49_151, 7, 7, 1000], dtype=np.int64)
    assert np.array_equal(ids_uniform(5, 6, ids), row_uniform(5, 6, 49_152)[ids])


def test_no_two_streams_are_equal() -> None:
    starts = {stream_start(seed, position) for seed in range(-50, 50) for position in range(200)}
    assert len(starts) == 100 * 200


def test_draws_are_inside_zero_and_one_and_uniform() -> None:
    u = np.concatenate([row_uniform(seed, 3, 49_152) for seed in range(20)])
    assert u.min() > 0.0
    assert u.max() < 1.0
    assert np.isfinite(gumbel(u)).all()
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    chi2 = float(((counts - u.size / 64) ** 2 / (u.size / 64)).sum())
    assert chi2 < 63 + 3.72 * math.sqrt(126) + 8


def test_neighbouring_positions_and_seeds_do_not_correlate() -> None:
    here = row_uniform(9, 100, 49_152)
    for other in (row_uniform(9, 101, 49_152), row_uniform(10, 100, 49_152), np.roll(here, 1)):
        assert abs(float(np.corrcoef(here, other)[0, 1])) < 4.5 / math.sqrt(here.size)
