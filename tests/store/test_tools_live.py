"""F-S1: `kvalet store` beside a store that writes, evicts and sets aside: no false alarm, no change, no deletion."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from damagekit import flip
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.ids import ChunkMeta
from kvalet.store.inspect_check import CheckPlan, check_store, surely_orphan
from kvalet.store.inspect_file import GONE, Reader
from kvalet.store.inspect_open import holder, open_to_look
from kvalet.store.inspect_walk import Found, list_store
from recordkit import RecordRig, record_of, state_bytes, state_meta
from storekit import FILE_BYTES, Rig
from storetool import picture, tool

SUPPORT = str(Path(__file__).resolve().parent.parent / "support")
HOLDER = """
import sys
sys.path.insert(0, {support!r})
from pathlib import Path
from storekit import Rig
rig = Rig(Path(sys.argv[1]))
print([r.reason for r in rig.write(rig.chain(3))], flush=True)
sys.stdin.read()
rig.store.close(20)
"""
CHECKS, TURNS = 40, 30
MOST_CHECKS = 2000
"""Where the writer gets no turn on a busy machine, the checker goes on a while; then the test says so."""


class Churn:
    """A thread that writes chains with tails and states and records, some pinned, into a store far too small for them, and
    drops, replaces and unpins records, until told to stop."""

    def __init__(self, rig: RecordRig, seed: int) -> None:
        self._rig, self._rng = rig, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.turns = 0
        self.error: BaseException | None = None

    def _work(self) -> None:
        try:
            shared = self._rig.chain(2)
            while not self._stop.is_set():
                self.turns += 1
                how = {"seed": self.turns, "tail": self._rng.randrange(0, 20)}
                metas = [*shared, *self._rig.chain(self._rng.randrange(1, 4), after=shared, **how)]
                reasons = [result.reason for result in self._rig.write(metas)]
                self._rig.store.touch([meta.key for meta in metas])
                if not any(reasons):
                    self._note(metas)
        except AssertionError as error:
            self.error = error

    def _note(self, metas: list[ChunkMeta]) -> None:
        """A state after the chain, and a record of one of three sessions, which replaces the one before it."""
        state = state_meta(self._rig.secret, metas[-1], 5000)
        stored = self._rig.put_state(state, state_bytes(state)) == ""
        session = f"s{self.turns % 3}"
        keys = (state.key,) if stored else ()
        self._rig.put(record_of(metas, session=session, pinned=self.turns % 7 == 0, state_keys=keys))
        if self.turns % 5 == 0:
            self._rig.drop(session=session)

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_check_beside_a_store_that_writes_and_evicts_raises_no_alarm(tmp_path: Path) -> None:
    seed = 20261201
    with RecordRig(tmp_path / "s", cap_bytes=48 * FILE_BYTES, sync="none") as rig:
        with Churn(rig, seed) as churn, open_to_look(str(tmp_path / "s")) as place:
            number = 0
            while number < CHECKS or (churn.turns < TURNS and number < MOST_CHECKS):
                number += 1
                report = check_store(place, list_store(place), CheckPlan(payload=number % 2 == 0, threads=2))
                assert report.good, f"seed {seed}, check {number}: {report.findings}"
                assert (report.orphans, report.behind_bad) == (0, 0), f"seed {seed}, check {number}"
                assert report.server == str(os.getpid())
                listed = tool("ls", tmp_path / "s", "--json")
                assert (listed.status, listed.data["unread_records"]) == (0, 0), f"seed {seed}, check {number}"
                sessions = [(one["session"], one["branch"]) for one in listed.data["sessions"]]
                assert len(sessions) == len(set(sessions)) <= 3
        assert churn.error is None
        evicted = rig.store.statistics().evicted_files
        rig.quiet()
    assert churn.turns >= TURNS, "the store must have been busy"
    assert evicted > 0
    assert tool("check", tmp_path / "s", "--read-data").status == 0


def test_damage_is_found_beside_a_running_server_too(tmp_path: Path) -> None:
    """The positive control: what must be told apart from eviction."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3)
        rig.write(metas)
        flip(rig.path(metas[1]), BLOCK_BYTES)
        path = str(rig.path(metas[1]).relative_to(tmp_path / "s"))
        before = picture(tmp_path / "s")
        ran = tool("check", tmp_path / "s", "--read-data", "--json")
        assert (ran.status, ran.reasons()) == (1, {path: ("payload", "payload_digest")})
        assert picture(tmp_path / "s") == before
        assert rig.read(metas[1]) == "payload"
        rig.quiet()
        after = tool("check", tmp_path / "s", "--read-data", "--json")
        assert (after.status, after.data["set_aside"]["files"], after.data["orphans"]["files"]) == (0, 1, 1)


def found_of(place_files: list[Found], path: Path) -> Found:
    return next(found for found in place_files if found.path.endswith(path.name))


def test_a_file_that_goes_while_it_is_looked_at_is_gone_and_a_new_one_is_looked_at_again(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas)
        paths = [rig.path(meta) for meta in metas]
    with open_to_look(str(tmp_path / "s")) as place:
        files = list_store(place).files
        reader = Reader(place)
        chunk = found_of(files, paths[1])
        good = paths[1].read_bytes()
        paths[1].write_bytes(b"")  # refused, as the listing saw it ...
        replacement = paths[1].with_name("new")
        replacement.write_bytes(good)
        looked = reader._once(chunk, payload=True)[0]
        assert looked.reason == "size"
        reader._once = Replaced(reader, replacement, paths[1])  # type: ignore[method-assign]
        assert reader.examine(chunk, payload=True).reason == ""  # ... but another has its name when it is to be reported
        paths[1].write_bytes(b"")
        reader = Reader(place)
        reader._once = Replaced(reader, None, paths[1])  # type: ignore[method-assign]
        assert reader.examine(chunk, payload=True).reason == GONE  # refused, but evicted before it is reported
        assert Reader(place).examine(chunk, payload=True).reason == GONE


class Replaced:
    """The first look, then the writer's rename (or the janitor's unlink), then looks as they are."""

    def __init__(self, reader: Reader, new: Path | None, path: Path) -> None:
        self._once, self._new, self._path = reader._once, new, path

    def __call__(self, found: Found, *, payload: bool) -> object:
        verdict = self._once(found, payload=payload)
        if self._new is None:
            assert verdict[0].reason == "size"
            self._path.unlink()
        elif self._new.exists():
            self._new.rename(self._path)
        return verdict


def test_orphans_are_looked_at_again(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas)
        paths = [rig.path(meta) for meta in metas]
    with open_to_look(str(tmp_path / "s")) as place:
        child = found_of(list_store(place).files, paths[1])
        parent = bytes(metas[0].key)
        assert not surely_orphan(place, child, parent)  # written since the names were listed
        paths[0].unlink()
        assert surely_orphan(place, child, parent)
        paths[1].unlink()
        assert not surely_orphan(place, child, parent)  # evicted since


@contextmanager
def served(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the store."""
    program = HOLDER.format(support=SUPPORT)
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "['', '', '']"
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=60)


def test_who_deletes_is_refused_beside_a_server_and_names_it(tmp_path: Path) -> None:
    with served(tmp_path / "s") as child:
        tmp = tmp_path / "s" / "tmp" / f"{child.pid}.9.0123456789abcdef"
        tmp.write_bytes(b"being written")
        tmp.chmod(0o600)
        before = picture(tmp_path / "s")
        for command in (("gc",), ("gc", "--cap", "0")):
            ran = tool(command[0], tmp_path / "s", *command[1:])
            assert (ran.status, ran.out) == (2, "")
            assert f"in use by another kvalet process (pid {child.pid})" in ran.err
        assert picture(tmp_path / "s") == before
        looks = [tool("check", tmp_path / "s", "--json"), tool("ls", tmp_path / "s", "--json")]
        assert [ran.status for ran in looks] == [0, 0]
        assert [ran.data["server_pid"] for ran in looks] == [child.pid] * 2
        assert looks[0].data["leftovers"]["files"] == 0  # it is being written
        dry = tool("gc", tmp_path / "s", "--dry-run", "--cap", "0", "--json")
        assert dry.data["causes"] == {"cap": {"files": 3, "bytes": 3 * FILE_BYTES}}
        assert picture(tmp_path / "s") == before
    with open_to_look(str(tmp_path / "s")) as place:
        assert holder(place) == ""
    assert tool("check", tmp_path / "s", "--json").data["leftovers"]["files"] == 1
    assert tool("gc", tmp_path / "s").status == 0


@pytest.mark.parametrize("text", ["", "garbage", "1: FLOCK  ADVISORY  WRITE 7 00:00:1 0 EOF"])
def test_an_odd_list_of_locks_names_nobody(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(tmp_path / "s"), open_to_look(str(tmp_path / "s")) as place:
        assert holder(place) == str(os.getpid())
        (tmp_path / "locks").write_text(text)
        monkeypatch.setattr("kvalet.store.inspect_open.KERNEL_LOCKS", tmp_path / "locks")
        assert holder(place) == ""
        monkeypatch.setattr("kvalet.store.inspect_open.KERNEL_LOCKS", tmp_path / "none")
        assert holder(place) == ""
