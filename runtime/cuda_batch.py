"""From the rows of a step to the tensors of a packed call. Pure: numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = tuple[Sequence[int], Sequence[int], int, int]
"""(the row's ids, its page table, first position fed, how many)."""


def pack_rows(rows: Sequence[Tokens], page_tokens: int) -> NDArray[np.int64]:
    """[3, tokens]: ids, positions and places (page * page_tokens + offset) of a packed call, row after row."""
    parts: list[NDArray[np.int64]] = []
    for ids, pages, start, n in rows:
        span = np.arange(start, start + n, dtype=np.int64)
        first = start // page_tokens
        table = np.asarray(pages[first : (start + n - 1) // page_tokens + 1], dtype=np.int64)
        fed = np.asarray(ids[start : start + n], dtype=np.int64)
        parts.append(np.stack((fed, span, table[span // page_tokens - first] * page_tokens + span % page_tokens)))
    return np.concatenate(parts, axis=1)
