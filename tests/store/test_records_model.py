"""Records against a dictionary: random calls and restarts on a real directory (H5), and mutants that must be caught."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kvalet.store import recordchores, recordjobs
from kvalet.store.entries import Entry
from kvalet.store.ids import ChunkMeta
from kvalet.store.record import Record
from kvalet.store.recordbooks import RecordBooks
from recordkit import RecordRig, record_of
from storekit import FILE_BYTES

CHAINS = 2
BRANCHES = ("0" * 16, "1" * 16)
SESSIONS = ("s",)


class RecordsModel:
    """``model``: what the last acknowledged record of each (session, branch) is. The cap holds six chunks, so chunks
    come and go; records and what pinned ones name must not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.model: dict[tuple[str, str], Record] = {}
        self.let_go: set[tuple[str, str]] = set()
        self.open()

    def open(self) -> None:
        self.rig = RecordRig(self.folder / "s", cap_bytes=6 * FILE_BYTES, readers=1, writers=2, committers=1)
        self.chains = [self.rig.chain(2, tail=3, seed=seed) for seed in range(CHAINS)]

    def present(self, number: int) -> list[ChunkMeta]:
        """What is there of the chain, from its beginning on."""
        metas = self.chains[number]
        n = next((i for i, meta in enumerate(metas) if not self.rig.store.has(meta.key)), len(metas))
        return metas[:n]

    def write_chain(self, number: int) -> None:
        assert {one.reason for one in self.rig.write(self.chains[number])} <= {"", "full", "ancestor"}

    def write_something_else(self, seed: int) -> None:
        for number in range(6):
            assert self.rig.write(self.rig.chain(1, seed=seed + number))[0].reason in ("", "full")

    def write_record(self, number: int, session: str, branch: str, pinned: bool, after: int) -> None:
        self.write_chain(number)
        record = record_of(self.present(number), session=session, branch=branch, pinned=pinned, after=after)
        reason = self.rig.put(record)
        assert reason in ("", "full")
        if not reason:
            self.model[session, branch] = record
            self.let_go.discard((session, branch))
        elif not pinned:
            self.let_go.add((session, branch))  # the wish to unpin is heard without a record of it, until a restart

    def write_record_of_what_is_not_there(self, number: int, session: str) -> None:
        metas = self.chains[number]
        if len(self.present(number)) < len(metas):
            assert self.rig.put(record_of(metas, session=session, branch=BRANCHES[0])) == "missing"

    def drop(self, session: str, branch: str) -> None:
        self.rig.drop(branch, session)
        self.model.pop((session, branch), None)

    def restart(self) -> None:
        self.rig.quiet()
        self.rig.store.close(20.0)
        self.open()
        assert {name for name, record in self.model.items() if record.pinned} <= {
            (session, branch) for session in SESSIONS for branch in self.rig.branches(session)
        }

    def read_all(self, session: str) -> None:
        for branch in BRANCHES:
            self.read(session, branch)

    def read(self, session: str, branch: str) -> None:
        found = self.rig.get(branch, session)
        expected = self.model.get((session, branch))
        if found.record is None:  # evicted, once nothing of its chain was left; never while pinned
            assert found.reason == "missing"
            assert expected is None or not expected.pinned
            self.model.pop((session, branch), None)
        else:
            assert found.record == expected

    def what_is_pinned_is_there(self) -> None:
        assert self.rig.store._state.lost_pins == 0
        for name, record in self.model.items():
            if record.pinned and name not in self.let_go:
                assert all(self.rig.store.has(key) for key in record.keys)

    def the_books_are_right(self) -> None:
        state = self.rig.store._state
        with state.lock:
            state.books.check()
            assert state.books.pinned() == 0
            assert state.unsettled == 0

    def teardown(self) -> None:
        self.rig.quiet()
        self.rig.store.close(20.0)


SEEDS, STEPS = range(6), 25


def drive(folder: Path, seed: int) -> None:
    """AssertionError where store and model differ. ``seed`` names the run."""
    rng, model = random.Random(seed), RecordsModel(folder)
    try:
        for _ in range(STEPS):
            doing = rng.randrange(7)
            if doing == 0:
                model.write_something_else(rng.randrange(100, 10_000))
            elif doing <= 2:
                model.write_record(rng.randrange(CHAINS), "s", rng.choice(BRANCHES), rng.random() < 0.5, rng.randrange(2))
            elif doing == 3:
                model.drop("s", rng.choice(BRANCHES))
            elif doing == 4:
                model.read_all("s")
            elif doing == 5:
                model.write_record_of_what_is_not_there(rng.randrange(CHAINS), "s")
            else:
                model.restart()
            model.what_is_pinned_is_there()
            model.the_books_are_right()
    finally:
        model.teardown()


@pytest.mark.parametrize("seed", SEEDS)
def test_records_are_what_a_dictionary_says(tmp_path: Path, seed: int) -> None:
    drive(tmp_path, seed)


def holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RecordBooks.learn_keys

    def learn_keys(self: RecordBooks, entry: Entry, keys: Sequence[bytes]) -> None:
        real(self, entry, keys)
        self.release(entry.index_key)

    monkeypatch.setattr(RecordBooks, "learn_keys", learn_keys)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "pins hold nothing": holds_nothing,
    "pins are not read at open": lambda patch: patch.setattr(recordchores, "restore_pins", lambda state, walk: None),
    "drops are forgotten": lambda patch: patch.setattr(recordjobs, "drop_record", lambda *what: None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTANTS[name](monkeypatch)
    caught = 0
    for seed in SEEDS:
        try:
            drive(tmp_path / str(seed), seed)
        except AssertionError:
            caught += 1
            break
    assert caught, f"no seed of {SEEDS} notices: {name}"
