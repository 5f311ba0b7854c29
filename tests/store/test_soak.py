"""A short life on a bad disk (L3; ``make soak-store`` is the long one), and the soak's own controls: it sees what it should."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from kvalet.store import chores, header
from kvalet.store.faults import CHANCES, OPS, RandomFaults
from storekit import Rig, payload
from storesoak import Life, Tally, examine, soak, verdict


@pytest.fixture(autouse=True)
def _prompt_janitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak sets it for its process; here it must not stay."""
    monkeypatch.setattr(chores, "IDLE_S", chores.IDLE_S)


def test_a_bad_disk_for_a_while(tmp_path: Path) -> None:
    """5 % of all calls fail; a third of the lives end by kill -9. Nothing wrong, no defect, nothing left behind."""
    seed = random.SystemRandom().randrange(1 << 30)
    lines: list[str] = []
    tally = soak(tmp_path / "s", seed, 6.0, 1.0, lines.append)
    assert verdict(tally) == [], f"seed {seed}: {tally.line()}"
    assert tally.kills >= 1
    assert lines


def test_the_verdict_names_what_is_wrong() -> None:
    assert set(verdict(Tally())) >= {"no fault fired", "nothing was evicted", "no read ok"}
    good = Tally(evicted=1, fds=[9, 6, 6], threads=[1, 1], memory_mb=[20.0, 30.0, 31.0])
    good.struck["open errno"] = 1
    good.outcomes = Counter({f"{name} ok": 1 for name in ("read", "write", "tail", "record", "recall")})
    assert verdict(good) == []
    good.wrong, good.internal, good.fds, good.memory_mb = 1, 2, [9, 6, 7], [20.0, 20.0, 20.0, 90.0, 90.0, 90.0]
    said = verdict(good)
    assert [line.partition(":")[0] for line in said] == ["wrong", "internal", "fds grew by 1", "memory grew by 70"]


def test_mutant_without_a_digest_is_seen_by_the_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a store that believes any payload serves wrong bytes, and the soak counts them."""
    with Rig(tmp_path / "s") as rig:
        meta = rig.chain(1)[0]
        rig.write([meta])
        path = rig.path(meta)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tally = Tally()
    examine(tmp_path / "s", tally)
    assert (tally.wrong, tally.outcomes["read payload"]) == (0, 1)
    path.write_bytes(data)  # it was set aside
    path.chmod(0o600)
    honest = header.digest
    monkeypatch.setattr(
        "kvalet.store.reading.header.digest",
        lambda view: honest(payload(meta)) if len(view) == len(payload(meta)) else honest(view),
    )
    tally = Tally()
    examine(tmp_path / "s", tally)
    assert tally.wrong == 1


def test_a_defect_in_a_worker_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of ``internal``: an exception of an unexpected kind fails the job, ends no thread, and shows."""
    life = Life(tmp_path / "s", 1, Tally(), rate=0.0)
    monkeypatch.setattr("kvalet.store.writing.write_data", lambda *args, **how: 1 / 0)
    life.start("write", life.chains[0][0], 0)
    life.settle()
    life.end()
    assert life.tally.outcomes == {"write internal": 1}
    assert life.tally.internal == 1
    assert "internal: 1" in verdict(life.tally)


def test_random_faults_strike_every_call_at_their_rate_and_only_when_armed() -> None:
    io = RandomFaults(0.05, seed=3)
    quiet = sum(bool(io._strike(op)) for op in OPS for _ in range(50))
    assert (quiet, io.fired) == (0, 0)
    io.arm()
    for op in OPS:
        for _ in range(2000):
            try:
                io._strike(op)
            except (OSError, MemoryError):
                continue
            finally:
                io.release()  # no hang waits
    assert {op for op, _ in io.struck} == set(OPS)
    assert 0.03 < io.fired / (2000 * len(OPS)) < 0.07
    assert {(op, kind) for op, chances in CHANCES.items() for kind, _ in chances} <= set(io.struck)
    io.disarm()
    before = io.fired
    io._strike("open")
    assert io.fired == before
