"""What is on disk, as the store believes it: index, ledger, pins, recency, victims. Pure: no file, no clock, no thread.

Invariants (``check``): ``live`` = sum of entry sizes; ``used`` = live + reserved + dying + aside + stranded and, but for files
found at open or a lowered cap, ``used`` <= cap. An entry with a known child, present or being written, is never a victim, nor
is a pinned one, nor what may be an ancestor of either.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvalet.store.entries import Entry, Room
from kvalet.store.ids import ChunkKey, TailRef

QUARANTINE_LIMIT = 65_536


class Books:
    """Index and ledger of one store. Not thread-safe: the owner holds its lock around every call.

    ``root``: the identity digest, parent of all first chunks. Sizes in bytes; recencies are ns, larger is later.
    At the bound of the quarantine the oldest key is forgotten: it then counts as missing, not as refused.
    """

    def __init__(self, cap_bytes: int, root: bytes) -> None:
        self.cap_bytes = cap_bytes
        self.root = root
        self.live_bytes = 0
        self.reserved_bytes = 0
        self.dying_bytes = 0
        self.aside_bytes = 0
        self.stranded_bytes = 0
        self.evicted_files = 0
        self.quarantined: OrderedDict[bytes, str] = OrderedDict()
        self._entries: dict[bytes, Entry] = {}
        self._tails: dict[bytes, dict[bytes, Entry]] = {}
        self._pins: Counter[bytes] = Counter()
        self._children: Counter[bytes] = Counter()
        self._heap: list[tuple[int, int, bytes]] = []
        self._last_recency = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return self.live_bytes + self.reserved_bytes + self.dying_bytes + self.aside_bytes + self.stranded_bytes

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

    def quarantine(self, key: bytes, reason: str) -> None:
        """No reads of this key until a new put of it is durable."""
        self.quarantined[key[:8]] = reason
        while len(self.quarantined) > QUARANTINE_LIMIT:
            self.quarantined.popitem(last=False)

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
        """One recency for the chain, and for the known ancestors of each key, so that no child is ever younger than its
        parent. Returns what changed, parents first."""
        changed: list[Entry] = []
        for key in keys:
            found = self.find(key)
            if found is not None:
                changed.extend(self._lift(found.index_key, recency))
        return changed

    def recency_under(self, parent: bytes, now_ns: int) -> int:
        """Recency of a new child of ``parent``: the parent's, or a new value under the root."""
        entry = self._entries.get(parent)
        return entry.recency if entry is not None else self.next_recency(now_ns)

    # -- room

    def reserve(self, n_bytes: int, spare_disk_bytes: int) -> Room:
        """Book ``n_bytes`` for a file to be written, evicting what is necessary.

        ``spare_disk_bytes``: free bytes of the file system beyond what must stay free, as last measured; reservations are
        taken off it here. Refused without evicting anything if room cannot be made.
        """
        if n_bytes > self.cap_bytes:
            return Room(False)
        over_cap = self.used_bytes - self.dying_bytes + n_bytes - self.cap_bytes
        over_disk = n_bytes + self.reserved_bytes - self.dying_bytes - spare_disk_bytes
        victims = self.evict(max(over_cap, over_disk, 0))
        if victims is None:
            return Room(False)
        self.reserved_bytes += n_bytes
        return Room(True, tuple(victims))

    def release(self, n_bytes: int) -> None:
        """End a reservation (the file is an entry now, or was given up)."""
        self.reserved_bytes -= n_bytes

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
            if entry is None or (entry.recency, -entry.ordinal) != item[:2] or item[2] in kept:
                continue  # a stale or second item
            kept[item[2]] = item
            if self._blocked(entry, released):
                if entry.parent is None:
                    guard = max(guard, entry.ordinal)
            elif entry.ordinal >= guard:
                victims.append(entry)
                gained += entry.n_bytes
                if entry.parent is not None:
                    released[entry.parent] += 1
        for item in kept.values():
            heapq.heappush(self._heap, item)
        if gained < need_bytes and not partly:
            return None
        for entry in victims:
            self.drop(entry.index_key)
            self.dying_bytes += entry.n_bytes
        self.evicted_files += len(victims)
        return victims

    def buried(self, n_bytes: int, *, gone: bool = True) -> None:
        """A dying file was unlinked, or could not be (``gone`` False: its bytes stay in the books as stranded)."""
        self.dying_bytes -= n_bytes
        if not gone:
            self.stranded_bytes += n_bytes

    def check(self) -> None:
        """AssertionError if the books do not add up."""
        assert self.live_bytes == sum(entry.n_bytes for entry in self._entries.values()), "live bytes"
        for name in ("reserved_bytes", "dying_bytes", "aside_bytes", "stranded_bytes"):
            assert getattr(self, name) >= 0, name
        assert all(count > 0 for count in self._children.values()), "children"
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
        if entry.file.is_tail or entry.unusable:
            return False
        return self._children.get(entry.index_key, 0) > released.get(entry.index_key, 0)

    def _push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.recency, -entry.ordinal, entry.index_key))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [(e.recency, -e.ordinal, e.index_key) for e in self._entries.values()]
            heapq.heapify(self._heap)
