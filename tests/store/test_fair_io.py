"""Reads and writes beside each other, with the real threads: who goes first, who shares, how much is in flight."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kvalet.store.fileio import FileIO
from storekit import WAIT_S, Rig


class GatedIO(FileIO):
    """Reads wait at a gate; ``order`` is the order in which transfers began, by the key in the name that was opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)
        self.order: list[tuple[str, str]] = []
        self.now = self.most = 0
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        self._names[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if len(self._names[fd]) < 64:  # the probe of the disk at open
            return super().preadv(fd, buffers, offset)
        with self._lock:
            self.order.append(("read", self._names[fd][:64]))
            self.now += 1
            self.most = max(self.most, self.now)
        self.waiting.release()
        self.gate.wait(WAIT_S)
        try:
            return super().preadv(fd, buffers, offset)
        finally:
            with self._lock:
                self.now -= 1

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self.order.append(("write", bytes(buffers[0][144:176]).hex()))
        return super().pwritev(fd, buffers, offset)


def test_sessions_share_the_readers_whoever_asked_first(tmp_path: Path) -> None:
    """A session of 12 chunks asked before two of 3: they take turns, so the short ones are through after nine reads; and a
    background session waits for all of them."""
    io = GatedIO()
    with Rig(tmp_path / "s", io=io, readers=1) as rig:
        chains = {name: rig.chain(n, seed=i) for i, (name, n) in enumerate({"late": 2, "long": 12, "a": 3, "b": 3}.items())}
        for metas in chains.values():
            rig.write(metas)
        io.gate.clear()
        first = rig.chain(1, seed=9)
        rig.write(first)
        io.order.clear()
        rig.submit_read(first[0], session="first")
        assert io.waiting.acquire(timeout=WAIT_S)
        for name, metas in chains.items():
            for meta in metas:
                rig.submit_read(meta, session=name, klass=2 if name == "late" else 0)
        io.gate.set()
        rig.settle_all(1 + 2 + 12 + 3 + 3)
        owner = {meta.key.hex(): name for name, metas in chains.items() for meta in metas}
        order = [owner[key] for _, key in io.order[1:]]
        assert order[:9] == ["long", "a", "b"] * 3
        assert order[9:] == ["long"] * 9 + ["late"] * 2
        keys = [key for _, key in io.order[1:]]
        for metas in chains.values():  # and inside a session from token 0 on
            assert [key for key in keys if key in {m.key.hex() for m in metas}] == [m.key.hex() for m in metas]


def test_no_more_is_in_flight_than_there_are_readers(tmp_path: Path) -> None:
    io = GatedIO()
    with Rig(tmp_path / "s", io=io, readers=3) as rig:
        metas = rig.chain(12)
        rig.write(metas)
        io.gate.clear()
        for meta in metas:
            rig.submit_read(meta)
        for _ in range(3):
            assert io.waiting.acquire(timeout=WAIT_S)
        assert not io.waiting.acquire(timeout=0.05)
        statistics = rig.store.statistics()
        assert (statistics.reads_running, statistics.reads_waiting) == (3, 9)
        io.gate.set()
        rig.settle_all(12)
        assert io.most == 3


def test_a_background_write_lets_waiting_reads_go_first_but_not_for_ever(tmp_path: Path) -> None:
    io = GatedIO()
    with Rig(tmp_path / "s", io=io, readers=1, writers=1, yield_s=0.3) as rig:
        metas, new = rig.chain(2), rig.chain(2, seed=1)
        rig.write(metas)
        io.gate.clear()
        for meta in metas:
            rig.submit_read(meta)
        assert io.waiting.acquire(timeout=WAIT_S)  # one runs, one waits: as long as that is so, writes hold back
        io.order.clear()
        rig.submit_write(new[0])
        assert rig.settle().reason == ""  # after yield_s, although the read still waits
        assert [kind for kind, _ in io.order] == ["write"]
        io.gate.set()
        rig.settle_all(2)
        io.order.clear()
        jobs = [rig.submit_read(meta) for meta in metas]
        jobs.append(rig.submit_write(new[1], klass=0))  # a turn waits for it: it yields to nobody
        outcomes = rig.settle_all(3)
        assert {outcomes[job].reason for job in jobs} == {""}
