"""One stored file, as the index holds it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvalet.store.ids import ChunkKey
from kvalet.store.layout import FileName

UNKNOWN_ORDINAL = 1 << 31
"""Of a tail whose parent is not here: deeper than anything, so it goes first."""


@dataclass(slots=True)
class Entry:
    """One file. ``key``/``parent``: whole keys where known (a scan of names knows only some). ``unusable``: why it may not
    be read ("" = it may); such a file keeps its bytes in the ledger until it is evicted or replaced."""

    file: FileName
    n_bytes: int
    recency: int
    ordinal: int
    key: bytes | None = None
    parent: bytes | None = None
    unusable: str = ""

    @property
    def index_key(self) -> bytes:
        return self.file.index_key


def keys_of(entries: Iterable[Entry]) -> list[ChunkKey]:
    """Whole keys, where they are known: nobody can have asked for the others."""
    return [ChunkKey(entry.key or entry.index_key) for entry in entries if entry.key or not entry.file.is_tail]


@dataclass(frozen=True, slots=True)
class Room:
    """Answer to ``reserve``. Not ``granted``: nothing was evicted and nothing reserved."""

    granted: bool
    victims: tuple[Entry, ...] = ()
