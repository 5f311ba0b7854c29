"""Page tables of a batch in the layout that paged attention kernels read: index tensors on the host, no kernel in here.

Source: flashinfer-ai/flashinfer's paged KV layout (``indptr``, ``indices``, ``last_page_len``, all int32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageTables:
    """Page tables of a batch, on the host. ``indptr`` int32 [rows + 1], ``indices`` int32 [pages], ``last`` int32 [rows], with
    pages == ceil(len / page_tokens), 1 <= last <= page_tokens and (pages - 1) * page_tokens + last == len for every row."""

    indptr: Tensor
    indices: Tensor
    last: Tensor


def page_tables(pages: Sequence[Sequence[int]], lengths: Sequence[int], page_tokens: int) -> PageTables:
    """Tables for rows of ``lengths`` tokens (each >= 1). A row's list may be longer than its length needs: the surplus is
    growth room and stays out of the tables. Raises ValueError for a row whose list is too short."""
    counts = [-(-length // page_tokens) for length in lengths]
    flat: list[int] = []
    for row, count in zip(pages, counts, strict=True):
        if len(row) < count or count < 1:
            raise ValueError(f"a row of {count} pages came with {len(row)}")
        flat.extend(row[:count])
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    if counts:
        torch.cumsum(torch.tensor(counts, dtype=torch.int32), 0, out=indptr[1:])
    last = torch.tensor(
        [length - (count - 1) * page_tokens for length, count in zip(lengths, counts, strict=True)], dtype=torch.int32
    )
    indices = torch.tensor(flat, dtype=torch.int32)
    return PageTables(indptr, indices, last)
