"""What stays and what goes: pins that outlive a restart, records and their chains, their share of the cap, their time."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store.books import Books
from kvalet.store.entries import Entry
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.ids import ChunkMeta
from kvalet.store.layout import FileName, file_name, record_index_key
from kvalet.store.recordchores import READ_AT_ONCE, sweep
from kvalet.store.store import DiskStore
from recordkit import BRANCH, SESSION, RecordRig, record_of
from storekit import FILE_BYTES, WAIT_S, chain

DAY_NS = 86_400 * 10**9
RECORD_BYTES = 4096


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[RecordRig]:
    """Room for eight chunks."""
    with RecordRig(tmp_path / "s", cap_bytes=8 * FILE_BYTES) as opened:
        yield opened
        opened.quiet()


def reasons(rig: RecordRig, metas: list[ChunkMeta]) -> list[str]:
    return [one.reason for one in rig.write(metas)]


def fill(rig: RecordRig, n: int, first_seed: int = 100) -> list[str]:
    """``n`` chains of one chunk each, one after the other."""
    return [reason for i in range(n) for reason in reasons(rig, rig.chain(1, seed=first_seed + i))]


def test_what_a_pinned_record_names_outlives_everything_else(rig: RecordRig) -> None:
    metas = rig.chain(2, tail=5)
    reasons(rig, metas)
    assert rig.put(record_of(metas, pinned=True)) == ""
    assert set(fill(rig, 12)) == {""}
    assert [rig.read(meta) for meta in metas] == ["", "", ""]
    assert rig.get().reason == ""
    statistics = rig.store.statistics()
    assert statistics.held_bytes == 2 * FILE_BYTES + 2 * 4096 + RECORD_BYTES
    assert (statistics.pinned_records, statistics.pinned) == (1, 0)


def test_a_pin_outlives_a_restart_before_anybody_asks(tmp_path: Path) -> None:
    """Also where the cap is lower then, and something must go at once."""
    with RecordRig(tmp_path / "s") as rig:
        metas = rig.chain(2, tail=5)
        reasons(rig, metas)
        assert rig.put(record_of(metas, pinned=True)) == ""
        assert set(fill(rig, 20)) == {""}
    with RecordRig(tmp_path / "s", cap_bytes=5 * FILE_BYTES) as rig:
        rig.quiet()
        assert set(fill(rig, 9, 300)) == {""}
        assert [rig.read(meta) for meta in metas] == ["", "", ""]
        assert rig.get().record == record_of(metas, pinned=True)
        rig.quiet()


@pytest.mark.parametrize("how", ["unpinned", "dropped", "shorter"])
def test_a_pin_ends_with_its_record(rig: RecordRig, how: str) -> None:
    metas = rig.chain(3)
    reasons(rig, metas)
    rig.put(record_of(metas, pinned=True))
    if how == "unpinned":
        assert rig.put(record_of(metas)) == ""
    elif how == "shorter":
        assert rig.put(record_of(metas[:1], pinned=True)) == ""
    else:
        rig.drop()
    assert set(fill(rig, 12)) == {""}
    kept = [rig.read(meta) for meta in metas]
    assert kept == (["", "missing", "missing"] if how == "shorter" else ["missing"] * 3)
    assert rig.store.statistics().pinned_records == (1 if how == "shorter" else 0)


def test_two_pinned_records_share_a_chunk_until_both_let_go(rig: RecordRig) -> None:
    trunk = rig.chain(1)
    left, right = (trunk + rig.chain(1, after=trunk, seed=seed) for seed in (1, 2))
    reasons(rig, left + right[1:])
    rig.put(record_of(left, pinned=True))
    rig.put(record_of(right, pinned=True, branch="1" * 16))
    rig.drop()
    assert set(fill(rig, 12)) == {""}
    assert [rig.read(meta) for meta in right] == ["", ""]
    rig.drop(branch="1" * 16)
    assert set(fill(rig, 12, 400)) == {""}
    assert [rig.read(meta) for meta in right] == ["missing", "missing"]


def test_a_tier_full_of_pinned_sessions_refuses_and_says_why(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s", cap_bytes=4 * FILE_BYTES) as rig:
        metas = rig.chain(3)
        reasons(rig, metas)
        rig.put(record_of(metas, pinned=True))
        assert fill(rig, 2) == ["full", "full"]
        health = rig.store.health()
        assert health.status == "degraded"
        assert "pinned sessions hold" in health.why[0]
        assert dict(rig.store.statistics().failures)["full"] == 2
        assert [rig.read(meta) for meta in metas] == ["", "", ""]
        assert rig.put(record_of(metas)) == ""
        assert fill(rig, 2) == ["", ""]
        assert rig.store.health().status == "ok"
        rig.quiet()
    with RecordRig(tmp_path / "s", cap_bytes=FILE_BYTES + 2 * 4096) as rig:  # F-G2: far below what is there
        rig.quiet()


def test_a_cap_below_what_is_pinned_loses_nothing_of_it(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s") as rig:
        metas = rig.chain(3)
        reasons(rig, metas)
        rig.put(record_of(metas, pinned=True))
    rig = RecordRig(tmp_path / "s", cap_bytes=2 * (FILE_BYTES + 4096))
    assert fill(rig, 1) == ["full"]
    assert [rig.read(meta) for meta in metas] == ["", "", ""]
    assert rig.put(record_of(metas[:2], pinned=True)) == "full"
    assert rig.read(metas[2]) == ""
    assert rig.put(record_of(metas)) == "full"  # the wish to unpin is heard, though there is no room to write it down
    assert fill(rig, 1) == [""]
    assert [rig.read(meta) for meta in metas] == ["", "missing", "missing"]
    assert rig.put(record_of(metas[:1])) == ""
    with rig:
        rig.quiet()


def test_a_record_never_pushes_out_what_it_names(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s", cap_bytes=2 * FILE_BYTES + 4096) as rig:
        old, metas = rig.chain(1, seed=5), rig.chain(1)
        reasons(rig, metas + old)
        rig.store.touch([old[0].key])  # what the record names is the least recent
        assert rig.put(record_of(metas, after=2000)) == ""
        assert (rig.read(metas[0]), rig.read(old[0])) == ("", "missing")
        rig.quiet()


def test_a_pinned_record_that_cannot_be_read_at_open_is_reported(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s") as rig:
        metas = rig.chain(1)
        reasons(rig, metas)
        rig.put(record_of(metas, pinned=True))
        path = rig.record_path()
    data = path.read_bytes()
    path.write_bytes(data[:400] + bytes([data[400] ^ 1]) + data[401:])
    with RecordRig(tmp_path / "s") as rig:
        assert "1 pinned records could not be read" in rig.store.health().why[0]
        assert rig.branches() == []
        assert rig.read(metas[0]) == ""
        rig.quiet()
    assert len(list((tmp_path / "s" / "bad").iterdir())) == 1
    path.write_bytes(data)
    io = FaultIO(Fault("preadv", code=24))  # no descriptors: nothing is held against the file
    io.arm()
    io.fault = Fault("preadv", nth=2, code=24)  # the first one is the probe
    with RecordRig(tmp_path / "s", io=io) as rig:
        assert io.fired == 1
        assert rig.store.health().status == "degraded"
        io.disarm()
        assert rig.get().record == record_of(metas, pinned=True)
        assert rig.store.statistics().held_bytes > FILE_BYTES  # it has been read now
        rig.quiet()


def test_an_older_file_of_a_record_that_a_power_loss_brought_back_goes(tmp_path: Path) -> None:
    """Pinned, then unpinned: the name changes, and the unlink of the old name was not flushed."""
    with RecordRig(tmp_path / "s") as rig:
        metas = rig.chain(1)
        reasons(rig, metas)
        rig.put(record_of(metas, pinned=True))
        old = rig.record_path()
        data, times = old.read_bytes(), old.stat().st_mtime_ns
        rig.put(record_of(metas, after=4))
        rig.quiet()
        new = rig.record_path()
        assert new != old
    for _ in range(2):  # and the other way round: the files' times decide, not their order
        old.write_bytes(data)
        os.utime(old, ns=(times, times))
        with RecordRig(tmp_path / "s") as rig:
            assert len(rig.store.found.doubles) == 1
            assert rig.get().record == record_of(metas, after=4)
            assert rig.store.statistics().pinned_records == 0
            rig.quiet()
            assert rig.record_paths() == [new]


def test_a_record_stays_as_long_as_its_chain_begins_on_disk(rig: RecordRig) -> None:
    """Records are small: chunks go first, deepest first, and the record when nothing of its chain is left and it is the
    least recent thing on disk."""
    metas = rig.chain(3)
    reasons(rig, metas)
    rig.put(record_of(metas))
    seen = set()
    for seed in range(100, 124):
        reasons(rig, rig.chain(1, seed=seed))
        here, record = rig.store.has(metas[0].key), bool(rig.branches())
        seen.add((here, record))
        assert record or not here
    assert (True, True) in seen
    assert (False, False) in seen


def entry_of(meta: ChunkMeta, recency: int) -> Entry:
    return Entry(file_name(meta, "00000000"), FILE_BYTES, recency, meta.ordinal, bytes(meta.key), bytes(meta.parent))


def record_entry(number: int, head: bytes, *, recency: int, pinned: bool = False, n_bytes: int = 4096) -> Entry:
    session, branch = bytes([number % 7]) * 16, f"{number:016x}"
    name = f"{session.hex()}.{branch}.{head.hex()}.{'p' if pinned else 's'}"
    key = record_index_key(session, branch)
    return Entry(
        FileName("r", name[:2], name, key, session=session, branch=branch, head=head, pinned=pinned), n_bytes, recency, 0
    )


def test_records_have_a_share_of_the_cap() -> None:
    """Else ids of sessions long gone, which begin with a chunk that everybody uses, would fill the disk."""
    trunk = chain(b"s" * 32, 1, root=b"r" * 32)[0]
    books = Books(1 << 24, b"r" * 32)
    books.add(entry_of(trunk, 1000))
    share = books.records.share_bytes
    for number in range(share // 4096):
        assert books.reserve(4096, 1 << 40, record=True).granted
        books.add(record_entry(number, trunk.key[:8], recency=number, pinned=number == 0))
        books.release(4096)
    room = books.reserve(10 * 4096, 1 << 40, record=True)
    assert [victim.recency for victim in room.victims] == list(range(1, 11))  # the oldest, but not the pinned one
    assert books.reserve(4096, 1 << 40).victims == ()  # a chunk is no record
    books.check()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_nothing_that_is_held_is_ever_a_victim(seed: int, steps: int) -> None:
    """Any order of adding, touching, replacing and evicting: the books stay right, and what pinned records name stays."""
    rng = random.Random(seed)
    chains = [chain(b"s" * 32, 4, seed=i, root=b"r" * 32) for i in range(4)]
    books = Books(24 * FILE_BYTES, b"r" * 32)
    for i, metas in enumerate(chains):
        for meta in metas:
            books.add(entry_of(meta, i + 1))
    held: dict[int, set[bytes]] = {}
    for step in range(steps):
        number, metas = rng.randrange(4), chains[rng.randrange(4)]
        doing = rng.random()
        if doing < 0.4:
            upto = [bytes(meta.key) for meta in metas[: rng.randrange(1, 5)]]
            pinned = rng.random() < 0.5 and all(books.has(key) for key in upto)
            entry = record_entry(number, metas[0].key[:8], recency=step + 10, pinned=pinned)
            books.add(entry)
            books.records.learn_keys(entry, upto)
            held[number] = set(upto) if pinned else set()
        elif doing < 0.5:
            books.drop(record_entry(number, bytes(8), recency=0).index_key)
            held.pop(number, None)
        elif doing < 0.7:
            books.touch([meta.key for meta in metas], step + 10)
        else:
            books.evict(rng.randrange(1, 6) * FILE_BYTES, partly=rng.random() < 0.5)
        for keys in held.values():
            assert all(books.has(key) for key in keys), f"seed {seed}, step {step}"
        books.check()
    for entry in list(books.records.all()):
        books.drop(entry.index_key)
    assert not books.records.held
    evicted = books.evict(1 << 40, partly=True)
    assert evicted is not None
    assert len(books) == 0, "what nobody holds can go"


def at(store: DiskStore, now_ns: int) -> int:
    """Sweep as if it were that time."""
    store._state.wall_ns = lambda: now_ns
    return sweep(store._state)


def test_records_go_when_their_time_is_over(tmp_path: Path) -> None:
    """Known from the write, from the header after a restart, and never for pinned ones."""
    directory = tmp_path / "s"
    with RecordRig(directory) as rig:
        now = rig.store._state.wall_ns()
        rig.put(record_of([], ttl_s=86_400))
        rig.put(record_of([], branch="1" * 16))
        rig.put(record_of([], branch="2" * 16, ttl_s=86_400, pinned=True))
        rig.put(record_of([], branch="3" * 16, ttl_s=3 * 86_400))
        assert at(rig.store, now) == 0
    with RecordRig(directory) as rig:
        assert at(rig.store, now + DAY_NS // 2) == 0
        assert at(rig.store, now + 2 * DAY_NS) == 1
        assert sorted(rig.branches()) == ["1" * 16, "2" * 16, "3" * 16]
        assert rig.get(branch="3" * 16).reason == ""  # used: its time begins again
        assert at(rig.store, now + 4 * DAY_NS) == 0
        assert at(rig.store, now + 6 * DAY_NS) == 1
        assert rig.store.statistics().expired_records == 2
        rig.quiet()
        assert len(rig.record_paths()) == 2


def test_the_times_of_many_records_are_learnt_by_and_by(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s") as rig:
        now = rig.store._state.wall_ns()
        n = READ_AT_ONCE + 9
        for number in range(n):
            rig.put(record_of([], branch=f"{number:016x}", ttl_s=60))
    with RecordRig(tmp_path / "s") as rig:
        gone = [at(rig.store, now + DAY_NS) for _ in range(3)]
        assert sum(gone) == n
        rig.quiet()
        assert rig.record_paths() == []


def test_a_tail_that_a_longer_one_replaced_goes_first(tmp_path: Path) -> None:
    """Dead tails are never touched again: they leave before anything that is used, and a live chain loses nothing."""
    with RecordRig(tmp_path / "s", cap_bytes=6 * FILE_BYTES) as rig:
        trunk = rig.chain(1)
        short, longer = rig.chain(0, after=trunk, tail=5)[0], rig.chain(0, after=trunk, tail=9)[0]
        assert longer.ids[:5] == short.ids
        reasons(rig, [*trunk, short])
        rig.store.touch([trunk[0].key, short.key])
        reasons(rig, [longer])
        for seed in range(100, 112):
            rig.store.touch([trunk[0].key, longer.key])
            assert reasons(rig, rig.chain(1, seed=seed)) == [""]
        assert not rig.store.has(short.key)
        assert (rig.read(trunk[0]), rig.read(longer)) == ("", "")
        result, _ = rig.read_tail(bytes(trunk[0].key), 1, short.ids)  # and what it held is in the longer one
        assert (result.reason, result.ids[:5]) == ("", short.ids)
        rig.quiet()


def test_using_the_end_of_a_chain_uses_its_record(tmp_path: Path) -> None:
    rig = RecordRig(tmp_path / "s")
    metas = rig.chain(1, tail=5)
    reasons(rig, metas)
    rig.put(record_of(metas))
    rig.put(record_of([], branch="1" * 16))
    assert rig.branches() == ["1" * 16, BRANCH]
    rig.store.touch([meta.key for meta in metas])
    assert rig.branches(SESSION) == [BRANCH, "1" * 16]
    path = next(path for path in rig.record_paths() if BRANCH in path.name)
    state = rig.store._state
    with state.lock:
        recency = state.books.records.of_head(metas[0].key[:8])[0].recency
    rig.store.close(WAIT_S)
    assert path.stat().st_mtime_ns == recency  # so that a restart knows it, too
