"""Cases P28, P29 and P31 as far as they are the store's: other meanings of bytes, damaged files under many readers, names.

Through HTTP: ``tests/whole/test_cases_store.py``.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kvalet.store import layout
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.ids import Identity
from storekit import FILE_BYTES, IDENTITY, WAIT_S, Rig


def test_p28_files_of_another_meaning_go_within_the_budget(tmp_path: Path) -> None:
    """A store full of another model's chunks: none is offered, none is changed, and new ones push them out one by one; at no
    moment does the disk hold more than the cap."""
    cap = 8 * FILE_BYTES
    with Rig(tmp_path / "s", cap_bytes=cap) as rig:
        old = rig.chain(8)
        assert [r.reason for r in rig.write(old)] == [""] * 8
        names = {path.name for path in (tmp_path / "s" / layout.CHUNKS).glob("*/*")}
    other = Identity.of({**dict(IDENTITY.fields), "weights": "w changed by a thousandth"})
    with Rig(tmp_path / "s", identity=other, cap_bytes=cap) as rig:
        new = rig.chain(8)
        assert not any(rig.store.has(meta.key) for meta in new)
        for n, meta in enumerate(new, 1):
            assert rig.write([meta])[0].reason == ""
            rig.quiet()
            here = {path.name for path in (tmp_path / "s" / layout.CHUNKS).glob("*/*")}
            assert len(here) == 8
            assert len(here & names) == 8 - n
        assert [rig.read(meta) for meta in new] == [""] * 8


def truncated(path: Path) -> None:
    os.truncate(path, FILE_BYTES // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (truncated, "size"),
    (empty, "size"),
    (flipped, "payload"),
    (Path.unlink, "missing"),
    (directory, "foreign"),
    (fifo, "foreign"),
]


@pytest.mark.parametrize(("harm", "reason"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_p29_eight_askers_of_a_damaged_prefix(tmp_path: Path, harm: Callable[[Path], None], reason: str) -> None:
    """All get what is before it and an answer for it; the entry goes once; nobody asks the disk for it again."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io) as rig:
        metas = rig.chain(4)
        rig.write(metas)
        path = rig.path(metas[2])
        harm(path)
        jobs = {rig.submit_read(meta, session=f"s{asker}"): meta for asker in range(8) for meta in metas}
        outcomes = rig.settle_all(len(jobs))
        for job, meta in jobs.items():
            said = outcomes[job].reason
            assert said in ({reason, "quarantined", "missing"} if meta is metas[2] else {""})
        assert reason in {outcomes[job].reason for job, meta in jobs.items() if meta is metas[2]}
        assert rig.gone.count(metas[2].key) == 1
        state = rig.store._state
        with state.lock:  # setting the file aside is the janitor's work, not a read
            assert state.quiet.wait_for(lambda: not state.burials and not state.dying, WAIT_S)
        io.arm(Fault("open", 1 << 30))
        assert {rig.read(metas[2]) for _ in range(20)} <= {"quarantined", "missing"}
        assert (io.calls["open"], io.calls["preadv"]) == (0, 0)
        io.disarm()
        assert rig.store.statistics().internal == 0
        assert rig.store.health().status == "ok"


@pytest.mark.parametrize("harm", [directory, fifo])
def test_p29_something_in_the_way_costs_its_own_name_only(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Direct I/O stays on, writing goes on, and a failed publication holds neither its slot nor anything else."""
    memory = mmap.mmap(-1, FILE_BYTES)
    gc.disable()  # only what no reference holds any more is gone
    try:
        with Rig(tmp_path / "s") as rig:
            meta, other = rig.chain(1)[0], rig.chain(1, seed=2)[0]
            rig.write([meta])
            direct = rig.store.statistics().direct
            path = rig.path(meta)
            harm(path)
            assert rig.read(meta) == "foreign"
            assert rig.store.statistics().direct == direct
            rig.submit_write(meta, view=memoryview(memory))
            assert rig.settle().reason == ("blocked" if harm is directory else "")
            assert rig.store.accepts_writes()
            rig.write([other])
            assert rig.read(other) == ""
            assert path.is_dir() is (harm is directory)
        memory.close()  # BufferError if something holds the slot after the store is closed
    finally:
        gc.enable()


def test_p29_a_file_that_may_not_be_opened(tmp_path: Path) -> None:
    """chmod 000, as the system call says it (the tests may run as root, who may open anything)."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, readers=1) as rig:
        metas = rig.chain(2)
        rig.write(metas)
        io.arm(Fault("open", 2, code=errno.EACCES))  # the first opens the shard
        assert rig.read(metas[1]) == "foreign"
        assert io.fired == 1
        io.disarm()
        assert (rig.read(metas[1]), rig.read(metas[0])) == ("quarantined", "")
        assert rig.gone == [metas[1].key]


def test_p31_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    """Whoever looks into the directory meanwhile sees no part of a file under a chunk's name."""
    for op in ("pwritev", "utime", "fdatasync", "rename"):
        io = FaultIO()
        with Rig(tmp_path / op, io=io) as rig:
            meta = rig.chain(1)[0]
            io.arm(Fault(op, 1, "hang"))
            rig.submit_write(meta)
            assert io.hanging.wait(WAIT_S)
            assert list((tmp_path / op / layout.CHUNKS).glob("*/*")) == []
            io.release()
            assert rig.settle().reason == ""
            assert os.path.getsize(rig.path(meta)) == FILE_BYTES
