"""What of the CUDA pool needs no CUDA: its two views of one memory, its digest (equal to the CPU pool's), merged copies."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from kvalet.runtime.cuda_pool import CudaPool, copy_runs
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.kvpool import KVPool

GEOMETRIES = [
    KVGeometry(2, 2, 64, "bf16"),  # a page is whole blocks: no padding
    KVGeometry(3, 1, 4, "fp32"),  # padded
    KVGeometry(2, 3, 8, "fp16"),
]
CPU = torch.device("cpu")


def filled(geometry: KVGeometry, n_pages: int = 9) -> CudaPool:
    pool = CudaPool(geometry, n_pages, CPU)
    pool.pages.copy_(torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def test_the_geometries_cover_pages_with_and_without_padding() -> None:
    assert {geometry.page_stride_bytes == geometry.page_bytes for geometry in GEOMETRIES} == {True, False}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_new_pool_is_zero_and_of_the_page_first_shape(geometry: KVGeometry) -> None:
    pool = CudaPool(geometry, 5, CPU)
    assert tuple(pool.pages.shape) == (5, geometry.n_layers, 2, 16, geometry.n_kv_heads, geometry.head_dim)
    assert tuple(pool.bytes.shape) == (5, geometry.page_stride_bytes)
    assert not pool.bytes.any()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_both_views_are_one_memory(geometry: KVGeometry) -> None:
    """A page's payload is one run of bytes at its start; the padding stays as it was."""
    pool = filled(geometry)
    for page in (0, 4, 8):
        payload = pool.pages[page].contiguous().view(torch.uint8).flatten()
        assert torch.equal(pool.bytes[page, : geometry.page_bytes], payload)
        assert not pool.bytes[page, geometry.page_bytes :].any()
    pool.pages[3, 1, 1, 15, 0, 2] = 7.0
    element = pool.pages[3, 1, 1, 15, 0, 2].view(1).view(torch.uint8)
    at = ((1 * 2 + 1) * 16 + 15) * geometry.n_kv_heads * geometry.head_dim + 2
    size = pool.pages.element_size()
    assert torch.equal(pool.bytes[3, at * size : (at + 1) * size], element)
    pool.bytes[3] = 0
    assert not pool.pages[3].any()
    assert pool.pages[2].any()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_bytes_equal_those_of_the_cpu_pool(geometry: KVGeometry) -> None:
    """One layout on both devices: a page that was written by either has the same bytes, so slots and files serve both."""
    here, there = filled(geometry), KVPool(geometry, 9)
    there.pages.copy_(here.pages)
    for page in range(9):
        assert here.bytes[page].numpy().tobytes() == bytes(there.page_view(page))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_digests_equal_those_of_the_cpu_pool(geometry: KVGeometry) -> None:
    here, there = filled(geometry), KVPool(geometry, 9)
    there.pages.copy_(here.pages)
    seen = set()
    for n_tokens in (0, 1, 15, 16, 17, 32, 33, 48):
        digest = here.digest((7, 2, 5), n_tokens)
        assert digest == there.digest((7, 2, 5), n_tokens), n_tokens
        seen.add(digest)
    assert len(seen) == 8


def test_digest_is_of_the_tokens_only() -> None:
    pool = filled(GEOMETRIES[0])
    pool.copy_page(2, 5)
    pool.copy_page(3, 7)
    assert torch.equal(pool.bytes[2], pool.bytes[5])
    before = pool.digest((2, 3), 25)
    assert pool.digest((5, 7, 8), 25) == before, "growth room does not count"
    pool.pages[7, :, :, 9:] = 0
    assert pool.digest((5, 7), 25) == before, "beyond the tokens"
    pool.pages[7, 0, 0, 8, 0, 0] += 1
    assert pool.digest((5, 7), 25) != before


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_poison_is_nan_in_the_named_pages_only(geometry: KVGeometry) -> None:
    pool = filled(geometry)
    pool.poison([4, 7])
    for page in range(9):
        assert bool(pool.pages[page].isnan().all()) == (page in (4, 7)), page
        assert bool(pool.pages[page].isnan().any()) == (page in (4, 7)), page
    pool.poison([])
    assert not pool.pages[0].isnan().any()


def test_runs_merge_only_where_both_sides_are_neighbours() -> None:
    assert copy_runs((4, 5, 6), range(3)) == ((4, 0, 3),)
    assert copy_runs((4, 5, 6), (0, 1, 5)) == ((4, 0, 2), (6, 5, 1))
    assert copy_runs((4, 9, 10), (0, 1, 2)) == ((4, 0, 1), (9, 1, 2))
    assert copy_runs((6, 5, 4), (2, 1, 0)) == ((6, 2, 1), (5, 1, 1), (4, 0, 1)), "runs never go backwards"
    assert copy_runs((), ()) == ()


def test_runs_are_the_pairs_in_order_and_as_few_as_can_be() -> None:
    seed = 12
    rng = random.Random(seed)
    for case in range(500):
        n = rng.randrange(0, 17)
        pages, places = rng.sample(range(1, 25), n), sorted(rng.sample(range(16), min(n, 16)))
        if rng.randrange(2):
            pages.sort()
        pages = pages[: len(places)]
        runs = copy_runs(pages, places)
        pairs = [(page + k, place + k) for page, place, count in runs for k in range(count)]
        assert pairs == list(zip(pages, places, strict=True)), (seed, case)
        breaks = sum(b != (a[0] + 1, a[1] + 1) for a, b in pairwise(pairs))
        assert len(runs) == breaks + bool(pairs), (seed, case)
