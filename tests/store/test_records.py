"""Records on the disk: written last, read verified, replaced, dropped, damaged, of others; kept apart from chunks."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from damagekit import replace_by
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.fileio import FileIO
from kvalet.store.ids import ChunkKey, Identity
from kvalet.store.record import MAX_RECORD_BYTES, Span, decode
from recordkit import BRANCH, SESSION, SPANS, TENANT, RecordRig, record_of
from storekit import WAIT_S

OTHER = "ffffffffffffffff"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[RecordRig]:
    with RecordRig(tmp_path / "s") as opened:
        yield opened
        opened.quiet()


def test_a_record_comes_back_after_a_restart_and_with_it_every_token(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s") as rig:
        metas = rig.chain(2, tail=5)
        record = record_of(metas, after=3, spans=SPANS, ttl_s=3600, rest=b'{"later":1}')
        assert {one.reason for one in rig.write(metas)} == {""}
        assert rig.put(record) == ""
        assert rig.get().record == record
        rig.quiet()
    with RecordRig(tmp_path / "s") as rig:
        assert rig.branches() == [BRANCH]
        assert rig.get().record == record
        assert [rig.read(meta) for meta in metas] == ["", "", ""]
        assert rig.store.statistics().records == 1
        rig.quiet()


def test_what_a_record_names_must_be_there_first(rig: RecordRig) -> None:
    metas = rig.chain(2, tail=5)
    assert rig.put(record_of(metas)) == "missing"
    rig.write(metas[:1])
    assert rig.put(record_of(metas)) == "missing"
    assert rig.put(record_of(metas[:1])) == ""
    assert rig.put(record_of([])) == ""  # ids and transcript alone need nothing
    assert rig.store.statistics().pinned == 0


def test_a_record_is_published_after_the_piece_it_ends_with(rig: RecordRig) -> None:
    """Submitted together: the record waits for the tail's directory, and fails with it."""
    metas = rig.chain(2, tail=5)
    rig.write(metas[:2])
    jobs = [rig.submit_write(metas[2]), rig.submit_record(record_of(metas))]
    results = rig.settle_all(2)
    assert [results[job].reason for job in jobs] == ["", ""]
    assert rig.get().record == record_of(metas)


def test_a_record_fails_with_the_piece_it_waits_for(tmp_path: Path) -> None:
    io = FaultIO(Fault("pwritev", sticky=True))
    with RecordRig(tmp_path / "s", io=io) as rig:
        metas = rig.chain(1, tail=5)
        rig.write(metas[:1])
        io.arm()
        jobs = [rig.submit_write(metas[1]), rig.submit_record(record_of(metas))]
        results = rig.settle_all(2)
        assert io.fired
        assert [results[job].reason for job in jobs] in (["io", "missing"], ["io", "io"])
        io.disarm()
        assert rig.branches() == []
        assert rig.store.statistics().pinned == 0


def test_a_branch_has_one_record_and_the_last_one_counts(rig: RecordRig) -> None:
    metas = rig.chain(3)
    rig.write(metas)
    for n in (1, 2, 3):
        assert rig.put(record_of(metas[:n])) == ""
    assert len(rig.record_paths()) == 1
    found = rig.get().record
    assert found is not None
    assert found.kv_len == 96
    assert rig.put(record_of(metas[:1], branch=OTHER)) == ""
    assert rig.branches() == [OTHER, BRANCH]
    assert rig.get().reason == ""  # reading it is using it
    assert rig.branches() == [BRANCH, OTHER]


def test_tenants_and_sessions_are_apart(rig: RecordRig) -> None:
    rig.put(record_of([]))
    for tenant, session in (("", SESSION), (TENANT, ""), ("another", SESSION), (TENANT + SESSION, "")):
        assert rig.branches(session, tenant) == []
        assert rig.get(session=session, tenant=tenant).reason == "missing"
    assert rig.branches(SESSION, TENANT) == [BRANCH]
    assert TENANT.encode() not in rig.record_path().read_bytes()


class HeldIO(FileIO):
    """Holds the first rename into r/ until it is let go."""

    def __init__(self) -> None:
        self.armed = False
        self.reached, self.go = threading.Event(), threading.Event()

    def rename(self, old: str, new: str, *, old_dir: int, new_dir: int) -> None:
        if self.armed and new.endswith((".s", ".p")):
            self.reached.set()
            assert self.go.wait(WAIT_S)
        super().rename(old, new, old_dir=old_dir, new_dir=new_dir)


def test_one_write_of_a_record_at_a_time_and_a_drop_waits_for_it(tmp_path: Path) -> None:
    io = HeldIO()
    with RecordRig(tmp_path / "s", io=io) as rig:
        metas = rig.chain(1)
        rig.write(metas)
        assert rig.put(record_of([])) == ""
        io.armed = True
        first = rig.submit_record(record_of(metas))
        assert io.reached.wait(WAIT_S)
        with rig.store._state.lock:
            assert rig.store._state.books.pinned() == 1  # what it names stays until the rename
        assert rig.put(record_of([])) == "busy"
        rig.drop()
        assert rig.branches() == []
        io.go.set()
        result = rig.settle()
        assert (result.job, result.reason) == (first, "")
        assert rig.branches() == []
        rig.quiet()
        assert rig.record_paths() == []
        assert rig.store.statistics().pinned == 0
        assert rig.put(record_of(metas)) == ""  # and it can be written again
        rig.quiet()


def test_dropping_is_idempotent_and_knows_no_strangers(rig: RecordRig) -> None:
    rig.put(record_of([]))
    for _ in range(2):
        rig.drop()
        rig.drop(branch="nonsense/..")
        rig.drop(session="\ud800")
        assert rig.get().reason == "missing"
    rig.quiet()
    assert rig.record_paths() == []


def test_a_record_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    io = FaultIO(Fault("pwritev", kind="hang"))
    with RecordRig(tmp_path / "s", io=io, writers=1) as rig:
        metas = rig.chain(1)
        io.arm()
        first = rig.submit_write(metas[0])
        assert io.hanging.wait(WAIT_S)
        waiting = rig.submit_record(record_of([]))
        rig.store.cancel(waiting)
        result = rig.settle()
        assert (result.job, result.reason) == (waiting, "cancelled")
        io.disarm()
        assert rig.settle().job == first
        assert rig.branches() == []
        rig.quiet()


@pytest.mark.parametrize("how", ["one bit", "half", "longer", "empty", "deleted", "fifo", "symlink", "hard link", "directory"])
def test_a_damaged_record_costs_the_record_and_no_chunk(tmp_path: Path, how: str) -> None:
    with RecordRig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas)
        assert rig.put(record_of(metas)) == ""
        path = rig.record_path()
        stranger = tmp_path / "somebody's"
        stranger.write_bytes(path.read_bytes())
        data = path.read_bytes()
        if how in ("one bit", "half", "longer", "empty"):
            bad = {"one bit": data[:300] + bytes([data[300] ^ 1]) + data[301:], "half": data[: len(data) // 2]}
            path.write_bytes(bad.get(how, data + b"\0" if how == "longer" else b""))
        elif how == "deleted":
            path.unlink()
        else:
            replace_by(how, path, stranger)
        reason = {"one bit": "payload", "deleted": "missing"}.get(how, "foreign")
        reason = "size" if how in ("half", "longer", "empty") else reason
        assert rig.get().reason == reason
        assert rig.branches() == []
        assert rig.get().reason in ("quarantined", "missing")
        assert [rig.read(meta) for meta in metas] == ["", ""]
        assert stranger.read_bytes() == data
        rig.quiet()
        assert (how in ("one bit", "half", "longer", "empty")) == bool(list((rig.directory / "bad").iterdir()))
        if how not in ("fifo", "symlink", "hard link", "directory"):
            assert rig.put(record_of(metas)) == ""  # a new write ends the quarantine
            assert rig.get().record == record_of(metas)
            rig.quiet()


def test_a_record_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    """B4: another branch, head or pin in the name; another session; another store."""
    with RecordRig(tmp_path / "s") as rig:
        assert rig.put(record_of([])) == ""
        path = rig.record_path()
        data, (session, branch, head, _) = path.read_bytes(), path.name.split(".")
    wrong = {
        "branch": (OTHER, f"{session}.{OTHER}.{head}.s", SESSION),
        "head": (branch, f"{session}.{branch}.{'1' * 16}.s", SESSION),
        "pinned": (branch, f"{session}.{branch}.{head}.p", SESSION),
    }
    for field, (asked, name, of) in wrong.items():
        path.unlink(missing_ok=True)
        for old in path.parent.iterdir():
            old.unlink()
        path.with_name(name).write_bytes(data)
        with RecordRig(tmp_path / "s") as rig:
            if field == "pinned":  # found at open, where pins are looked for
                assert rig.store.health().status == "degraded"
                assert rig.branches() == []
            else:
                assert rig.get(asked, of).reason == "key"
            assert ("key", field, 1) in rig.store.statistics().refusals
            rig.quiet()
    with RecordRig(tmp_path / "other") as rig:
        rig.put(record_of([]))
        rig.record_path().write_bytes(data)
        assert rig.get().reason == "foreign"
        assert ("foreign", "store_id", 1) in rig.store.statistics().refusals


def test_a_record_of_another_model_is_not_used_and_not_lost(tmp_path: Path) -> None:
    """I1: it is there again when its model is."""
    with RecordRig(tmp_path / "s") as rig:
        assert rig.put(record_of([])) == ""
    with RecordRig(tmp_path / "s", identity=Identity.of({"weights": "others"})) as rig:
        assert rig.branches() == [BRANCH]
        assert rig.get().reason == "identity"
        assert rig.branches() == []
        rig.quiet()
    with RecordRig(tmp_path / "s") as rig:
        assert rig.get().record == record_of([])


def test_what_cannot_be_told_is_refused_and_leaves_nothing(rig: RecordRig) -> None:
    much = 12 << 20
    for record in (
        record_of([], spans=(Span("x" * much, 0, 0),)),
        record_of([], branch="no hex digits at"),
        record_of([], session="\ud800"),
        record_of([], spans=(Span("x" * MAX_RECORD_BYTES, 0, 0),)),
        dataclasses.replace(record_of([]), ids=(1,) * (MAX_RECORD_BYTES // 4)),
        dataclasses.replace(record_of([]), ids=(-1,)),
        record_of([], kind="neither"),
    ):
        assert rig.put(record) == "record"
    assert rig.put(dataclasses.replace(record_of([]), chunk_keys=(ChunkKey(b"k" * 32),))) == "missing"
    rig.quiet()
    assert rig.record_paths() == []
    assert rig.store.statistics().internal == 0


def test_closing_answers_what_waits_and_then_knows_nothing(tmp_path: Path) -> None:
    io = FaultIO(Fault("pwritev", kind="hang"))
    with RecordRig(tmp_path / "s", io=io, writers=1) as rig:
        assert rig.put(record_of([])) == ""
        io.arm()
        first = rig.submit_write(rig.chain(1)[0])
        assert io.hanging.wait(WAIT_S)
        waiting = rig.submit_record(record_of([], branch=OTHER))
        closing = threading.Thread(target=rig.store.close, args=(0.05,))
        closing.start()
        result = rig.settle()
        assert (result.job, result.reason) == (waiting, "closed")
        io.disarm()
        assert rig.settle().job == first
        closing.join(WAIT_S)
        assert rig.branches() == []
        rig.drop()
    with RecordRig(tmp_path / "s") as rig:
        assert rig.branches() == [BRANCH]


def test_a_store_without_room_for_chunks_keeps_no_records(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s", cap_bytes=0) as rig:
        assert rig.put(record_of([])) == "read_only"
        assert rig.branches() == []


SWEEP = (
    "open",
    "close",
    "fstat",
    "preadv",
    "pwritev",
    "fdatasync",
    "fsync",
    "rename",
    "unlink",
    "mkdir",
    "utime",
    "drop_cache",
)


@pytest.mark.parametrize("op", SWEEP)
def test_sweep(tmp_path: Path, op: str) -> None:
    """E3 for records: the n-th call fails, for every n. The record before stands or none does; never a wrong one."""
    fired = 0
    for n in range(1, 30):
        io = FaultIO(Fault(op, n, code=errno.EIO))
        with RecordRig(tmp_path / f"{n}", io=io, probe_every_s=1000.0) as rig:
            metas = rig.chain(1)
            rig.write(metas)
            old, new = record_of(metas, pinned=True), record_of(metas, after=2)
            io.arm()
            first, second = rig.put(old), rig.put(new)
            rig.drop(branch=OTHER)
            found = rig.get()
            fired += io.fired
            over = not io.fired
            io.disarm()
            assert found.record in (None, old, new)
            if not first and not second and not found.reason:
                assert found.record == new
            assert rig.read(metas[0]) == ""
        with RecordRig(tmp_path / f"{n}") as rig:  # what is left is one whole record or none
            assert rig.get().record in (None, old, new)
            if not second:
                assert rig.get().record in (None, new)
            rig.quiet()
            assert len(rig.record_paths()) <= 1
        if over:
            break
    else:
        pytest.fail(f"{op} never ran out of calls to fail")
    assert fired or op in ("unlink", "mkdir"), f"no {op} was ever struck"


def test_files_of_records_are_private_and_their_size_is_in_the_books(rig: RecordRig) -> None:
    rig.put(record_of([], spans=(Span("x" * 9000, 0, 0),)))
    path = rig.record_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert rig.store.statistics().record_bytes == 12288 == -(-path.stat().st_size // 4096) * 4096
    os.utime(path)
    assert decode(path.read_bytes(), tenant=TENANT) == record_of([], spans=(Span("x" * 9000, 0, 0),))
