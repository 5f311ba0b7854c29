"""kill -9 at every system call that changes the disk, on a real child under strace (fault plan K1, K2, K4, and a short K3).

strace is installed by .ci/run; without it these tests fail, because a promise that nobody checks is none.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvalet.store import layout
from recordkit import RecordRig, record_of
from storekit import Rig

CHILD = Path(__file__).resolve().parent.parent / "support" / "killchild.py"
CHANGING = ("pwritev2", "fdatasync", "fsync", "renameat", "mkdirat", "utimensat", "unlinkat", "flock", "ftruncate")
"""os.pwritev is pwritev2, os.rename with directories is renameat: a name that never fires would test nothing.
Counts are per thread. Not with --seccomp-bpf: strace 6.1 then counts nothing beyond the first call."""


def run_child(directory: Path, mode: str, inject: str = "") -> tuple[set[bytes], bool, bool]:
    """(acknowledged keys, killed, ended)."""
    lines, killed, ended = say_child(directory, mode, inject)
    return {bytes.fromhex(line[4:]) for line in lines if line.startswith("ack ")}, killed, ended


def say_child(directory: Path, mode: str, inject: str = "") -> tuple[list[str], bool, bool]:
    """(its lines, killed, ended). ``inject``: system call and count, as in "renameat:2"."""
    command = [sys.executable, "-P", "-E", str(CHILD), str(directory), mode]
    if inject:
        call, _, count = inject.partition(":")
        strace = shutil.which("strace")
        assert strace, "strace is missing: install it (Debian: apt-get install strace)"
        rule = f"inject={call}:signal=KILL:when={count}"
        command = [strace, "-f", "-qq", "-o", os.devnull, "-e", f"trace={call}", "-e", rule, *command]
    env = {**os.environ, "PYTHONPATH": str(CHILD.parent)}
    command = [part for part in command if part not in ("-P", "-E")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    lines = done.stdout.split("\n")
    killed = done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert killed or done.returncode == 0, done.stderr
    return lines, killed, "end" in lines


def examine(directory: Path, acked: set[bytes], *, evicting: bool = False, damaged: bool = False) -> None:
    """What must hold after any kill: see the asserts."""
    with Rig(directory) as rig:
        rig.quiet()
        assert rig.tmp_names() == []
        assert (directory / layout.TMP / "notes of the owner").read_bytes() == b"mine"
        metas = [*rig.chain(2, tail=5), *rig.chain(1, seed=1), *rig.chain(3, seed=2)]
        by_key = {bytes(meta.key): meta for meta in metas}
        reasons = {key: rig.read(meta) for key, meta in by_key.items() if rig.store.has(meta.key)}
        for key, meta in by_key.items():
            if key in reasons:
                assert meta.parent == rig.root or bytes(meta.parent) in reasons or damaged, "a hole in a prefix"
        if not evicting and not damaged:
            assert {key for key in acked if reasons.get(key) != ""} == set(), "an acknowledged chunk was lost"
        assert set(reasons.values()) <= ({"", "payload"} if damaged else {""})
        rig.quiet()


def fresh(directory: Path, template: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    shutil.copytree(template, directory)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An empty store with a stranger's file in tmp/, which must survive everything."""
    template = tmp_path / "empty"
    with Rig(template):
        pass
    (template / layout.TMP / "notes of the owner").write_bytes(b"mine")
    return template


@pytest.fixture
def filled(empty: Path, tmp_path: Path) -> Path:
    template = tmp_path / "filled"
    shutil.copytree(empty, template)
    acked, killed, ended = run_child(template, "write")
    assert (len(acked), killed, ended) == (4, False, True)  # positive control: the same path without a fault
    examine(template, acked)
    return template


def sweep(
    template: Path, tmp_path: Path, mode: str, calls: tuple[str, ...], *, at_most: int = 40, **how: bool
) -> dict[str, int]:
    """Kill at the 1st, 2nd, ... of each system call until the child ends by itself. Returns how often each one fired."""
    fired = dict.fromkeys(calls, 0)
    for call in calls:
        for count in range(1, at_most + 1):
            fresh(tmp_path / "s", template)
            acked, killed, ended = run_child(tmp_path / "s", mode, f"{call}:{count}")
            examine(tmp_path / "s", acked, **how)
            if not killed:
                assert ended
                break
            fired[call] += 1
    return fired


def test_kill_at_every_call_of_a_spill(empty: Path, tmp_path: Path) -> None:
    """K1: all points of publication; of the others the first ones (the long run has all)."""
    fired = sweep(empty, tmp_path, "write", ("renameat", "fsync"))
    fired |= sweep(empty, tmp_path, "write", ("pwritev2", "fdatasync", "mkdirat", "utimensat"), at_most=2)
    assert all(fired.values()), fired


RECORD_CALLS = {"renameat": 8, "unlinkat": 8, "fdatasync": 2, "fsync": 2}
"""All points at which names change; of the flushes the first ones."""


def test_kill_at_every_call_of_a_record(empty: Path, tmp_path: Path) -> None:
    """K1 with records: one that is there is whole, names nothing that is not, and is at least the last acknowledged one."""
    fired = dict.fromkeys(RECORD_CALLS, 0)
    for call, at_most in RECORD_CALLS.items():
        for count in range(1, at_most + 1):
            fresh(tmp_path / "s", empty)
            lines, killed, _ = say_child(tmp_path / "s", "record", f"{call}:{count}")
            acked = max((int(line[4:]) for line in lines if line.startswith("rec ")), default=0)
            with RecordRig(tmp_path / "s") as rig:
                rig.quiet()
                found = rig.get()
                assert found.reason in ("", "missing")
                here = len(found.record.chunk_keys) if found.record else 0
                assert here >= acked, f"{call}:{count}: a record was lost"
                if found.record:
                    metas = rig.chain(here, tail=5)
                    assert found.record == record_of(metas, last_use_ns=found.record.last_use_ns)
                    assert [rig.read(meta) for meta in metas] == [""] * len(metas), "a record names what is not there"
            if not killed:
                break
            fired[call] += 1
    assert all(fired.values()), fired


@pytest.mark.parametrize(("mutant", "complaint"), [("hasty", "was lost"), ("orphans", "a hole in a prefix")])
def test_mutant_protocols_are_caught_by_the_sweep(empty: Path, tmp_path: Path, mutant: str, complaint: str) -> None:
    """The control: a store that says "durable" too early, or names children before their parents, fails the examination."""
    with pytest.raises(AssertionError, match=complaint):
        sweep(empty, tmp_path, mutant, ("renameat",), at_most=6)


@pytest.mark.long
def test_kill_at_every_call_of_a_spill_long(empty: Path, tmp_path: Path) -> None:
    """K1, every call of every kind."""
    assert all(sweep(empty, tmp_path, "write", CHANGING[:6]).values())


def test_kill_at_every_call_of_eviction(filled: Path, tmp_path: Path) -> None:
    """K2: eviction, on top of a full store."""
    fired = sweep(filled, tmp_path, "evict", ("unlinkat", "renameat"), evicting=True)
    assert all(fired.values()), fired


def test_kill_at_every_call_of_opening_and_quarantine(filled: Path, tmp_path: Path) -> None:
    """K2: start-up (lock, sweep, probe) and setting a bad file aside."""
    (filled / layout.TMP / "77.1.0123456789abcdef").write_bytes(b"left behind")
    fired = sweep(filled, tmp_path, "damage", ("unlinkat", "renameat"), damaged=True)
    fired |= sweep(filled, tmp_path, "open", ("flock", "ftruncate"), damaged=True)
    assert all(fired.values()), fired


def test_kill_during_recovery_twice(empty: Path, tmp_path: Path) -> None:
    """K4: the same as one recovery."""
    fresh(tmp_path / "s", empty)
    acked, killed, _ = run_child(tmp_path / "s", "write", "renameat:4")
    assert killed
    for inject in ("unlinkat:1", "fdatasync:1"):
        _, killed, _ = run_child(tmp_path / "s", "open", inject)
        assert killed
    examine(tmp_path / "s", acked)


def random_kills(template: Path, directory: Path, rounds: int, seed: int) -> int:
    """One directory, killed again and again at random calls. Returns the number of kills."""
    rng = random.Random(seed)
    fresh(directory, template)
    kills = 0
    acked: set[bytes] = set()
    for _ in range(rounds):
        more, killed, _ = run_child(directory, "write", f"{rng.choice(CHANGING[:6])}:{rng.randrange(1, 8)}")
        acked |= more
        kills += killed
        examine(directory, acked)
    return kills


def test_random_kills_on_one_directory(empty: Path, tmp_path: Path) -> None:
    """A short K3."""
    assert random_kills(empty, tmp_path / "s", rounds=6, seed=11) > 0


@pytest.mark.long
def test_random_kills_on_one_directory_long(empty: Path, tmp_path: Path) -> None:
    """K3: 200 rounds."""
    for seed in range(10):
        assert random_kills(empty, tmp_path / "s", rounds=20, seed=seed) > 0, f"seed {seed}"
