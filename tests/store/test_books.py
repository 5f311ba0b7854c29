"""The index and the ledger alone, against a plain model: cap, leaf-first eviction, pins, recency, clocks (G1-G3, T1)."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from kvalet.store.books import Books
from kvalet.store.entries import QUARANTINE_LIMIT, UNKNOWN_ORDINAL, Entry, keys_of
from kvalet.store.ids import ChunkKey
from kvalet.store.layout import FileName

ROOT = b"r" * 32
MUCH = 1 << 60


def key_of(parent: bytes, n: int) -> bytes:
    return hashlib.blake2b(parent + n.to_bytes(4, "little"), digest_size=32).digest()


def entry(key: bytes, ordinal: int, *, parent: bytes | None = None, n_bytes: int = 100, recency: int = 1) -> Entry:
    file = FileName("c", key.hex()[:2], f"{key.hex()}.{ordinal}.00000000", key, ordinal)
    return Entry(file, n_bytes, recency, ordinal, key if parent else None, parent)


def add_chain(books: Books, n: int, seed: int = 0, *, known: bool = True, recency: int = 1) -> list[bytes]:
    keys, parent = [], ROOT
    for i in range(n):
        key = key_of(parent, seed if i == 0 else i)
        books.add(entry(key, i, parent=parent if known else None, recency=recency))
        keys.append(key)
        parent = key
    return keys


def evicted(books: Books, need: int) -> list[int]:
    victims = books.evict(need)
    assert victims is not None
    return [victim.ordinal for victim in victims]


def test_deepest_first_then_least_recent() -> None:
    books = Books(MUCH, ROOT)
    add_chain(books, 4, recency=5)
    add_chain(books, 3, seed=1, recency=3)
    assert evicted(books, 350) == [2, 1, 0, 3]
    assert evicted(books, 1) == [2]


@pytest.mark.parametrize("known", [True, False])
def test_a_pinned_chunk_keeps_all_that_may_be_its_ancestors(known: bool) -> None:
    """After a restart parents are unknown until a job names them; then every shallower chunk may be an ancestor."""
    books = Books(MUCH, ROOT)
    keys = add_chain(books, 5, known=known)
    books.pin([keys[3]])
    assert evicted(books, 100) == [4]
    assert books.evict(1) is None
    books.unpin([keys[3]])
    assert evicted(books, 400) == [3, 2, 1, 0]


def test_known_chains_are_not_held_by_a_strangers_pin() -> None:
    books = Books(MUCH, ROOT)
    keys = add_chain(books, 5, recency=1)
    add_chain(books, 3, seed=1, recency=2)
    books.pin([keys[4]])
    assert evicted(books, 300) == [2, 1, 0]
    assert books.evict(1) is None


def test_a_child_in_flight_holds_its_parent() -> None:
    books = Books(MUCH, ROOT)
    keys = add_chain(books, 2)
    books.add_child(keys[1])
    assert books.evict(1) is None
    books.remove_child(keys[1])
    assert evicted(books, 1) == [1]


def test_refused_without_evicting_anything() -> None:
    """G2: a chunk above the cap, or room that pins do not allow."""
    books = Books(300, ROOT)
    keys = add_chain(books, 3)
    assert not books.reserve(301, MUCH).granted
    books.pin([keys[1]])
    assert not books.reserve(200, MUCH).granted
    assert (len(books), books.used_bytes, books.dying_bytes) == (3, 300, 0)
    room = books.reserve(100, MUCH)
    assert (room.granted, [victim.ordinal for victim in room.victims]) == (True, [2])


def test_partly_takes_what_there_is() -> None:
    books = Books(MUCH, ROOT)
    add_chain(books, 3)
    assert [victim.ordinal for victim in books.evict(10_000, partly=True) or ()] == [2, 1, 0]


def test_free_space_of_the_disk_counts_like_the_cap() -> None:
    books = Books(MUCH, ROOT)
    add_chain(books, 3)
    assert len(books.reserve(100, 100).victims) == 0
    assert len(books.reserve(100, 100).victims) == 1  # the first reservation has taken the spare 100
    assert len(books.reserve(100, 100).victims) == 1
    assert not books.reserve(1000, -100).granted


def test_a_second_index_item_of_one_entry_is_not_evicted_twice() -> None:
    books = Books(MUCH, ROOT)
    keys = add_chain(books, 1)
    books.drop(keys[0])
    books.add(entry(keys[0], 0, parent=ROOT))
    assert evicted(books, 100) == [0]
    assert (books.live_bytes, books.dying_bytes) == (0, 100)


def test_unusable_files_keep_their_bytes_and_go_first() -> None:
    books = Books(MUCH, ROOT)
    keys = add_chain(books, 3, recency=9)
    books.mark_unusable(keys[0], "io")
    assert not books.has(keys[0])
    assert books.live_bytes == 300
    assert evicted(books, 100) == [0]


def test_the_quarantine_is_bounded() -> None:
    books = Books(MUCH, ROOT)
    for i in range(QUARANTINE_LIMIT + 10):
        books.quarantined.put(i.to_bytes(32, "big")[::-1], "payload")
    assert len(books.quarantined) == QUARANTINE_LIMIT


def test_unpin_without_pin_is_a_defect() -> None:
    books = Books(MUCH, ROOT)
    books.pin([b"k" * 32])
    books.unpin([b"k" * 32])
    with pytest.raises(KeyError, match="not pinned"):
        books.unpin([b"k" * 32])


def test_keys_of_tails_that_nobody_named_are_not_told() -> None:
    file = FileName("t", "00", "x", b"8 bytes.", -1, ROOT, 5)
    assert keys_of([Entry(file, 1, 1, UNKNOWN_ORDINAL, None, ROOT)]) == []
    assert keys_of([Entry(file, 1, 1, 0, b"k" * 32, ROOT)]) == [ChunkKey(b"k" * 32)]


YEAR_NS = 365 * 86_400 * 10**9


@pytest.mark.parametrize("clock", [[10, 5, 1], [YEAR_NS * 60, YEAR_NS, 0], [0, 0, 0], [-5, -6, 3]])
def test_recency_grows_whatever_the_clock_does(clock: list[int]) -> None:
    """T1: the clock back a year, forward a year, standing still."""
    books = Books(MUCH, ROOT)
    first, second = add_chain(books, 2), add_chain(books, 2, seed=1)
    values = [books.next_recency(now) for now in clock]
    assert values == sorted(set(values))
    books.touch([ChunkKey(key) for key in second], books.next_recency(clock[0]))
    books.touch([ChunkKey(key) for key in first], books.next_recency(clock[-1]))
    assert [victim.key for victim in books.evict(200) or ()] == [second[1], second[0]]
    books.check()


def test_touching_a_child_alone_lifts_its_known_ancestors() -> None:
    books = Books(MUCH, ROOT)
    keys = add_chain(books, 4)
    changed = books.touch([ChunkKey(keys[2])], 50)
    assert [e.ordinal for e in changed] == [0, 1, 2]
    books.check()


class BooksMachine(RuleBasedStateMachine):
    """Trees of chunks under a cap, against the plain rules: nothing pinned, and no chunk with a living child, is evicted."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(1000, ROOT)
        self.parents: dict[bytes, bytes] = {}
        self.here: set[bytes] = set()
        self.pins: list[bytes] = []
        self.reserved = self.dying = 0
        self.clock = 0

    def forget(self, victims: tuple[Entry, ...]) -> None:
        for victim in victims:
            assert victim.index_key not in self.pins
            self.here.discard(victim.index_key)
            self.dying += victim.n_bytes
            assert victim.index_key not in {self.parents[key] for key in self.here}, "a chunk went before its child"

    @rule(
        target=keys, parent=st.one_of(st.just(ROOT), keys), n=st.integers(0, 3), size=st.integers(1, 300), known=st.booleans()
    )
    def write(self, parent: bytes, n: int, size: int, known: bool) -> bytes:
        key = key_of(parent, n)
        if key in self.here or (parent != ROOT and parent not in self.here):
            return key
        self.books.add_child(parent)
        room = self.books.reserve(size, MUCH)
        self.forget(room.victims)
        if room.granted:
            self.clock += 1
            depth = 0
            at = parent
            while at != ROOT:
                depth, at = depth + 1, self.parents[at]
            self.books.release(size)
            recency = self.books.recency_under(parent, self.clock)
            self.books.add(entry(key, depth, parent=parent if known else None, n_bytes=size, recency=recency))
            self.parents[key] = parent
            self.here.add(key)
        self.books.remove_child(parent)
        return key

    @rule(key=keys)
    def touch_chain(self, key: bytes) -> None:
        chain = []
        while key in self.parents:
            chain.append(ChunkKey(key))
            key = self.parents[key]
        self.clock += 1
        self.books.touch(chain[::-1], self.books.next_recency(self.clock))

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        self.pins.append(key)
        self.books.pin([key])

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            key = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            self.books.unpin([key])

    @rule(key=consumes(keys))
    def name(self, key: bytes) -> None:
        if key in self.here:
            self.books.learn(key, key, self.parents[key])

    @rule()
    def bury(self) -> None:
        self.books.buried(self.dying)
        self.dying = 0

    @invariant()
    def books_add_up(self) -> None:
        self.books.check()
        assert {e.index_key for e in self.books.entries()} == self.here
        assert self.books.dying_bytes == self.dying
        assert self.books.live_bytes + self.books.reserved_bytes <= 1000
        assert all(self.parents[key] in self.here or self.parents[key] == ROOT for key in self.here), "closed under ancestors"


TestBooksMachine = BooksMachine.TestCase
TestBooksMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(1, 400)), max_size=200))
def test_cap_holds_over_any_puts(puts: list[tuple[int, int, int]]) -> None:
    """G1 on the books alone: never above the cap, unlinks under way included."""
    books = Books(2000, ROOT)
    clock = 0
    for which, depth, size in puts:
        clock += 1
        parent = ROOT
        for level in range(depth):
            parent = key_of(parent, which if level == 0 else level)
        key = key_of(parent, which if depth == 0 else depth)
        if books.has(key) or (parent != ROOT and not books.has(parent)):
            continue
        books.add_child(parent)
        room = books.reserve(size, MUCH)
        if room.granted:
            books.buried(sum(victim.n_bytes for victim in room.victims))
            books.release(size)
            books.add(entry(key, depth, parent=parent, n_bytes=size, recency=books.recency_under(parent, clock)))
        books.remove_child(parent)
        assert books.used_bytes <= 2000
        books.check()
