"""Where a model with running state may go on: the deepest boundary whose chunks and whose state are both there. Pure.

Chunks alone may be used up to any token; with running state a prefix is worth nothing without the state at its end. State
and prefix are taken together or not at all, so that they cannot disagree: key length = state length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvalet.store.ids import ChunkMeta


def usable_boundary(ends: Mapping[int, bytes], verified: Iterable[ChunkMeta]) -> int:
    """The largest position that a verified piece of the chain ends at and that has a whole verified state; 0 if none has.

    ``ends``: position -> key of the verified chunk or tail that ends there, all pieces before it verified, too.
    ``verified``: state parts that were read and verified. Parts of a state after another piece, or cut otherwise, do not count.
    """
    found: dict[tuple[int, int], set[int]] = {}
    for meta in verified:
        state = meta.state
        if state is not None and ends.get(meta.first_token) == meta.parent:
            found.setdefault((meta.first_token, state.parts), set()).add(state.part)
    return max((position for (position, parts), seen in found.items() if len(seen) == parts), default=0)
