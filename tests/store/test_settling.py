"""Admission and settling on the shared state alone: no thread, no file. What a job's outcome does to index, ledger, health."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from kvalet.store.admission import admit_read, admit_tail_read, admit_write, cancel, evict_to_cap
from kvalet.store.books import Books
from kvalet.store.config import StoreConfig
from kvalet.store.directory import Directory
from kvalet.store.fileio import FileIO
from kvalet.store.header import Geometry, Home
from kvalet.store.ids import ChunkMeta, TailRef
from kvalet.store.janitor import BadFolder
from kvalet.store.jobs import ReadResult, WriteResult
from kvalet.store.layout import index_key
from kvalet.store.reading import ReadOutcome, TailWish
from kvalet.store.scan import Walk
from kvalet.store.settling import settle_read, settle_write
from kvalet.store.state import Read, ReadOver, StoreState, WriteOver
from kvalet.store.stats import StoreStatistics, health_of, rate, statistics_of
from kvalet.store.writeboard import Stage
from storekit import CHUNK_TOKENS, FILE_BYTES, IDENTITY, PAGE_TOKENS, STRIDE, chain, slot

SECRET = b"s" * 32
HOME = Home(b"i" * 16, IDENTITY.digest, Geometry(PAGE_TOKENS, STRIDE, STRIDE, CHUNK_TOKENS))


class Desk:
    """A state with a clock in the test's hands, driven as threads would drive it."""

    def __init__(self, **config: Any) -> None:
        made = StoreConfig("nowhere", **{"cap_bytes": 1 << 24, "min_free_bytes": 0, **config})
        disk = Directory(FileIO(), -1, -1, HOME.store_id, SECRET, created=False)
        self.now = 1000.0
        self.state = StoreState(made, disk, HOME, Books(made.cap_bytes, IDENTITY.digest), BadFolder())
        self.state.clock = lambda: self.now
        self.state.wall_ns = lambda: int(self.now * 1e9)
        self.job = 0

    @property
    def books(self) -> Books:
        return self.state.books

    def answers(self) -> list[ReadOver | WriteOver]:
        """What the clerk would deliver now."""
        found = [over for _, over in self.state.answers]
        self.state.answers.clear()
        self.state.unsettled += len(found)
        return found

    def write(self, meta: ChunkMeta, *, klass: int = 2, view: memoryview | None = None) -> int:
        self.job += 1
        with self.state.lock:
            admit_write(self.state, self.job, meta, slot() if view is None else view, lambda over: None, klass)
        return self.job

    def read(self, meta: ChunkMeta, *, view: memoryview | None = None, klass: int = 0) -> int:
        self.job += 1
        read = Read(self.job, slot() if view is None else view, lambda over: None, self.now, meta, klass=klass)
        with self.state.lock:
            admit_read(self.state, read, "session")
        return self.job

    def settled(self) -> list[ReadResult | WriteResult]:
        return [
            settle_read(self.state, over) if isinstance(over, ReadOver) else settle_write(self.state, over)
            for over in self.answers()
        ]

    def reasons(self) -> list[str]:
        return [result.reason for result in self.settled()]

    def finish(self, *, fail: str = "") -> None:
        """A worker and the committer take all writes as far as they go."""
        board = self.state.board
        with self.state.lock:
            while (write := board.take()) is not None:
                over = board.fail(write, fail) if fail else []
                if not fail:
                    board.written(write)
                    wave = board.take_ready()
                    for one in wave:
                        board.durable(one)
                    over += wave
                for one in over:
                    for done, result in self.state.finish_write(one):
                        self.state.answer(done, result)

    def stored(self, metas: list[ChunkMeta]) -> list[ChunkMeta]:
        for meta in metas:
            self.write(meta)
        self.finish()
        assert self.reasons() == [""] * len(metas)
        self.books.check()
        return metas

    def reader(self, reason: str = "", field: str = "", *, stranger: bool = False) -> ReadResult:
        """A reader takes the next read and finds this."""
        with self.state.lock:
            read = self.state.reads.take()
            assert read is not None
            file, meta = read.files[0], read.meta
            assert meta is not None
            good = (meta.key, meta.parent, meta.ids, FILE_BYTES, 2.0, 1.0)
            outcome = ReadOutcome(reason, field, file, stranger=stranger) if reason else ReadOutcome("", "", file, *good)
            self.state.answer(read.done, ReadOver(read, (outcome,)))
        result = self.settled()[0]
        assert isinstance(result, ReadResult)
        return result


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_good_read_is_counted_and_leaves_no_pin(desk: Desk) -> None:
    (meta,) = desk.stored(chain(SECRET, 1))
    desk.read(meta)
    assert desk.books.pinned() == 1
    result = desk.reader()
    assert (result.reason, result.key, result.ids, result.n_bytes) == ("", meta.key, meta.ids, FILE_BYTES)
    shown = statistics_of(desk.state, Walk(0, 0, 7))
    assert (shown.reads, shown.hits, shown.read_bytes, shown.pinned, shown.unsettled) == (1, 1, FILE_BYTES, 0, 0)
    assert shown.read_bytes_per_s == pytest.approx(FILE_BYTES / 0.002)
    assert shown.verify_bytes_per_s == pytest.approx(FILE_BYTES / 0.001)
    assert (shown.strangers, shown.files, shown.live_bytes) == (7, 1, FILE_BYTES)
    assert health_of(desk.state).status == "ok"


@pytest.mark.parametrize("reason", ["size", "header", "payload", "key"])
def test_a_damaged_file_goes_aside_and_its_key_stays_barred_until_it_is_written_again(desk: Desk, reason: str) -> None:
    meta = desk.stored(chain(SECRET, 1))[0]
    desk.read(meta)
    assert desk.reader(reason, "where").reason == reason
    (burial,) = desk.state.burials
    assert (burial.aside, burial.n_bytes, desk.books.dying_bytes, desk.books.live_bytes) == (True, FILE_BYTES, FILE_BYTES, 0)
    assert desk.state.gone == [meta.key]
    desk.read(meta)
    assert desk.reasons() == ["quarantined"]
    assert statistics_of(desk.state, Walk(0, 0, 0)).quarantined == 1
    desk.stored([meta])
    assert statistics_of(desk.state, Walk(0, 0, 0)).quarantined == 0
    desk.read(meta)
    assert desk.reader().reason == ""
    assert ("where", 1) in [
        (field, n) for word, field, n in statistics_of(desk.state, Walk(0, 0, 0)).refusals if word == reason
    ]


@pytest.mark.parametrize("reason", ["identity", "foreign", "io"])
def test_what_is_not_ours_keeps_its_place_and_goes_first(desk: Desk, reason: str) -> None:
    old, bad = desk.stored(chain(SECRET, 1))[0], desk.stored(chain(SECRET, 1, seed=1))[0]
    desk.read(bad)
    desk.reader(reason, "x")
    assert not desk.state.burials
    assert desk.books.live_bytes == 2 * FILE_BYTES
    assert not desk.books.has(bad.key)
    desk.read(bad)
    assert desk.reasons() == ["quarantined"]
    victims = desk.books.evict(1)
    assert victims is not None
    assert [victim.index_key for victim in victims] == [bad.key]
    assert desk.books.has(old.key)


@pytest.mark.parametrize(("reason", "stranger", "later"), [("missing", False, "missing"), ("foreign", True, "quarantined")])
def test_a_file_that_is_gone_or_a_strangers_leaves_the_books_untouched_on_disk(
    desk: Desk, reason: str, stranger: bool, later: str
) -> None:
    meta = desk.stored(chain(SECRET, 1))[0]
    desk.read(meta)
    desk.reader(reason, "type", stranger=stranger)
    assert (desk.books.used_bytes, list(desk.state.burials), desk.state.gone) == (0, [], [meta.key])
    desk.read(meta)
    assert desk.reasons() == [later]


@pytest.mark.parametrize("reason", ["resources", "cancelled", "deadline", "closed", "quarantined", "no_prefix", "internal"])
def test_reasons_that_say_nothing_against_the_file_keep_it(desk: Desk, reason: str) -> None:
    meta = desk.stored(chain(SECRET, 1))[0]
    desk.read(meta)
    assert desk.reader(reason).reason == reason
    assert desk.books.has(meta.key)
    assert desk.state.gone == []
    assert desk.state.counts.internal == (reason == "internal")


@pytest.mark.parametrize(("reason", "burials"), [("payload", 1), ("identity", 0)])
def test_two_readers_of_one_bad_file_condemn_it_once(desk: Desk, reason: str, burials: int) -> None:
    meta = desk.stored(chain(SECRET, 1))[0]
    desk.read(meta)
    desk.read(meta)
    desk.reader(reason, "field")
    desk.reader(reason, "field")
    assert (len(desk.state.burials), desk.books.dying_bytes) == (burials, burials * FILE_BYTES)
    assert desk.state.gone == [meta.key]
    desk.books.check()


def test_a_lost_chunk_fails_the_writes_that_follow_it(desk: Desk) -> None:
    first, second, third = chain(SECRET, 3)
    desk.stored([first])
    desk.read(first)
    desk.write(second)
    desk.write(third)
    desk.reader("header", "magic")
    assert desk.reasons() == ["ancestor", "ancestor"]
    assert (desk.books.reserved_bytes, len(desk.state.board)) == (0, 0)
    desk.write(second)
    assert desk.reasons() == ["ancestor"]


def test_read_errors_close_the_tier_for_a_while_and_health_says_so() -> None:
    desk = Desk(breaker_errors=2, breaker_window_s=10.0, breaker_open_s=5.0)
    bad = [desk.stored(chain(SECRET, 1, seed=seed))[0] for seed in range(3)]
    for meta in bad[:2]:
        desk.read(meta)
        desk.reader("io", "EIO")
    desk.read(bad[2])
    assert desk.reasons() == ["io"]
    assert desk.books.has(bad[2].key), "the file was not even looked at"
    assert health_of(desk.state).why == ("reads fail: the tier is not read for a while",)
    desk.now += 5.0
    desk.read(bad[2])
    assert desk.reader().reason == ""
    assert health_of(desk.state).status == "ok"


def test_followers_end_with_their_leader(desk: Desk) -> None:
    """Whatever happens to the one that writes; only the leader's bytes are counted."""
    meta = chain(SECRET, 1)[0]
    for _ in range(3):
        desk.write(meta)
    desk.finish(fail="io")
    assert [(r.reason, isinstance(r, WriteResult) and r.skipped) for r in desk.settled()] == [("io", False)] * 3
    for _ in range(3):
        desk.write(meta)
    desk.finish()
    assert [(r.n_bytes, isinstance(r, WriteResult) and r.skipped) for r in desk.settled()] == [
        (FILE_BYTES, False),
        (0, True),
        (0, True),
    ]
    shown = statistics_of(desk.state, Walk(0, 0, 0))
    assert (shown.writes, shown.skipped, shown.written_bytes, shown.failures) == (1, 2, FILE_BYTES, (("io", 3),))


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda desk: setattr(desk.state, "closed", True), "closed"),
        (lambda desk: desk.state.write_breaker.failed(desk.now, "EIO"), "read_only"),
        (lambda desk: setattr(desk.books, "cap_bytes", FILE_BYTES - 1), "full"),
        (lambda desk: setattr(desk.state, "spare_bytes", FILE_BYTES - 1), "full"),
    ],
)
def test_writes_refused_at_once_book_nothing(desk: Desk, prepare: Any, reason: str) -> None:
    prepare(desk)
    desk.write(chain(SECRET, 1)[0])
    assert desk.reasons() == [reason]
    assert (desk.books.used_bytes, len(desk.state.board)) == (0, 0)


def test_slots_that_cannot_hold_the_chunk_are_a_defect_and_counted(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    meta = chain(SECRET, 1)[0]
    desk.write(meta, view=slot()[: FILE_BYTES - 1])
    desk.write(meta, view=memoryview(bytes(FILE_BYTES)))
    assert desk.reasons() == ["internal", "internal"]
    desk.stored([meta])
    desk.read(meta, view=slot()[: FILE_BYTES - 1])
    assert desk.reasons() == ["internal"]
    assert desk.state.counts.internal == 3
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 3


def test_at_the_bound_of_the_queues_the_next_one_is_refused() -> None:
    desk = Desk(queue_limit=2)
    meta = desk.stored(chain(SECRET, 1))[0]
    jobs = [desk.read(meta) for _ in range(3)]
    assert [(r.job, r.reason) for r in desk.settled()] == [(jobs[2], "resources")]
    others = [desk.write(chain(SECRET, 1, seed=seed)[0]) for seed in (1, 2, 3)]
    assert [(r.job, r.reason) for r in desk.settled()] == [(others[2], "resources")]
    with desk.state.lock:
        for job in (jobs[0], others[0], others[0]):  # the second cancel of a job finds nothing
            cancel(desk.state, job)
    assert desk.reasons() == ["cancelled", "cancelled"]
    assert (desk.books.pinned(), desk.books.reserved_bytes) == (1, FILE_BYTES)


def test_a_tail_read_without_a_secret_is_nobodys_fault(desk: Desk) -> None:
    meta = chain(SECRET, 0, tail=5)[0]
    desk.stored([meta])
    (ref,) = desk.books.tails(meta.parent)
    for secret, refs, reason in (
        (b"", [ref], "key"),
        (SECRET, [], "missing"),
        (SECRET, [replace(ref, key_hex16="0" * 16)], "missing"),
    ):
        read = Read(99, slot(), lambda over: None, desk.now, wish=TailWish(meta.parent, 0, 0, meta.ids, secret))
        with desk.state.lock:
            admit_tail_read(desk.state, read, refs, "s")
        assert desk.reasons() == [reason]
    elsewhere = TailRef(b"x" * 32, ref.n_tokens, ref.key_hex16)
    read = Read(99, slot(), lambda over: None, desk.now, wish=TailWish(b"x" * 32, 0, 0, meta.ids, SECRET))
    with desk.state.lock:
        admit_tail_read(desk.state, read, [elsewhere], "s")
    assert desk.reasons() == ["missing"], "a tail of another parent is not offered"
    assert desk.books.has(index_key(meta))


def test_a_switched_off_tier_deletes_nothing_and_a_lower_cap_evicts_down(desk: Desk) -> None:
    metas = desk.stored(chain(SECRET, 4))
    off = Desk(cap_bytes=0)
    off.state.books = desk.books
    with off.state.lock:
        evict_to_cap(off.state)
    assert len(desk.books) == 4
    low = Desk(cap_bytes=2 * FILE_BYTES)
    low.state.books = desk.books
    with low.state.lock:
        evict_to_cap(low.state)
    assert [desk.books.has(meta.key) for meta in metas] == [True, True, False, False]
    assert len(low.state.burials) == 2


def test_every_reason_of_bad_health_is_named(desk: Desk) -> None:
    meta = desk.stored(chain(SECRET, 1))[0]
    desk.read(meta)
    read = desk.state.reads.take()
    assert read is not None
    read.started_at = desk.now
    desk.state.running[read.job] = read
    desk.now += desk.state.config.queue_deadline_s
    assert health_of(desk.state).status == "ok"
    desk.now += 1.0
    assert statistics_of(desk.state, Walk(0, 0, 0)).oldest_read_s == pytest.approx(desk.state.config.queue_deadline_s + 1.0)
    desk.books.dying_bytes = 10
    desk.books.buried(10, gone=False)
    desk.state.write_breaker.failed(desk.now, "EROFS")
    desk.state.closed = True
    health = health_of(desk.state)
    assert health.status == "degraded"
    assert len(health.why) == 4
    for text in ("closed", "EROFS; the tier is read-only", "1 reads hang", "10 bytes could not be deleted"):
        assert sum(text in why for why in health.why) == 1, text


def test_statistics_hold_what_the_docstring_adds_up(desk: Desk) -> None:
    desk.stored(chain(SECRET, 2))
    desk.write(chain(SECRET, 1, seed=3)[0])
    desk.books.aside_bytes, desk.books.stranded_bytes, desk.books.dying_bytes = 1, 2, 4
    shown = statistics_of(desk.state, Walk(0, 0, 0))
    parts = ("live", "reserved", "dying", "aside", "stranded")
    assert shown.used_bytes == sum(getattr(shown, f"{part}_bytes") for part in parts) == 3 * FILE_BYTES + 7
    assert shown.writes_in_flight == 1
    assert {item.name for item in fields(StoreStatistics)} >= {"used_bytes", *(f"{part}_bytes" for part in parts)}
    assert rate(1000, 0.0) == 0.0
    assert next(iter(desk.state.board.writes())).stage is Stage.QUEUED
