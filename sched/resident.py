"""Which whole pages of a turn's ids are on the device, in a time that hardly grows with the history."""

from __future__ import annotations

from kvalet.sched.board import Board
from kvalet.sched.chunks import Chunk
from kvalet.sched.prefix import Node, Root
from kvalet.sched.session import Turn
from kvalet.store.ids import ChunkKey


def chunk_keys(board: Board, turn: Turn, ids: tuple[int, ...]) -> list[ChunkKey]:
    """Keys of the whole chunks of ``ids``; each is computed once per turn."""
    size = board.config.chunk_tokens
    keys = turn.keys
    while (len(keys) + 1) * size <= len(ids):
        at = len(keys) * size
        keys.append(board.chunks.key_after(turn.spec.secret, keys[-1] if keys else None, ids[at : at + size]))
    return keys


def resident_path(board: Board, root: Root, turn: Turn, limit: int) -> list[Node]:
    """What ``PageIndex.walk`` answers from the root on, by whole chunks as far as they go: the index is closed under prefixes,
    and knows each whole chunk on the device, so the last one is found by halving and the way up from it is the path."""
    ids, index = turn.known_ids(), board.index
    if board.config.deterministic:
        return index.walk(root, ids, limit, turn.calls)
    size = board.config.chunk_tokens
    keys = chunk_keys(board, turn, ids)
    low, high = 0, min(len(keys), max(limit, 0) // size)  # the first ``low`` chunks are on the device
    deepest: Chunk | None = None
    while low < high:
        middle = (low + high + 1) // 2
        chunk = board.chunks.get(keys[middle - 1])
        if chunk is not None and chunk.node is not None:
            low, deepest = middle, chunk
        else:
            high = middle - 1
    path: list[Node] = []
    at: Node | None = deepest.node if deepest is not None else None
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    path.reverse()
    for chunk_end in range(size // board.config.page_tokens, len(path) + 1, size // board.config.page_tokens):
        known = path[chunk_end - 1].chunk
        if known is None or known.ids != ids[known.first_token : known.end]:
            return index.walk(root, ids, limit)  # two histories of one key: nothing is trusted to a hash
    return path + index.walk(path[-1] if path else root, ids, limit)
