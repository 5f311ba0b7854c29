"""Which records are stored: by session, by the first piece that they name, by age. Pure; part of ``Books``, which has their
bytes and their pins.

A record goes when the first piece that it names is gone (then only by its age), when its ttl is over, when it is dropped,
or when all records together take more than their share of the cap: the least recent ones, pinned ones never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from kvalet.store.entries import Entry

Outer = TypeVar("Outer", bound=Hashable)
Inner = TypeVar("Inner", bound=Hashable)
SHARE = 8
"""Records may take one part in so many of the cap, at least LEAST_BYTES."""
LEAST_BYTES = 1 << 20


class RecordBooks:
    """Not thread-safe: the owner holds its lock. ``n_bytes``: of all record files, as in the ledger.

    ``unread``: index keys whose ttl is not known yet (found at open). ``held``: first 8 bytes of every key that a pinned
    record names, counted.
    """

    def __init__(self, cap_bytes: int) -> None:
        self.share_bytes = max(cap_bytes // SHARE, LEAST_BYTES)
        self.n_bytes = 0
        self.n_pinned = 0
        self.unread: dict[bytes, None] = {}
        self.held: Counter[bytes] = Counter()
        self._sessions: dict[bytes, dict[str, Entry]] = {}
        self._heads: dict[bytes, dict[bytes, Entry]] = {}
        self._ends: dict[bytes, dict[bytes, Entry]] = {}
        self._end_of: dict[bytes, bytes] = {}
        self._holds: dict[bytes, tuple[bytes, ...]] = {}
        self._ttl_ns: dict[bytes, int] = {}

    def __len__(self) -> int:
        return sum(len(branches) for branches in self._sessions.values())

    # -- questions

    def held_keys(self) -> set[bytes]:
        """What pinned records name, each once: whole keys."""
        return {name for names in self._holds.values() for name in names}

    def all(self) -> Iterator[Entry]:
        for branches in self._sessions.values():
            yield from branches.values()

    def branches(self, session: bytes) -> list[str]:
        """Branches with a usable record, most recent first. ``session``: its hash."""
        found = [entry for entry in self._sessions.get(session, {}).values() if not entry.unusable]
        found.sort(key=lambda entry: entry.recency, reverse=True)
        return [entry.file.branch for entry in found]

    def of_head(self, head: bytes) -> list[Entry]:
        """Records whose first piece has these 8 bytes."""
        return list(self._heads.get(head, {}).values())

    def ending(self, key: bytes) -> list[Entry]:
        """Records, as far as they are known, whose last piece is ``key``: used whenever it is."""
        return list(self._ends.get(key[:8], {}).values())

    def over_share(self, n_bytes: int) -> list[Entry]:
        """The least recent unpinned records that must go before ``n_bytes`` more are within the share."""
        over = self.n_bytes + n_bytes - self.share_bytes
        victims = []
        if over > 0:
            for entry in sorted((one for one in self.all() if not one.file.pinned), key=lambda one: one.recency):
                if over <= 0:
                    break
                victims.append(entry)
                over -= entry.n_bytes
        return victims

    def expired(self, now_ns: int) -> list[Entry]:
        """Unpinned records whose ttl is over."""
        found = []
        for entry in self.all():
            ttl_ns = self._ttl_ns.get(entry.index_key, 0)
            if ttl_ns and not entry.file.pinned and entry.recency + ttl_ns < now_ns:
                found.append(entry)
        return found

    # -- changes

    def add(self, entry: Entry) -> None:
        """Not there yet: ``Books.add`` has dropped what it replaces."""
        self._sessions.setdefault(entry.file.session, {})[entry.file.branch] = entry
        self._heads.setdefault(entry.file.head, {})[entry.index_key] = entry
        self.n_bytes += entry.n_bytes
        self.n_pinned += entry.file.pinned
        self.unread[entry.index_key] = None

    def release(self, index_key: bytes) -> tuple[bytes, ...]:
        """Returns the keys that it held, if it was pinned."""
        released = self._holds.pop(index_key, ())
        for name in released:
            self.held[name[:8]] -= 1
            if not self.held[name[:8]]:
                del self.held[name[:8]]
        return released

    def remove(self, entry: Entry) -> None:
        """Released already."""
        key = entry.index_key
        _take_out(self._sessions, entry.file.session, entry.file.branch)
        _take_out(self._heads, entry.file.head, key)
        _take_out(self._ends, self._end_of.pop(key, b""), key)
        self.n_bytes -= entry.n_bytes
        self.n_pinned -= entry.file.pinned
        self.unread.pop(key, None)
        self._ttl_ns.pop(key, None)

    def learn_ttl(self, index_key: bytes, ttl_s: int | None) -> None:
        """What its file says, if that could be read (None: it is kept until evicted)."""
        if index_key not in self.unread:
            return
        del self.unread[index_key]
        if ttl_s:
            self._ttl_ns[index_key] = ttl_s * 1_000_000_000

    def learn_keys(self, entry: Entry, keys: Sequence[bytes]) -> None:
        """What it names. The first call counts for each file: names of another record come with another entry."""
        key = entry.index_key
        if keys and key not in self._end_of:
            self._end_of[key] = keys[-1][:8]
            self._ends.setdefault(keys[-1][:8], {})[key] = entry
        if entry.file.pinned and key not in self._holds:
            self._holds[key] = tuple(bytes(name) for name in keys)
            self.held.update(name[:8] for name in keys)

    def check(self, entries: Iterable[Entry]) -> None:
        """AssertionError if they do not fit the index."""
        records = [entry for entry in entries if entry.file.is_record]
        assert self.n_bytes == sum(entry.n_bytes for entry in records), "record bytes"
        assert {id(entry) for entry in records} == {id(entry) for entry in self.all()}, "records"
        assert sum(map(len, self._heads.values())) == len(records), "heads"
        assert self.held == Counter(name[:8] for names in self._holds.values() for name in names), "held"
        assert self._end_of.keys() | self._holds.keys() | self._ttl_ns.keys() <= {entry.index_key for entry in records}


def _take_out(table: dict[Outer, dict[Inner, Entry]], outer: Outer, inner: Inner) -> None:
    found = table.get(outer)
    if found is not None:
        found.pop(inner, None)
        if not found:
            del table[outer]
