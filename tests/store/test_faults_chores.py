"""The janitor's own calls fail (E3, E4): the books hear of every file, no gate stays shut, and nothing is a defect."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from damagekit import flip
from kvalet.store import chores, janitor
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.state import StoreState
from storekit import FILE_BYTES, WAIT_S, Rig

FAILURES = [
    Fault("open", 1, "memory", sticky=True),
    Fault("open", 1, code=errno.EMFILE, sticky=True),
    Fault("unlink", 1, sticky=True),
    Fault("unlink", 1, "memory", sticky=True),
]


@pytest.mark.parametrize("fault", FAILURES, ids=lambda fault: f"{fault.op}-{fault.kind}-{fault.code}")
def test_a_file_that_cannot_be_deleted_is_stranded_and_its_gate_opens(tmp_path: Path, fault: Fault) -> None:
    """An eviction whose unlink fails, out of memory too: the write behind it ends, the bytes stay in the ledger."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, cap_bytes=2 * FILE_BYTES, room_wait_s=WAIT_S) as rig:
        rig.write(rig.chain(2))
        io.arm(fault)
        assert rig.write(rig.chain(1, seed=1))[0].reason == "full"  # room was granted by the books, not by the disk
        assert io.fired >= 1
        io.disarm()
        statistics = rig.store.statistics()
        assert (statistics.internal, statistics.dying_bytes) == (0, 0)
        assert statistics.stranded_bytes >= FILE_BYTES
        assert "could not be deleted" in rig.store.health().why[0]
    with Rig(tmp_path / "s") as again:
        again.check_books()


@pytest.mark.parametrize("kind", ["errno", "memory"])
@pytest.mark.parametrize("op", ["open", "rename", "scan", "unlink", "close"])
def test_setting_a_bad_file_aside_survives_any_failure(tmp_path: Path, op: str, kind: str) -> None:
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, bad_files=1) as rig:
        metas = [rig.chain(1, seed=i)[0] for i in range(3)]
        rig.write(metas)
        paths = [rig.path(meta) for meta in metas]
        for path in paths:
            flip(path, FILE_BYTES - 1)
        assert rig.read(metas[0]) == "payload"
        rig.quiet()
        state = rig.store._state
        for meta in metas[1:]:
            io.arm(Fault(op, 3 if op in ("open", "close") else 1, kind))  # the first ones belong to the read itself
            assert rig.read(meta) == "payload"
            with state.lock:
                assert state.quiet.wait_for(lambda: not state.burials and not state.dying, WAIT_S)
            io.disarm()
        statistics = rig.store.statistics()
        assert (statistics.internal, statistics.dying_bytes) == (0, 0)
        assert not any(path.exists() for path in paths) or statistics.stranded_bytes
        assert [r.reason for r in rig.write(metas)] == [""] * 3
        assert [rig.read(meta) for meta in metas] == [""] * 3


def test_a_defect_in_one_burial_is_counted_and_the_next_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one file's gate may stay shut because another's deletion broke."""
    with Rig(tmp_path / "s", cap_bytes=4 * FILE_BYTES, room_wait_s=WAIT_S) as rig:
        old = [rig.chain(1, seed=i)[0] for i in range(4)]
        rig.write(old)
        honest, broken = janitor.bury, []

        def bury(disk, burial):  # type: ignore[no-untyped-def]
            if not broken:
                broken.append(burial)
                raise ZeroDivisionError("a defect")
            return honest(disk, burial)

        monkeypatch.setattr(chores.janitor, "bury", bury)
        assert [rig.write(rig.chain(1, seed=10 + i))[0].reason for i in range(3)] == ["full", "", ""]
        statistics = rig.store.statistics()
        assert (statistics.internal, statistics.dying_bytes, statistics.stranded_bytes) == (1, 0, FILE_BYTES)


TIMED = [
    (chores.measure_free, "free_bytes"),
    (chores.flush_touches, "utime"),
    (chores.flush_touches, "open"),
    (chores.compare, "scan"),
    (chores.compare, "open"),
]


@pytest.mark.parametrize("kind", ["errno", "memory"])
@pytest.mark.parametrize(("chore", "op"), TIMED)
def test_a_timed_chore_that_fails_is_made_again_next_time(
    tmp_path: Path, chore: Callable[[StoreState], object], op: str, kind: str
) -> None:
    """No exception, nothing forgotten, nothing evicted."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, free_every_s=1e6, touch_every_s=1e6, walk_every_s=1e6) as rig:
        metas = rig.chain(2)
        rig.write(metas)
        state = rig.store._state
        rig.store.touch([meta.key for meta in metas])
        io.arm(Fault(op, 1, kind))
        chore(state)
        assert io.fired == 1
        io.disarm()
        chore(state)
        statistics = rig.store.statistics()
        assert (statistics.internal, statistics.drift_bytes, statistics.files) == (0, 0, 2)
        assert [rig.read(meta) for meta in metas] == ["", ""]
        rig.quiet()
