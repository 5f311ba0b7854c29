"""The one place that says what is worth least. Plain LRU; to be replaced by chance of return x cost to rebuild / bytes.

A rank is a tuple; the smallest goes first. Among branches the least recently used one goes first, and of one branch what
is deepest: tail before last chunk before the chunk before it. Shared prefixes go last because using any branch touches
all of them, and because only leaves are ever asked for. What a queued turn matches is asked for last (``spill.pick_victim``).

Seams for later: learned waits (``last_use`` becomes an expected return), pins, supersession and tenants' fair shares enter
here as leading components; restore-or-recompute decides in ``matching`` with the sources this ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvalet.sched.chunks import Chunk
    from kvalet.sched.prefix import Node

Rank = tuple[float, int]


def rank_pages(leaf: Node) -> Rank:
    """Rank of the pages that end with ``leaf``."""
    return (leaf.last_use, -leaf.end)


def rank_chunk(chunk: Chunk) -> Rank:
    """Rank of a chunk in RAM, comparable with ``rank_pages``."""
    return (chunk.last_use, -chunk.end)
