"""The pool: layout, alignment, byte views, gathering and writing through page tables."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.kvpool import KVPool, page_runs

GEOMETRIES = [KVGeometry(2, 3, 8, "bf16"), KVGeometry(3, 1, 4, "fp32"), KVGeometry(30, 3, 64, "bf16")]


def filled(geometry: KVGeometry, n_pages: int = 9) -> KVPool:
    pool = KVPool(geometry, n_pages)
    pool.pages.copy_(torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(1)))
    return pool


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_page_is_one_aligned_run_of_bytes(geometry: KVGeometry) -> None:
    pool = filled(geometry)
    assert pool.nbytes == 9 * geometry.page_stride_bytes
    for page in (0, 1, 8):
        view = pool.page_view(page)
        assert len(view) == geometry.page_stride_bytes
        assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % 4096 == 0
        expected = pool.pages[page].contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(view[: geometry.page_bytes]) == expected
        assert not any(view[geometry.page_bytes :])


def test_views_write_through_and_are_bounded() -> None:
    pool = KVPool(GEOMETRIES[1], 4)
    pool.page_view(2)[:4] = np.float32(7.5).tobytes()
    assert pool.pages[2, 0, 0, 0, 0, 0] == 7.5
    for page in (-1, 4):
        with pytest.raises(IndexError):
            pool.page_view(page)
        with pytest.raises(IndexError):
            pool.copy_page(1, page)
    with pytest.raises(ValueError):
        KVPool(GEOMETRIES[1], 1)


@pytest.mark.parametrize("table", [(1, 2, 3, 4), (4, 3, 2, 1), (7, 8, 1, 2), (5, 1, 2, 8)])
def test_gather_follows_the_table_and_reads_no_further(table: tuple[int, ...]) -> None:
    geometry = GEOMETRIES[0]
    for n in (0, 1, 15, 16, 17, 32, 33, 63, 64):
        pool = filled(geometry)
        expected = torch.cat([pool.pages[page] for page in table], dim=2)[:, :, :n].clone()
        last = table[-(-n // 16) - 1] if n else 0
        if n % 16:
            pool.pages[last, :, :, n % 16 :] = float("nan")
        pool.poison([page for page in range(9) if page not in table[: -(-n // 16)]])
        found = pool.gather(table, n)
        assert torch.equal(found, expected), n


def test_write_and_layer_reads() -> None:
    geometry = GEOMETRIES[0]
    pool = filled(geometry)
    kv = torch.randn(2, 2, 5, 3, 8).bfloat16()
    before = pool.pages.clone()
    pool.write(kv, torch.tensor([3 * 16 + 14, 3 * 16 + 15, 6 * 16, 6 * 16 + 1, 0]))
    assert torch.equal(pool.pages[3, :, :, 14:], kv[:, :, :2])
    assert torch.equal(pool.pages[6, :, :, :2], kv[:, :, 2:4])
    before[3, :, :, 14:], before[6, :, :, :2], before[0, :, :, 0] = kv[:, :, :2], kv[:, :, 2:4], kv[:, :, 4]
    assert torch.equal(pool.pages, before)
    out = torch.empty(2, 32, 3, 8, dtype=torch.bfloat16)
    pool.read_layer(torch.tensor([6, 3]), 1, out)
    assert torch.equal(out, pool.gather((6, 3), 32)[1])


def test_digest_is_of_the_tokens_not_of_the_places() -> None:
    pool = filled(GEOMETRIES[0])
    pool.copy_page(2, 5)
    pool.copy_page(3, 7)
    assert pool.digest((2, 3), 25) == pool.digest((5, 7), 25)
    pool.pages[7, 1, 1, 9:] += 1
    assert pool.digest((2, 3), 25) == pool.digest((5, 7), 25), "beyond the tokens"
    pool.pages[7, 1, 1, 8, 2, 7] += 1
    assert pool.digest((2, 3), 25) != pool.digest((5, 7), 25)


def test_poison_is_nan_in_every_dtype() -> None:
    for geometry in GEOMETRIES[:2]:
        pool = filled(geometry)
        pool.poison([4])
        assert pool.pages[4].isnan().all()
        assert not pool.pages[5].isnan().any()


def test_runs_of_pages() -> None:
    assert page_runs(()) == []
    assert page_runs((4, 5, 6, 2, 3, 9)) == [(4, 3, 0), (2, 2, 3), (9, 1, 5)]
