"""Every system call fails once, and for good (fault plan H1, E1-E7). Each sweep asserts that its fault fired."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.errors import StoreRefused
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.ids import ChunkMeta
from storekit import FILE_BYTES, STRIDE, WAIT_S, Rig, payload, slot

SWEPT = ("open", "close", "fstat", "preadv", "pwritev", "fdatasync", "fsync", "rename", "unlink", "mkdir", "utime")
CASES = [(op, errno.EIO, sticky) for op in SWEPT for sticky in (False, True)]
CASES += [(op, errno.ENOSPC, False) for op in ("pwritev", "fdatasync", "rename", "mkdir")]
CASES += [("open", errno.EMFILE, True)]


def scenario(rig: Rig) -> tuple[list[ChunkMeta], set[bytes]]:
    """Writes, reads, recency, eviction, a bad file. Returns all metas and the keys that were acknowledged as durable."""
    first, second = rig.chain(3, tail=5), rig.chain(4, seed=1)
    acked = {m.key for m, r in zip(first, rig.write(first), strict=True) if not r.reason}
    for meta in first:
        rig.read(meta)
    rig.store.touch([meta.key for meta in first])
    acked |= {m.key for m, r in zip(second, rig.write(second), strict=True) if not r.reason}  # the cap makes this one evict
    for meta in second:
        rig.read(meta)
    return first + second, acked


def run_with(tmp_path: Path, fault: Fault, number: int) -> int:
    """One run of the scenario with the fault, then everything that must hold. Returns how often the fault fired."""
    directory = tmp_path / f"s{number}"
    io = FaultIO(fault)
    with Rig(directory, io=io, cap_bytes=6 * FILE_BYTES, probe_every_s=0.0, breaker_open_s=0.0) as rig:
        io.arm()
        metas, acked = scenario(rig)
        rig.store.close(WAIT_S)
        io.disarm()
        assert rig.store.statistics().internal == 0, fault
        books = rig.store._state.books
        assert books.used_bytes <= books.cap_bytes + books.stranded_bytes
        books.check()
        assert (books.reserved_bytes, books.dying_bytes, books.pinned(), rig.store.statistics().unsettled) == (0, 0, 0, 0)
        assert not rig.tmp_names() or books.stranded_bytes, "a temporary file was left and nobody knows"
        on_disk = sum(path.stat().st_size for folder in ("c", "t") for path in (directory / folder).rglob("*.*"))
        assert books.live_bytes <= on_disk <= books.live_bytes + books.stranded_bytes
        lost = set(rig.gone)
    with Rig(directory) as again:
        assert again.tmp_names() == []
        again.check_books()
        for meta in metas:
            if meta.key in acked and meta.key not in lost:
                assert again.read(meta) == "", (fault, meta.ordinal)
            elif again.store.has(meta.key):
                again.read(meta)  # asserts that what is served is right
    return io.fired


@pytest.mark.parametrize(("op", "code", "sticky"), CASES)
def test_sweep(tmp_path: Path, op: str, code: int, sticky: bool) -> None:
    fired = 0
    for nth in (*range(1, 25), *range(25, 200, 3)):
        if not run_with(tmp_path, Fault(op, nth, code=code, sticky=sticky), nth):
            break
        fired += 1
        if sticky and nth >= 3:
            break  # later starts of a lasting fault differ little
    else:
        pytest.fail("the sweep did not end")
    assert fired >= 1, f"{op} never failed: the test tested nothing"


@pytest.mark.parametrize("op", ["pwritev", "preadv"])
@pytest.mark.parametrize("kind", ["memory", "zero", "short", "lie"])
def test_sweep_of_lies_and_short_counts(tmp_path: Path, op: str, kind: str) -> None:
    fired = 0
    for nth in range(1, 100):
        fault = Fault(op, nth, kind, granule=512)
        io = FaultIO(fault)
        with Rig(tmp_path / f"s{nth}", io=io) as rig:
            io.arm()
            metas = rig.chain(3)
            rig.write(metas)
            for meta in metas:
                rig.read(meta)  # asserts that nothing wrong is served
            io.disarm()
        if not io.fired:
            break
        fired += 1
    assert fired >= 3


@pytest.mark.parametrize("op", ["scan", "open", "pwritev", "preadv", "fdatasync", "fsync", "rename", "unlink", "free_bytes"])
def test_faults_while_opening(tmp_path: Path, op: str) -> None:
    """The tier starts, or is refused with a sentence; either way the next open finds everything."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3, tail=4)
        rig.write(metas)
    (tmp_path / "s" / "tmp" / "1.1.0123456789abcdef").write_bytes(b"left by a crash")
    fired = 0
    sentences: list[str] = []
    for nth in range(1, 60):
        io = FaultIO()
        io.arm(Fault(op, nth))
        try:
            with Rig(tmp_path / "s", io=io):
                pass
        except StoreRefused as error:
            sentences.append(str(error))
        if not io.fired:
            break
        fired += 1
    assert fired >= 1
    assert all("EIO" in sentence and sentence.endswith(".") for sentence in sentences)
    with Rig(tmp_path / "s") as rig:
        assert [rig.read(meta) for meta in metas] == [""] * 4
        rig.check_books()


def test_full_disk_evicts_and_tries_once_more(tmp_path: Path) -> None:
    """E1: short write, then ENOSPC; the books said there was room."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, writers=1) as rig:
        old, new = rig.chain(4), rig.chain(1, seed=1)
        rig.write(old)
        io.arm(Fault("pwritev", 1, code=errno.ENOSPC))
        assert rig.write(new)[0].reason == ""
        assert io.fired == 1
        assert rig.store.statistics().evicted_files == 4  # up to 64 MB are asked for
        assert set(rig.gone) == {meta.key for meta in old}
        io.disarm()
        assert rig.read(new[0]) == ""
        rig.quiet()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_stays_full_drops_the_write_and_nothing_else(tmp_path: Path, code: int) -> None:
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, writers=1) as rig:
        keep, new = rig.chain(2), rig.chain(3, seed=1)
        rig.write(keep)
        rig.store.pin([meta.key for meta in keep])
        io.arm(Fault("pwritev", 1, code=code, sticky=True))
        assert [r.reason for r in rig.write(new)] == ["full", "ancestor", "ancestor"]
        assert io.fired == 1  # all pinned: nothing to evict, so nothing to try again
        assert rig.store.accepts_writes()  # a full disk is no broken disk
        io.disarm()
        assert [rig.read(meta) for meta in keep] == ["", ""]
        assert [r.reason for r in rig.write(new)] == [""] * 3
        rig.store.unpin([meta.key for meta in keep])
        rig.quiet()


@pytest.mark.parametrize(("op", "code"), [("pwritev", errno.EROFS), ("fdatasync", errno.EIO), ("rename", errno.EACCES)])
def test_a_broken_disk_makes_the_tier_read_only_until_a_probe_passes(tmp_path: Path, op: str, code: int) -> None:
    """E2, E3: health says so, reads go on, no retry of a failed flush."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, writers=1, probe_every_s=0.05) as rig:
        keep, new = rig.chain(2), rig.chain(2, seed=1)
        rig.write(keep)
        io.arm(Fault(op, 1, code=code, sticky=True))
        assert [r.reason for r in rig.write(new)] == ["io", "ancestor"]
        if op == "fdatasync":
            assert io.calls["unlink"] >= 1
        assert not rig.store.accepts_writes()
        assert rig.write(new)[0].reason == "read_only"
        health = rig.store.health()
        assert health.status == "degraded"
        assert errno.errorcode[code] in health.why[0]
        assert [rig.read(meta) for meta in keep] == ["", ""]
        io.disarm()
        state = rig.store._state
        with state.lock:
            assert state.quiet.wait_for(lambda: not state.write_breaker.is_open, WAIT_S)
        assert rig.store.health().status == "ok"
        assert [r.reason for r in rig.write(new)] == ["", ""]
        rig.quiet()


def test_read_errors_open_the_breaker_and_time_closes_it(tmp_path: Path) -> None:
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, readers=1) as rig:
        now = [1000.0]
        rig.store._state.clock = lambda: now[0]
        metas = rig.chain(6)
        rig.write(metas)
        io.arm(Fault("preadv", 1, sticky=True))
        assert [rig.read(meta) for meta in metas[:3]] == ["io"] * 3
        fired = io.fired
        assert [rig.read(meta) for meta in metas[3:]] == ["io"] * 3
        assert io.fired == fired == 3  # the disk was left alone
        assert rig.store.health().status == "degraded"
        io.disarm()
        now[0] += rig.config.breaker_open_s + 1
        assert [rig.read(meta) for meta in metas[3:]] == [""] * 3
        assert [rig.read(meta) for meta in metas[:3]] == ["quarantined"] * 3
        assert rig.store.health().status == "ok"
        rig.check_books()


@pytest.mark.parametrize(
    "fault", [Fault("open", 1, code=errno.EMFILE), Fault("open", 2, code=errno.ENFILE), Fault("preadv", 1, "memory")]
)
def test_lack_of_resources_is_a_miss_and_no_verdict(tmp_path: Path, fault: Fault) -> None:
    """E4."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io) as rig:
        meta = rig.chain(1)[0]
        rig.write([meta])
        io.arm(fault)
        assert rig.read(meta) == "resources"
        assert io.fired == 1
        assert rig.store.has(meta.key)
        assert rig.read(meta) == ""
        rig.quiet()


def test_direct_io_refused_at_open(tmp_path: Path) -> None:
    """E5."""
    io = FaultIO()
    io.arm(Fault("open", 1, code=errno.EINVAL, sticky=True, direct_only=True))
    with Rig(tmp_path / "s", io=io) as rig:
        assert io.fired == 1
        statistics = rig.store.statistics()
        assert (statistics.direct, "EINVAL" in statistics.why_buffered) == (False, True)
        metas = rig.chain(2)
        assert [r.reason for r in rig.write(metas)] == ["", ""]
        assert [rig.read(meta) for meta in metas] == ["", ""]


@pytest.mark.parametrize("op", ["pwritev", "preadv", "open"])
def test_direct_io_accepted_at_open_and_refused_in_use(tmp_path: Path, op: str) -> None:
    io = FaultIO()
    with Rig(tmp_path / "s", io=io) as rig:
        metas = rig.chain(3)
        rig.write(metas[:1])
        assert rig.store.statistics().direct, "this file system has no direct I/O: the test needs one that has"
        io.arm(Fault(op, 1, code=errno.EINVAL, sticky=True, direct_only=True))
        assert rig.read(metas[0]) == ""
        assert [r.reason for r in rig.write(metas[1:])] == ["", ""]
        assert [rig.read(meta) for meta in metas] == [""] * 3
        assert io.fired >= 1
        assert not rig.store.statistics().direct
        rig.quiet()


def test_an_unaligned_slot_falls_back_and_stays_right(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        meta = rig.chain(1)[0]
        crooked = slot(FILE_BYTES + BLOCK_BYTES)[64 : 64 + FILE_BYTES]
        rig.submit_write(meta, view=crooked)
        assert rig.settle().reason == ""
        rig.submit_read(meta, crooked)
        assert rig.settle().reason == ""
        assert bytes(crooked[BLOCK_BYTES:]) == payload(meta)
        assert rig.read(meta) == ""


def test_every_length_of_short_transfer_is_completed(tmp_path: Path) -> None:
    """E6, buffered and direct: half a transfer again and again."""
    for direct in ("auto", "off"):
        io = FaultIO()
        with Rig(tmp_path / direct, io=io, direct=direct) as rig:
            metas = rig.chain(2)
            io.arm(Fault("pwritev", 1, "short", granule=512))
            assert [r.reason for r in rig.write(metas)] == ["", ""]
            assert io.fired == 1
            io.arm(Fault("preadv", 1, "short", granule=512))
            assert [rig.read(meta) for meta in metas] == ["", ""]
            assert io.fired == 1
            assert os.path.getsize(rig.path(metas[0])) == FILE_BYTES == BLOCK_BYTES + 2 * STRIDE


def test_a_hanging_disk_holds_its_slots_and_nobody_else(tmp_path: Path) -> None:
    """E7: waiting reads are answered at the deadline, other answers stay prompt, health shows it, the slot comes back."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, readers=1, queue_deadline_s=0.2) as rig:
        metas = rig.chain(4)
        rig.write(metas)
        io.arm(Fault("preadv", 1, "hang", sticky=True))
        stuck = rig.submit_read(metas[0])
        assert io.hanging.wait(WAIT_S)
        waiting = [rig.submit_read(meta) for meta in metas[1:]]
        assert rig.read(rig.chain(1, seed=9)[0]) == "missing"  # an answer that needs no disk comes at once
        outcomes = rig.settle_all(3)
        assert [outcomes[job].reason for job in waiting] == ["deadline"] * 3
        state = rig.store._state
        with state.lock:
            state.quiet.wait_for(lambda: state.clock() - state.running[stuck].started_at > 0.3, 0.5)
        assert "hang" in rig.store.health().why[0]
        assert rig.store.statistics().reads_running == 1
        assert rig.write(rig.chain(1, seed=3))[0].reason == ""  # writers are not readers
        io.disarm()
        assert rig.settle().job == stuck
        assert rig.store.health().status == "ok"
        assert [rig.read(meta) for meta in metas] == [""] * 4
        rig.quiet()


def test_close_does_not_wait_for_a_hanging_disk(tmp_path: Path) -> None:
    """And the lock is kept: whoever hangs may still write."""
    io = FaultIO()
    rig = Rig(tmp_path / "s", io=io, writers=1)
    io.arm(Fault("pwritev", 1, "hang", sticky=True))
    rig.submit_write(rig.chain(1)[0])
    assert io.hanging.wait(WAIT_S)
    assert rig.store.close(0.05) >= 1
    with pytest.raises(StoreRefused, match="in use"):
        Rig(tmp_path / "s")
    io.disarm()
    assert rig.settle().reason == "closed"
    for thread in rig.store._threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    rig.store._state.disk.close()
