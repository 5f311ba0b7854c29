"""The table of errors (docs/store.md, "When the disk fails"), the lines that have no test of their own elsewhere."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from kvalet.store import reading, workers, writing
from kvalet.store.faults import Fault, FaultIO
from storekit import FILE_BYTES, Rig, slot


def test_a_write_that_makes_no_progress_is_an_io_error_and_closes_the_tier(tmp_path: Path) -> None:
    """Zero bytes again and again: never a loop, never "full"."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, probe_every_s=1e6) as rig:
        io.arm(Fault("pwritev", 1, "zero", sticky=True))
        assert rig.write(rig.chain(1))[0].reason == "io"
        assert 1 < io.fired <= 1 + writing.MAX_STALLS + 1
        assert not rig.store.accepts_writes()
        assert rig.write(rig.chain(1))[0].reason == "read_only"
        io.disarm()
        rig.check_books()


def test_a_write_that_stalls_once_goes_on(tmp_path: Path) -> None:
    io = FaultIO()
    with Rig(tmp_path / "s", io=io) as rig:
        metas = rig.chain(1)
        io.arm(Fault("pwritev", 1, "zero"))
        assert rig.write(metas)[0].reason == ""
        assert io.fired == 1
        assert rig.read(metas[0]) == ""


@pytest.mark.parametrize("op", ["pwritev", "fdatasync", "rename"])
def test_interrupted_calls_are_the_kernels_affair(tmp_path: Path, op: str) -> None:
    """EINTR never comes out of Python's calls (PEP 475); if it does, it is an I/O error like any other, and nothing is left."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io) as rig:
        io.arm(Fault(op, 1, code=errno.EINTR))
        assert rig.write(rig.chain(1))[0].reason == "io"
        io.disarm()
        rig.check_books()


DEFECTS = {
    "reader": (reading, "read_chunk"),
    "writer": (writing, "write_data"),
    "committer": (writing, "publish"),
}


@pytest.mark.parametrize("who", DEFECTS)
def test_a_defect_fails_its_job_is_counted_and_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """An exception that nobody foresaw: "internal", once; no breaker, no verdict on the file; the same thread does the next."""
    with Rig(tmp_path / "s", readers=1, writers=1, committers=1) as rig:
        old, new = rig.chain(1), rig.chain(2, seed=1)
        rig.write(old)
        module, name = DEFECTS[who]
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda *args, **how: [][1])
            reasons = [rig.read(old[0])] if who == "reader" else [r.reason for r in rig.write(new)]
        assert reasons == (["internal"] if who == "reader" else ["internal", "ancestor"])
        assert rig.store.statistics().internal == 1
        assert rig.store.accepts_writes()
        assert all(thread.is_alive() for thread in rig.store._threads)
        assert rig.read(old[0]) == ""
        assert [r.reason for r in rig.write(new)] == ["", ""]
        assert rig.store.statistics().stranded_bytes == (FILE_BYTES if who == "committer" else 0)
    with Rig(tmp_path / "s") as again:
        again.check_books()
        assert [again.read(meta) for meta in [*old, *new]] == [""] * 3


def test_a_callback_that_raises_ends_no_thread(tmp_path: Path) -> None:
    """A loop that is gone at shutdown: its jobs end unheard."""

    def gone(over: object) -> None:
        raise RuntimeError("Event loop is closed")

    with Rig(tmp_path / "s", readers=1, writers=1, committers=1) as rig:
        metas = rig.chain(2)
        rig.write(metas[:1])
        rig.store.read(next(rig.jobs), metas[0], slot(), gone, session="s", klass=0)
        assert [r.reason for r in rig.write(metas[1:])] == [""]
        assert rig.read(metas[1]) == ""
        assert all(thread.is_alive() for thread in rig.store._threads)


def test_each_loop_has_its_defects_tested() -> None:
    """Whoever adds a thread to the store adds a line to DEFECTS (chores: test_faults_chores.py)."""
    loops = {name.removesuffix("_loop") for name in vars(workers) if name.endswith("_loop")}
    assert loops == set(DEFECTS)
