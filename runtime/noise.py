"""Seeded noise of the sampler: a function of (seed, position, token id) and of nothing else.

Counter-based: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) started at
a hash of seed and position, read at the counter ``token id``. So a row draws the same noise alone or in a batch, before or
after a preemption, for one token id or for the whole vocabulary. The draws are Gumbel(0, 1): the token with the largest
``logit / temperature + noise`` is an exact sample of the softmax, without sorting or normalising the row.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """SplitMix64's output function on one integer (taken modulo 2**64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def stream_start(seed: int, position: int) -> int:
    """The start of the stream of one (seed, position); any integers, negative ones included."""
    return mix64(mix64(seed + _GOLDEN) + mix64(position) * 3)


@lru_cache(maxsize=4)
def _row_counters(n_pairs: int) -> NDArray[np.uint64]:
    """(pair + 1) * golden for every pair of ids, uint64 [n_pairs]; a few vocabulary sizes are kept."""
    counters = (np.arange(n_pairs, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    counters.flags.writeable = False
    return counters


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``mix64`` of every element, in place."""
    y = x >> np.uint64(30)
    x ^= y
    x *= np.uint64(_MIX1)
    np.right_shift(x, np.uint64(27), out=y)
    x ^= y
    x *= np.uint64(_MIX2)
    np.right_shift(x, np.uint64(31), out=y)
    x ^= y
    return x


def _uniform(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """float32 in (0, 1). Small values keep their relative precision (they decide which unlikely token wins); values that would
    round to 1 are held just below it, so that no draw is infinite."""
    u = bits.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    return np.minimum(u, np.float32(1.0 - 2.0**-24), out=u)


def row_uniform(seed: int, position: int, n: int) -> NDArray[np.float32]:
    """Uniform draws of the ids 0..n-1, float32 [n], each in (0, 1). Id i has the lower (i even) or upper (i odd) half of the
    stream's output number i // 2."""
    pairs = _mixed(_row_counters((n + 1) // 2) + np.uint64(stream_start(seed, position)))
    return _uniform(pairs.astype("<u8", copy=False).view("<u4")[:n])


def ids_uniform(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The same draws for some ids only, float32 [len(ids)]: ``row_uniform(...)[ids]`` without making the row."""
    counters = ((ids >> 1).astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    pairs = _mixed(counters + np.uint64(stream_start(seed, position)))
    halves = np.where(ids & 1, pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF))
    return _uniform(halves.astype(np.uint32))


def gumbel(uniform: NDArray[np.float32]) -> NDArray[np.float64]:
    """Gumbel(0, 1) from uniform draws: -log(E) with E = -log(1 - u), float64."""
    return -np.log(-np.log1p(-uniform.astype(np.float64)))
