"""The RAM tier's book: which slot holds which chunk, who holds the slot, and whether losing it would lose bytes.

Pure bookkeeping over slot numbers; the bytes belong to ``runtime/slab`` and every decision to the scheduler. A slot is in
exactly one of four conditions, and their counts sum to ``n_slots``:

- free: no key, no holder; ``take`` may give it out
- taken: no key, one or more holders (a copy or a read is filling it, or its key was dropped while somebody used it)
- clean: a key, and a copy exists below (on disk)
- dirty: a key, and no copy below

Bound: ``n_slots``, fixed at construction. When no slot is free ``take`` answers None and changes nothing; the caller
drops a key of its choice first. Misuse (releasing what nobody holds, two keys in one slot, one key in two slots) raises
``RamBookError`` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvalet.store.ids import ChunkKey


class RamBookError(RuntimeError):
    """The book was used against its contract: a defect of the caller."""


@dataclass(slots=True)
class _Slot:
    key: ChunkKey | None = None
    holders: int = 0
    clean: bool = False


@dataclass(frozen=True, slots=True)
class RamStatistics:
    """Slots by condition; they sum to ``n_slots``."""

    n_slots: int
    free: int
    taken: int
    clean: int
    dirty: int


class RamBook:
    """Slots ``first`` .. ``first + n_slots - 1``. Also keeps the staging slots' book, where no slot ever has a key."""

    def __init__(self, n_slots: int, first: int = 0) -> None:
        self.n_slots = n_slots
        self._first = first
        self._slots = [_Slot() for _ in range(n_slots)]
        self._free = list(range(first + n_slots - 1, first - 1, -1))
        self._by_key: dict[ChunkKey, int] = {}

    def __repr__(self) -> str:
        return f"RamBook({self.statistics()})"

    def __contains__(self, slot: int) -> bool:
        return self._first <= slot < self._first + self.n_slots

    @property
    def slots(self) -> range:
        return range(self._first, self._first + self.n_slots)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def n_filled(self) -> int:
        """Slots with a key."""
        return len(self._by_key)

    def take(self) -> int | None:
        """A free slot, held once by the caller, without a key; None when none is free."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._at(slot).holders = 1
        return slot

    def fill(self, slot: int, key: ChunkKey, *, clean: bool) -> None:
        """The taken ``slot`` now holds the bytes of ``key``. Its holders stay."""
        entry = self._at(slot)
        if entry.key is not None or entry.holders < 1 or key in self._by_key:
            raise RamBookError(f"cannot fill slot {slot}: {entry}, key in slot {self._by_key.get(key)}")
        entry.key, entry.clean = key, clean
        self._by_key[key] = slot

    def hold(self, slot: int) -> None:
        """A reader, writer or copy begins to use the slot's bytes. Only slots with a key can gain holders."""
        entry = self._at(slot)
        if entry.key is None:
            raise RamBookError(f"slot {slot} holds no chunk: {entry}")
        entry.holders += 1

    def release(self, slot: int) -> None:
        """One holder is done. A slot without a key is free again after its last holder."""
        entry = self._at(slot)
        if entry.holders < 1:
            raise RamBookError(f"slot {slot} is held by nobody")
        entry.holders -= 1
        if entry.holders == 0 and entry.key is None:
            self._free.append(slot)

    def drop(self, slot: int) -> None:
        """Forget the slot's key. Free at once, or after the last holder's ``release``."""
        entry = self._at(slot)
        if entry.key is None:
            raise RamBookError(f"slot {slot} has no key to drop")
        del self._by_key[entry.key]
        entry.key, entry.clean = None, False
        if entry.holders == 0:
            self._free.append(slot)

    def mark(self, slot: int, *, clean: bool) -> None:
        """A copy below came into being (clean) or was lost (dirty)."""
        entry = self._at(slot)
        if entry.key is None:
            raise RamBookError(f"slot {slot} has no key")
        entry.clean = clean

    def slot_of(self, key: ChunkKey) -> int | None:
        return self._by_key.get(key)

    def key_of(self, slot: int) -> ChunkKey | None:
        return self._at(slot).key

    def holders(self, slot: int) -> int:
        return self._at(slot).holders

    def is_clean(self, slot: int) -> bool:
        return self._at(slot).clean

    def filled(self) -> Iterator[tuple[ChunkKey, int]]:
        """(key, slot) of every filled slot, oldest fill first."""
        return iter(self._by_key.items())

    def statistics(self) -> RamStatistics:
        clean = sum(self._at(slot).clean for slot in self._by_key.values())
        filled = len(self._by_key)
        free = len(self._free)
        return RamStatistics(self.n_slots, free, self.n_slots - free - filled, clean, filled - clean)

    def check(self) -> None:
        """Every slot is in exactly one condition and the two directions of the map agree. Raises ``RamBookError``."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RamBookError(f"a slot is free twice: {self._free}")
        for slot in self.slots:
            entry = self._at(slot)
            if (slot in free) != (entry.key is None and entry.holders == 0):
                raise RamBookError(f"slot {slot} free={slot in free} but {entry}")
            if entry.key is not None and self._by_key.get(entry.key) != slot:
                raise RamBookError(f"slot {slot} names a key that is booked in {self._by_key.get(entry.key)}")
        if any(self._at(slot).key != key for key, slot in self._by_key.items()):
            raise RamBookError("the key map names a slot that holds another key")

    def _at(self, slot: int) -> _Slot:
        if slot not in self:
            raise RamBookError(f"slot {slot} is not in this book")
        return self._slots[slot - self._first]
