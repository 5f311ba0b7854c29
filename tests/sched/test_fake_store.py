"""The fake store: what it holds, refuses and loses, as the real one would."""

from __future__ import annotations

from typing import Any

import pytest
from kvalet.store.fake import FakeStore
from kvalet.store.ids import ChunkMeta, chunk_key
from kvalet.store.jobs import ReadResult

ROOT, SECRET = b"i" * 32, b"s" * 32


def meta(parent: bytes, ordinal: int, ids: tuple[int, ...], tail: bool = False) -> ChunkMeta:
    return ChunkMeta(chunk_key(SECRET, parent, ids), parent, ordinal, ordinal * 4, ids, 1, tail)


FIRST = meta(ROOT, 0, (1, 2, 3, 4))
SECOND = meta(FIRST.key, 1, (5, 6, 7, 8))


class Desk:
    """Runs jobs and keeps their outcomes."""

    def __init__(self, **options: Any) -> None:
        self.store = FakeStore(**options)
        self.gone: list[bytes] = []
        self.store.on_gone = self.gone.extend
        self.slot = memoryview(bytearray(b"payload of a slot".ljust(32)))
        self.outcomes: list[Any] = []

    def done(self, completion: Any) -> None:
        self.outcomes.append(self.store.settle(completion))

    def write(self, what: ChunkMeta) -> str:
        self.store.write(1, what, self.slot, self.done, klass=2)
        return str(self.outcomes[-1].reason)

    def read(self, what: ChunkMeta) -> ReadResult:
        self.slot[:] = bytes(32)
        self.store.read(2, what, self.slot, self.done, session="", klass=0)
        outcome = self.outcomes[-1]
        assert isinstance(outcome, ReadResult)
        return outcome


def test_what_was_written_is_read_back() -> None:
    desk = Desk()
    before = bytes(desk.slot)
    assert desk.write(FIRST) == ""
    assert desk.store.has(FIRST.key)
    got = desk.read(FIRST)
    assert (got.reason, got.key, got.ids) == ("", FIRST.key, FIRST.ids)
    assert bytes(desk.slot) == before


def test_a_second_write_of_the_same_chunk_is_skipped() -> None:
    desk = Desk()
    desk.write(FIRST)
    desk.write(FIRST)
    assert desk.outcomes[-1].skipped


def test_a_child_needs_its_parent() -> None:
    desk = Desk()
    assert desk.write(SECOND) == "ancestor"
    desk.write(FIRST)
    assert desk.write(SECOND) == ""


@pytest.mark.parametrize(("fault", "reason"), [("corrupt", "payload"), ("tear", "size"), ("vanish", "missing")])
def test_what_is_damaged_is_refused_and_gone(fault: str, reason: str) -> None:
    desk = Desk()
    desk.write(FIRST)
    getattr(desk.store, fault)(FIRST.key)
    assert desk.read(FIRST).reason == reason
    assert desk.gone == [FIRST.key]
    assert not desk.store.has(FIRST.key)
    assert desk.read(FIRST).reason == "missing"


def test_another_parent_is_foreign() -> None:
    desk = Desk()
    desk.write(FIRST)
    wrong = ChunkMeta(FIRST.key, b"x" * 32, 0, 0, FIRST.ids, 1)
    assert desk.read(wrong).reason == "foreign"


def test_full_and_read_only() -> None:
    desk = Desk()
    desk.store.full = True
    assert desk.write(FIRST) == "full"
    desk.store.writable = False
    assert not desk.store.accepts_writes()
    assert desk.write(FIRST) == "read_only"


def test_the_bound_evicts_leaves_that_nobody_pinned() -> None:
    desk = Desk(capacity=2)
    desk.write(FIRST)
    desk.write(SECOND)
    other = meta(ROOT, 0, (9, 9, 9, 9))
    assert desk.write(other) == ""
    assert desk.gone == [SECOND.key]  # deepest first: its parent had a child
    desk.store.pin((FIRST.key, other.key))
    assert desk.write(meta(ROOT, 0, (8, 8, 8, 8))) == "full"
    desk.store.unpin((FIRST.key,))
    assert desk.write(meta(ROOT, 0, (8, 8, 8, 8))) == ""
    with pytest.raises(RuntimeError, match="not pinned"):
        desk.store.unpin((FIRST.key,))


def test_touching_keeps() -> None:
    desk = Desk(capacity=2)
    other = meta(ROOT, 0, (9, 9, 9, 9))
    desk.write(FIRST)
    desk.write(other)
    desk.store.touch((FIRST.key,))
    desk.write(meta(ROOT, 0, (8, 8, 8, 8)))
    assert desk.gone == [other.key]


def test_tails_are_listed_latest_first_and_the_longest_common_one_is_read() -> None:
    desk = Desk()
    desk.write(FIRST)
    tails = [meta(FIRST.key, 1, ids, True) for ids in ((5, 6), (5, 7, 7), (9,))]
    for tail in tails:
        desk.write(tail)
    refs = desk.store.tails(FIRST.key)
    assert [ref.n_tokens for ref in refs] == [1, 3, 2]
    desk.store.read_tail(3, FIRST.key, 1, 4, (5, 7, 1), refs, desk.slot, desk.done, session="", klass=0, secret=SECRET)
    assert desk.outcomes[-1].ids == (5, 7, 7)
    desk.store.read_tail(4, FIRST.key, 1, 4, (1, 1), refs, desk.slot, desk.done, session="", klass=0, secret=SECRET)
    assert desk.outcomes[-1].reason == "no_prefix"
    desk.store.read_tail(5, FIRST.key, 1, 4, (5, 7), refs, desk.slot, desk.done, session="", klass=0, secret=b"o" * 32)
    assert desk.outcomes[-1].reason == "key"


def test_held_jobs_wait_for_the_script() -> None:
    desk = Desk(hold=True)
    desk.store.write(1, FIRST, desk.slot, desk.done, klass=2)
    desk.store.write(2, SECOND, desk.slot, desk.done, klass=2)
    assert desk.outcomes == []
    desk.store.cancel(2)
    assert desk.outcomes[-1].reason == "cancelled"
    desk.store.pending[0].run()
    assert desk.outcomes[-1].reason == ""
    assert desk.store.pending == []
