"""What is on disk, as the store believes it: index, ledger, pins, recency, victims. Pure: no file, no clock, no thread.

Invariants (``check``): ``live`` = sum of entry sizes; ``used`` = live + reserved + dying + aside + stranded and, but for files
found at open or a lowered cap, ``used`` <= cap. An entry with a known child, present or being written, is never a victim, nor
is a pinned one, nor what may be an ancestor of either. Records: ``recordbooks.py``.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from kvalet.store.entries import Entry, Quarantine, Room
from kvalet.store.ids import ChunkKey, TailRef
from kvalet.store.ledger import Ledger
from kvalet.store.recordbooks import RecordBooks


class Books(Ledger):
    """Index and ledger of one store. Not thread-safe: the owner holds its lock around every call.

    ``root``: the identity digest, parent of all first chunks. Sizes in bytes; recencies are ns, larger is later.
    """

    def __init__(self, cap_bytes: int, root: bytes) -> None:
        super().__init__(cap_bytes)
        self.root = root
        self.evicted_files = 0
        self.quarantined = Quarantine()
        self.records = RecordBooks(cap_bytes)
        self.no_room = False  # the last reservation was refused for want of room
        self._entries: dict[bytes, Entry] = {}
        self._tails: dict[bytes, dict[bytes, Entry]] = {}
        self._pins: Counter[bytes] = Counter()
        self._firsts: Counter[bytes] = Counter()
        self._children: Counter[bytes] = Counter()
        self._heap: list[tuple[int, int, bytes]] = []
        self._last_recency = 0

    def __len__(self) -> int:
        return len(self._entries)

    # -- questions

    def entry(self, index_key: bytes) -> Entry | None:
        return self._entries.get(index_key)

    def find(self, key: bytes) -> Entry | None:
        """By a whole key: a chunk's or a tail's."""
        return self._entries.get(key) or self._entries.get(key[:8])

    def has(self, key: bytes) -> bool:
        entry = self.find(key)
        return entry is not None and not entry.unusable

    def tails(self, parent: bytes) -> list[TailRef]:
        """Usable tails after ``parent``, most recent first."""
        found = [entry for entry in self._tails.get(parent, {}).values() if not entry.unusable]
        found.sort(key=lambda entry: entry.recency, reverse=True)
        return [TailRef(parent, entry.file.n_tokens, entry.index_key.hex()) for entry in found]

    def entries(self) -> Iterable[Entry]:
        return self._entries.values()

    def pinned(self) -> int:
        """Sum of all pins: 0 when nothing is in flight and the scheduler holds none."""
        return sum(self._pins.values())

    # -- entries

    def add(self, entry: Entry) -> Entry | None:
        """Take in a file. Returns the entry that it replaces (same name), or None."""
        replaced = self.drop(entry.index_key)
        self._entries[entry.index_key] = entry
        self.live_bytes += entry.n_bytes
        if entry.file.is_record:
            self.records.add(entry)
        elif entry.ordinal == 0:
            self._firsts[entry.index_key[:8]] += 1
        if entry.file.is_tail and entry.parent is not None:
            self._tails.setdefault(entry.parent, {})[entry.index_key] = entry
        if entry.parent is not None:
            self._children[entry.parent] += 1
            self._lift(entry.parent, entry.recency)
        self._last_recency = max(self._last_recency, entry.recency)
        self._push(entry)
        return replaced

    def drop(self, index_key: bytes) -> Entry | None:
        """Forget a file; its bytes leave the ledger (the caller books them elsewhere if they are still on disk)."""
        entry = self._entries.pop(index_key, None)
        if entry is None:
            return None
        self.live_bytes -= entry.n_bytes
        if entry.file.is_record:
            self.let_go(entry)
            self.records.remove(entry)
        elif entry.ordinal == 0:
            self._first_gone(entry.index_key[:8])
        if entry.parent is not None:
            self.remove_child(entry.parent)
            tails = self._tails.get(entry.parent)
            if entry.file.is_tail and tails is not None:
                tails.pop(index_key, None)
                if not tails:
                    del self._tails[entry.parent]
        return entry

    def learn(self, index_key: bytes, key: bytes, parent: bytes) -> None:
        """A scan did not know the parent or a tail's whole key; a job has named them."""
        entry = self._entries.get(index_key)
        if entry is None:
            return
        entry.key = key
        if entry.parent is None:
            entry.parent = parent
            self._children[parent] += 1
            self._lift(parent, entry.recency)

    def mark_unusable(self, index_key: bytes, reason: str) -> None:
        """Keep the file's bytes in the books, never read it again, let it be evicted first."""
        entry = self._entries.get(index_key)
        if entry is not None:
            entry.unusable = reason
            entry.recency = 0
            self._push(entry)

    def add_child(self, parent: bytes) -> None:
        """A write after ``parent`` is in flight: ``parent`` is no victim meanwhile."""
        self._children[parent] += 1

    def remove_child(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if self._children[parent] <= 0:
            del self._children[parent]

    # -- pins and recency

    def pin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pins[key[:8]] += 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        """More unpins than pins is a defect of the caller: KeyError."""
        for key in keys:
            if self._pins[key[:8]] <= 0:
                raise KeyError(f"unpin of {key[:8].hex()}, which is not pinned")
            self._pins[key[:8]] -= 1
            if not self._pins[key[:8]]:
                del self._pins[key[:8]]

    def next_recency(self, now_ns: int) -> int:
        """Strictly growing, whatever the wall clock does."""
        self._last_recency = max(now_ns, self._last_recency + 1)
        return self._last_recency

    def touch(self, keys: Sequence[ChunkKey], recency: int) -> list[Entry]:
        """One recency for the chain, for the known ancestors of each key, so that no child is ever younger than its parent,
        and for records that end with one of them. Returns what changed, parents first."""
        changed: list[Entry] = []
        for key in keys:
            found = self.find(key)
            if found is not None:
                changed.extend(self._lift(found.index_key, recency))
            for record in self.records.ending(key):
                changed.extend(self._lift(record.index_key, recency))
        return changed

    def let_go(self, record: Entry) -> None:
        """It pins nothing any more, whatever its file says."""
        for key in self.records.release(record.index_key):
            entry = self.find(key)
            if entry is not None:
                self._push(entry)

    def touch_record(self, entry: Entry, recency: int) -> list[Entry]:
        return self._lift(entry.index_key, recency)

    def recency_under(self, parent: bytes, now_ns: int) -> int:
        """Recency of a new child of ``parent``: the parent's, or a new value under the root."""
        entry = self._entries.get(parent)
        return entry.recency if entry is not None else self.next_recency(now_ns)

    # -- room

    def reserve(self, n_bytes: int, spare_disk_bytes: int, *, record: bool = False) -> Room:
        """Book ``n_bytes`` for a file to be written, evicting what is necessary.

        ``spare_disk_bytes``: free bytes of the file system beyond what must stay free, as last measured; reservations are
        taken off it here. ``record``: it is one, and records have a share of their own. Refused without evicting anything
        if room cannot be made.
        """
        self.no_room = True
        if n_bytes > self.cap_bytes:
            return Room(False)
        too_many = self.records.over_share(n_bytes) if record else []
        gained = sum(entry.n_bytes for entry in too_many if self._stands(entry))
        over_cap = self.used_bytes - self.dying_bytes + n_bytes - self.cap_bytes
        over_disk = n_bytes + self.reserved_bytes - self.dying_bytes - spare_disk_bytes
        victims = self.evict(max(over_cap, over_disk, 0) - gained)
        if victims is None:
            return Room(False)
        too_many = [entry for entry in too_many if self._entries.get(entry.index_key) is entry]
        self.condemn(too_many)
        self.no_room = False
        self.reserved_bytes += n_bytes
        return Room(True, (*victims, *too_many))

    def condemn(self, entries: Sequence[Entry]) -> None:
        """Out of the index; their bytes are ``dying`` until ``buried``."""
        for entry in entries:
            self.drop(entry.index_key)
            self.dying_bytes += entry.n_bytes
        self.evicted_files += len(entries)

    def evict(self, need_bytes: int, *, partly: bool = False) -> list[Entry] | None:
        """Take the least recent, deepest entries that make up ``need_bytes`` out of the index; their bytes become
        ``dying`` until ``buried``. If there are not enough: None and no change, or, ``partly``, all there are."""
        if need_bytes <= 0:
            return []
        victims: list[Entry] = []
        kept: dict[bytes, tuple[int, int, bytes]] = {}
        gained = guard = 0
        released: Counter[bytes] = Counter()
        while self._heap and gained < need_bytes:
            item = heapq.heappop(self._heap)
            entry = self._entries.get(item[2])
            if entry is None or (entry.recency, -entry.ordinal) != item[:2] or item[2] in kept or self._stands(entry):
                continue  # a stale or second item, or one that comes back when it may go
            kept[item[2]] = item
            if self._blocked(entry, released):
                if entry.parent is None and not entry.file.is_record:
                    guard = max(guard, entry.ordinal)
            elif entry.ordinal >= guard or entry.file.is_record:
                victims.append(entry)
                gained += entry.n_bytes
                if entry.parent is not None:
                    released[entry.parent] += 1
        for item in kept.values():
            heapq.heappush(self._heap, item)
        if gained < need_bytes and not partly:
            return None
        self.condemn(victims)
        return victims

    def check(self) -> None:
        """AssertionError if the books do not add up."""
        self.check_ledger(sum(entry.n_bytes for entry in self._entries.values()))
        assert all(count > 0 for count in self._children.values()), "children"
        self.records.check(self._entries.values())
        for entry in self._entries.values():
            parent = self._entries.get(entry.parent) if entry.parent is not None else None
            assert parent is None or parent.unusable or parent.recency >= entry.recency, "a child is younger than its parent"

    def _lift(self, index_key: bytes, recency: int) -> list[Entry]:
        """Raise an entry and its known ancestors to at least ``recency``. Returns what changed, parents first."""
        line: list[Entry] = []
        entry = self._entries.get(index_key)
        while entry is not None and entry.recency < recency and not entry.unusable:
            entry.recency = recency
            self._push(entry)
            line.append(entry)
            entry = self._entries.get(entry.parent) if entry.parent is not None else None
        line.reverse()
        return line

    def _blocked(self, entry: Entry, released: Counter[bytes]) -> bool:
        if self._pins.get(entry.index_key[:8]):
            return True
        if entry.unusable:
            return False
        return self._children.get(entry.index_key, 0) > released.get(entry.index_key, 0)

    def _first_gone(self, head: bytes) -> None:
        """The first piece of a chain: records of that chain may be evicted from now on."""
        self._firsts[head] -= 1
        if self._firsts[head] <= 0:
            del self._firsts[head]
            for record in self.records.of_head(head):
                self._push(record)

    def _stands(self, entry: Entry) -> bool:
        """Not a victim until something else has gone, and not in the heap: named by a pinned record, or a pinned record, or a
        record whose chain is here. All ancestors of what a record names are named by it, too."""
        if self.records.held.get(entry.index_key[:8]):
            return not entry.unusable
        file = entry.file
        if not file.is_record or entry.unusable not in ("", "identity"):
            return False
        return file.pinned or (not entry.unusable and bool(self._firsts.get(file.head)))

    def _push(self, entry: Entry) -> None:
        if self._stands(entry):
            return
        heapq.heappush(self._heap, (entry.recency, -entry.ordinal, entry.index_key))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [(e.recency, -e.ordinal, e.index_key) for e in self._entries.values() if not self._stands(e)]
            heapq.heapify(self._heap)
