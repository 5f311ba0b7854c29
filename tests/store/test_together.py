"""Many things at once: order of publication, dedup, eviction beside reads and writes, exact books (C1, C4-C6, G1, G2, P32)."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
from kvalet.store import chores
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.fileio import FileIO
from storekit import FILE_BYTES, WAIT_S, Rig, payload, slot


class WatchedIO(FileIO):
    """Remembers the order of publications and flushes; the data of one key can be held back."""

    def __init__(self) -> None:
        self.story: list[tuple[str, str]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.others_written = threading.Event()
        self.held_key = b""
        self._names: dict[int, str] = {}

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        self._names[fd] = path
        return fd

    def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        if bytes(buffers[0][144:176]) == self.held_key:  # the key in the header
            self.hold.wait(WAIT_S)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.story.append(("data", self._names[fd]))
        if sum(kind == "data" for kind, _ in self.story) >= 3:
            self.others_written.set()

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.story.append(("dir", self._names.get(fd, "?")))

    def rename(self, old: str, new: str, *, old_dir: int, new_dir: int) -> None:
        super().rename(old, new, old_dir=old_dir, new_dir=new_dir)
        self.story.append(("publish", new))


def test_children_wait_for_a_slow_parent_and_are_published_in_order(tmp_path: Path) -> None:
    """Data of the chain is written in parallel; each name appears only after its parent's name is flushed."""
    io = WatchedIO()
    with Rig(tmp_path / "s", io=io, writers=3) as rig:
        io.story.clear()
        io.hold.clear()
        metas = rig.chain(4)
        io.held_key = metas[0].key
        jobs = [rig.submit_write(meta) for meta in metas]
        assert io.others_written.wait(WAIT_S)  # three children lie in tmp/, the parent is still being written
        assert [kind for kind, _ in io.story if kind == "publish"] == []
        assert not any(rig.store.has(meta.key) for meta in metas)
        assert rig.done.empty()
        io.hold.set()
        outcomes = rig.settle_all(4)
        assert [outcomes[job].reason for job in jobs] == [""] * 4
        order = [name[:64] for kind, name in io.story if kind == "publish"]
        assert order == [meta.key.hex() for meta in metas]
        for parent, child in itertools.pairwise(metas):
            published = io.story.index(("publish", f"{parent.key.hex()}.{parent.ordinal}.{rig.path(parent).name[-8:]}"))
            child_at = io.story.index(("publish", f"{child.key.hex()}.{child.ordinal}.{rig.path(child).name[-8:]}"))
            assert ("dir", parent.key.hex()[:2]) in io.story[published:child_at], "a child before its parent was durable"
        rig.quiet()


def test_one_flush_serves_all_of_a_shard_in_a_batch(tmp_path: Path) -> None:
    """Group commit: a batch of tails of one parent lies in one shard."""
    io = WatchedIO()
    with Rig(tmp_path / "s", io=io, writers=4) as rig:
        base = rig.chain(1)
        tails = [rig.chain(0, after=base, tail=4, seed=i)[0] for i in range(6)]
        io.held_key = base[0].key
        io.hold.clear()
        jobs = [rig.submit_write(meta) for meta in [*base, *tails]]
        assert io.others_written.wait(WAIT_S)
        io.hold.set()
        outcomes = rig.settle_all(7)
        assert {outcomes[job].reason for job in jobs} == {""}
        shard = base[0].key.hex()[:2]
        flushes = sum(entry == ("dir", shard) for entry in io.story)
        assert flushes < 7
        assert rig.store.statistics().commit_waves < 7


def test_two_puts_of_one_key_a_put_while_reading_and_eviction_while_reading(tmp_path: Path) -> None:
    """C1."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, readers=2, cap_bytes=3 * FILE_BYTES) as rig:
        metas = rig.chain(2)
        rig.write(metas)
        io.arm(Fault("preadv", 1, "hang", sticky=True))
        view = slot()
        reading = rig.submit_read(metas[1], view)
        assert io.hanging.wait(WAIT_S)
        assert rig.write([metas[1]])[0].skipped
        others = rig.chain(3, seed=1)
        assert [r.reason for r in rig.write(others)] == ["", "full", "ancestor"]  # what is being read, and its ancestor, stay
        io.disarm()
        outcome = rig.settle()
        assert (outcome.job, outcome.reason) == (reading, "")
        assert bytes(view[BLOCK_BYTES:]) == payload(metas[1])
        assert [r.reason for r in rig.write(others)] == ["", "", ""]  # now they may go
        assert not rig.store.has(metas[1].key)
        assert set(rig.gone) == {meta.key for meta in metas}
        rig.quiet()


def test_evicted_and_written_again_at_once(tmp_path: Path) -> None:
    """The late unlink of the old file must not take the new one: the new write waits for it."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, cap_bytes=2 * FILE_BYTES) as rig:
        a, b = rig.chain(1)[0], rig.chain(1, seed=1)[0]
        rig.write([a, b])
        for turn in range(10):
            first, second = (a, b) if turn % 2 else (b, a)
            c = rig.chain(1, seed=100 + turn)[0]
            io.arm(Fault("unlink", 1, "hang"))
            jobs = [rig.submit_write(c), rig.submit_write(first)]  # evicts the older two, one of which comes back
            io.release()
            outcomes = rig.settle_all(2)
            io.disarm()
            assert {outcomes[job].reason for job in jobs} == {""}
            assert [rig.read(c), rig.read(first)] == ["", ""]
            rig.write([second])
            rig.quiet()


def test_a_bad_file_set_aside_late_does_not_take_the_new_one_along(tmp_path: Path) -> None:
    """The other race of names: a new write of a refused key waits until the old file has left."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io) as rig:
        meta = rig.chain(1)[0]
        rig.write([meta])
        with rig.path(meta).open("r+b") as f:
            f.write(b"bad")
        io.arm(Fault("rename", 1, "hang"))
        assert rig.read(meta) == "header"
        assert io.hanging.wait(WAIT_S)
        job = rig.submit_write(meta)
        assert rig.store._state.board.of_job(job).gates  # type: ignore[union-attr]
        io.disarm()
        assert rig.settle().reason == ""
        assert rig.read(meta) == ""
        rig.quiet()
        assert len(os.listdir(tmp_path / "s" / "bad")) == 1


def test_random_puts_never_exceed_the_cap_on_disk(tmp_path: Path) -> None:
    """G1: shared and unshared chunks; the disk itself is measured while it goes on."""
    seed = 20260801
    rng = random.Random(seed)
    cap = 12 * FILE_BYTES
    with Rig(tmp_path / "s", cap_bytes=cap, sync="none") as rig:
        shared = rig.chain(2)
        highest = 0
        for turn in range(120):
            metas = [*shared, *rig.chain(rng.randrange(1, 4), after=shared, seed=turn, tail=rng.randrange(0, 20))]
            reasons = [r.reason for r in rig.write(metas)]
            assert set(reasons) <= {"", "full", "ancestor"}, f"seed {seed}"
            rig.store.touch([meta.key for meta, reason in zip(metas, reasons, strict=True) if not reason])
            used = sum(
                p.stat().st_size for p in (tmp_path / "s").rglob("*") if p.parent.parent.name in "ct" or p.parent.name == "tmp"
            )
            highest = max(highest, used)
            assert used <= cap, f"seed {seed}, turn {turn}"
        rig.quiet()
        assert highest > cap * 0.7
        assert rig.store.statistics().evicted_files > 50
        assert all(rig.store.has(meta.key) for meta in shared)  # used by every turn: never the least recent


def test_lower_cap_evicts_down_at_open_and_keeps_the_heads(tmp_path: Path) -> None:
    """G2."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(6)
        rig.write(metas)
        rig.store.touch([meta.key for meta in metas])
    with Rig(tmp_path / "s", cap_bytes=2 * FILE_BYTES) as rig:
        rig.quiet()
        assert [rig.store.has(meta.key) for meta in metas] == [True, True, False, False, False, False]
    with Rig(tmp_path / "s", cap_bytes=FILE_BYTES - 1) as rig:
        assert rig.write(rig.chain(1, seed=5))[0].reason == "full"


def test_minimum_free_space_is_kept(tmp_path: Path) -> None:
    class SmallDisk(FileIO):
        left = 10 * FILE_BYTES

        def free_bytes(self, fd: int) -> int:
            return self.left

    with Rig(tmp_path / "s", io=SmallDisk(), min_free_bytes=7 * FILE_BYTES, free_every_s=1000.0) as rig:
        assert [r.reason for r in rig.write(rig.chain(3))] == ["", "", ""]
        assert rig.write(rig.chain(1, seed=1))[0].reason == ""  # evicts one of the others first
        assert rig.store.statistics().evicted_files >= 1
        rig.quiet()


def test_files_and_shards_removed_from_outside(tmp_path: Path) -> None:
    """C4: misses, corrected books, no crash; then the whole directory goes."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(6)
        rig.write(metas)
        rig.path(metas[5]).unlink()
        shutil.rmtree(rig.path(metas[4]).parent)
        assert rig.read(metas[5]) == "missing"
        assert rig.read(metas[4]) == "missing"
        rig.quiet()
        assert [r.reason for r in rig.write(metas)] == [""] * 6
        with rig.path(metas[2]).open("r+b") as f:  # an outsider writes into a live file
            f.seek(BLOCK_BYTES + 100)
            f.write(b"outsider")
        assert rig.read(metas[2]) == "payload"
        rig.quiet()
        shutil.rmtree(tmp_path / "s")
        assert rig.read(metas[0]) == "missing"
        assert rig.write(rig.chain(1, seed=8))[0].reason == "io"
        assert rig.store.health().status == "degraded"


def test_the_walk_of_the_disk_corrects_the_ledger(tmp_path: Path) -> None:
    """C4: what vanished from outside leaves the books at the next walk; what is being written is not mistaken for lost."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io) as rig:
        metas = rig.chain(4)
        rig.write(metas)
        assert chores.compare(rig.store._state) == 0
        rig.path(metas[3]).unlink()
        io.arm(Fault("pwritev", 1, "hang"))
        rig.submit_write(rig.chain(1, seed=1)[0])
        assert io.hanging.wait(WAIT_S)
        assert chores.compare(rig.store._state) == 0  # not while something is in flight
        io.disarm()
        rig.settle()
        assert chores.compare(rig.store._state) == FILE_BYTES
        assert rig.store.statistics().drift_bytes == FILE_BYTES
        assert not rig.store.has(metas[3].key)
        rig.quiet()
        assert rig.read(metas[2]) == ""
        assert rig.gone == [metas[3].key]


def test_many_sessions_at_once_get_their_own_bytes_and_leave_nothing_behind(tmp_path: Path) -> None:
    """C5, P32: slots are used again the moment their job is over; random cancels."""
    seed = 7
    rng = random.Random(seed)
    fds_before = len(os.listdir("/proc/self/fd"))
    with Rig(tmp_path / "s", sync="none", readers=4, writers=3) as rig:
        state = rig.store._state
        chains = [rig.chain(4, seed=i, tail=1 + i) for i in range(8)]
        stored = {meta.key: meta for metas in chains for meta in metas}
        for metas in chains:
            rig.write(metas)
        pool = [slot() for _ in range(6)]
        running: dict[int, tuple[memoryview, object]] = {}
        finished = right = 0
        keys = list(stored)
        for _ in range(600):
            if pool and rng.random() < 0.6:
                view, meta = pool.pop(), stored[rng.choice(keys)]
                view[:] = bytes(len(view))
                job = rig.submit_read(meta, view, session=str(rng.randrange(4)), klass=rng.randrange(3))
                running[job] = (view, meta)
                if rng.random() < 0.3:
                    rig.store.cancel(job)
            elif running:
                outcome = rig.settle()
                view, meta = running.pop(outcome.job)
                finished += 1
                if not outcome.reason:
                    right += 1
                    assert bytes(view[BLOCK_BYTES : BLOCK_BYTES + len(payload(meta))]) == payload(meta), f"seed {seed}"
                else:
                    assert outcome.reason == "cancelled"
                pool.append(view)
        while running:
            running.pop(rig.settle().job)
        assert right > 100
        assert finished > right
        rig.quiet()
        assert state.books.pinned() == 0
        assert rig.store.statistics().reads_running == rig.store.statistics().reads_waiting == 0
    assert len(os.listdir("/proc/self/fd")) == fds_before


def test_a_lost_parent_fails_its_children_in_flight(tmp_path: Path) -> None:
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, writers=1) as rig:
        metas = rig.chain(3)
        rig.write(metas[:1])
        io.arm(Fault("pwritev", 1, "hang"))
        jobs = [rig.submit_write(meta) for meta in metas[1:]]
        assert io.hanging.wait(WAIT_S)
        rig.path(metas[0]).unlink()
        assert rig.read(metas[0]) == "missing"
        io.disarm()
        outcomes = rig.settle_all(2)
        assert [outcomes[job].reason for job in jobs] == ["ancestor", "ancestor"]
        rig.quiet()


@pytest.mark.parametrize("mtime", [0, 4_294_967_296, 2**33], ids=["1970", "2106", "2242"])
def test_odd_file_times_change_no_order_and_lose_nothing(tmp_path: Path, mtime: int) -> None:
    """T1."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3)
        rig.write(metas)
        for meta in metas:
            os.utime(rig.path(meta), (mtime, mtime))
    with Rig(tmp_path / "s", cap_bytes=4 * FILE_BYTES) as rig:
        assert [rig.read(meta) for meta in metas] == ["", "", ""]
        rig.store.touch([meta.key for meta in metas])
        assert [r.reason for r in rig.write(rig.chain(2, seed=1))] == ["", ""]
        assert [rig.store.has(meta.key) for meta in metas] == [True, True, False]
        rig.quiet()


def test_recency_reaches_the_files_parents_first(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        old, new = rig.chain(2), rig.chain(2, seed=1)
        rig.write([*old, *new])
        rig.store.touch([meta.key for meta in old])
    with Rig(tmp_path / "s", cap_bytes=3 * FILE_BYTES) as rig:
        assert [rig.store.has(meta.key) for meta in [*old, *new]] == [True, True, True, False]
        times = [rig.path(meta).stat().st_mtime_ns for meta in old]
        assert times[0] == times[1]


def test_a_slot_is_its_jobs_until_done_even_if_the_owner_has_given_up(tmp_path: Path) -> None:
    """P32, its CPU half: slow disk, owner aborts in mid-write, the buffer is used again the moment it comes back."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, writers=1) as rig:
        metas = rig.chain(2)
        view = slot()
        for turn, meta in enumerate(metas):
            io.arm(Fault("pwritev", 1, "hang"))
            job = rig.submit_write(meta, view=view)
            if turn == 0:
                assert io.hanging.wait(WAIT_S)
                rig.store.cancel(job)  # too late: it has started, so it finishes
                assert rig.done.empty()
            io.disarm()
            outcome = rig.settle()
            assert (outcome.job, outcome.reason) == (job, "")
            view[:] = b"\xff" * len(view)
        assert [rig.read(meta) for meta in metas] == ["", ""]
        rig.quiet()
