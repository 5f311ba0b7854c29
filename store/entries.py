"""One stored file, as the index holds it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvalet.store.ids import ChunkKey
from kvalet.store.layout import FileName

QUARANTINE_LIMIT = 65_536
KEY_BYTES = 32
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
    return [ChunkKey(entry.key or entry.index_key) for entry in entries if entry.key or len(entry.index_key) == KEY_BYTES]


class Quarantine(OrderedDict[bytes, str]):
    """Keys (their first 8 bytes) that are not read until a new put of them is durable, and why. At the bound the oldest key is
    forgotten: it then counts as missing, not as refused."""

    def put(self, key: bytes, reason: str) -> None:
        self[key[:8]] = reason
        while len(self) > QUARANTINE_LIMIT:
            self.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Room:
    """Answer to ``reserve``. Not ``granted``: nothing was evicted and nothing reserved."""

    granted: bool
    victims: tuple[Entry, ...] = ()
