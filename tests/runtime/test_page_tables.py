"""Page tables for paged attention kernels (case P26): never a page too many, never an index of the wrong width."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from kvalet.runtime.page_tables import PageTables, page_tables

P = 16


def rows_of(tables: PageTables) -> list[list[int]]:
    """The pages of each row, as a kernel cuts them out of ``indices``."""
    bounds = tables.indptr.tolist()
    return [tables.indices[a:b].tolist() for a, b in pairwise(bounds)]


@pytest.mark.parametrize("page_tokens", [1, 2, 16])
def test_every_length_over_four_pages(page_tokens: int) -> None:
    """P26: pages == ceil(len / P), 1 <= last <= P, (pages - 1) * P + last == len, for 1..4P+1."""
    room = list(range(100, 110))
    for length in range(1, 4 * page_tokens + 2):
        tables = page_tables([room], [length], page_tokens)
        (pages,) = rows_of(tables)
        (last,) = tables.last.tolist()
        assert len(pages) == (length + page_tokens - 1) // page_tokens, length
        assert 1 <= last <= page_tokens, length
        assert (len(pages) - 1) * page_tokens + last == length
        assert pages == room[: len(pages)], "growth room stays out"
        assert {t.dtype for t in (tables.indptr, tables.indices, tables.last)} == {torch.int32}


def test_the_places_of_a_row_are_its_tokens_in_order() -> None:
    """Reading a row through its table as a kernel does finds each token once, in a batch of random rows."""
    seed = 26
    rng = random.Random(seed)
    for case in range(200):
        lengths = [rng.randrange(1, 5 * P + 2) for _ in range(rng.randrange(1, 7))]
        free = rng.sample(range(1000), 1000)
        rows = [[free.pop() for _ in range(-(-length // P) + rng.randrange(3))] for length in lengths]
        memory = {rows[r][i // P] * P + i % P: (r, i) for r, length in enumerate(lengths) for i in range(length)}
        tables = page_tables(rows, lengths, P)
        seen = []
        for pages, last in zip(rows_of(tables), tables.last.tolist(), strict=True):
            full = [(page, P) for page in pages[:-1]] + [(pages[-1], last)]
            seen += [memory[page * P + offset] for page, filled in full for offset in range(filled)]
        assert seen == [(r, i) for r, length in enumerate(lengths) for i in range(length)], (seed, case)
        assert tables.indptr[0] == 0
        assert tables.indptr[-1] == tables.indices.numel()


def test_rows_may_share_pages() -> None:
    tables = page_tables([[5, 6, 7], [5, 6, 9]], [2 * P + 1, 3 * P], P)
    assert rows_of(tables) == [[5, 6, 7], [5, 6, 9]]
    assert tables.last.tolist() == [1, P]


@pytest.mark.parametrize(
    ("pages", "lengths"),
    [([[1]], [P + 1]), ([[]], [1]), ([[1, 2], [3]], [2 * P, 2 * P]), ([[1]], [0]), ([[1], [2]], [1]), ([[1]], [1, 1])],
)
def test_a_table_that_is_too_short_is_refused(pages: list[list[int]], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"came with|zip\(\)"):
        page_tables(pages, lengths, P)


def test_no_rows_are_an_empty_table() -> None:
    tables = page_tables([], [], P)
    assert (tables.indptr.tolist(), tables.indices.tolist(), tables.last.tolist()) == ([0], [], [])
    assert {t.dtype for t in (tables.indptr, tables.indices, tables.last)} == {torch.int32}
