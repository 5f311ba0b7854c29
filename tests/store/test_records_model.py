"""Records against a dictionary: any sequence of calls and restarts on a real directory (hypothesis state machine, H5)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvalet.store.ids import ChunkMeta
from kvalet.store.record import Record
from recordkit import RecordRig, record_of
from storekit import FILE_BYTES

CHAINS = 3
BRANCHES = ("0" * 16, "1" * 16)
SESSIONS = ("s", "t")


class RecordsModel(RuleBasedStateMachine):
    """``model``: what the last acknowledged record of each (session, branch) is. The cap holds about ten chunks, so chunks
    come and go; records and what pinned ones name must not."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvalet-records-"))
        self.model: dict[tuple[str, str], Record] = {}
        self.let_go: set[tuple[str, str]] = set()
        self.open()

    def open(self) -> None:
        self.rig = RecordRig(self.folder / "s", cap_bytes=10 * FILE_BYTES, readers=1, writers=2, committers=1)
        self.chains = [self.rig.chain(2, tail=3, seed=seed) for seed in range(CHAINS)]

    def present(self, number: int) -> list[ChunkMeta]:
        """What is there of the chain, from its beginning on."""
        metas = self.chains[number]
        n = next((i for i, meta in enumerate(metas) if not self.rig.store.has(meta.key)), len(metas))
        return metas[:n]

    @rule(number=st.integers(0, CHAINS - 1))
    def write_chain(self, number: int) -> None:
        assert {one.reason for one in self.rig.write(self.chains[number])} <= {"", "full", "ancestor"}

    @rule(seed=st.integers(100, 10_000))
    def write_something_else(self, seed: int) -> None:
        assert self.rig.write(self.rig.chain(1, seed=seed))[0].reason in ("", "full")

    @rule(
        number=st.integers(0, CHAINS - 1),
        session=st.sampled_from(SESSIONS),
        branch=st.sampled_from(BRANCHES),
        pinned=st.booleans(),
        after=st.integers(0, 5),
    )
    def write_record(self, number: int, session: str, branch: str, pinned: bool, after: int) -> None:
        record = record_of(self.present(number), session=session, branch=branch, pinned=pinned, after=after)
        reason = self.rig.put(record)
        assert reason in ("", "full")
        if not reason:
            self.model[session, branch] = record
            self.let_go.discard((session, branch))
        elif not pinned:
            self.let_go.add((session, branch))  # the wish to unpin is heard without a record of it, until a restart

    @rule(number=st.integers(0, CHAINS - 1), session=st.sampled_from(SESSIONS))
    def write_record_of_what_is_not_there(self, number: int, session: str) -> None:
        metas = self.chains[number]
        if len(self.present(number)) < len(metas):
            assert self.rig.put(record_of(metas, session=session, branch=BRANCHES[0])) == "missing"

    @rule(session=st.sampled_from(SESSIONS), branch=st.sampled_from(BRANCHES))
    def drop(self, session: str, branch: str) -> None:
        self.rig.drop(branch, session)
        self.model.pop((session, branch), None)

    @precondition(lambda self: self.model)
    @rule()
    def restart(self) -> None:
        self.rig.quiet()
        self.rig.store.close(20.0)
        self.open()
        assert {name for name, record in self.model.items() if record.pinned} <= {
            (session, branch) for session in SESSIONS for branch in self.rig.branches(session)
        }

    @rule(session=st.sampled_from(SESSIONS), branch=st.sampled_from(BRANCHES))
    def read(self, session: str, branch: str) -> None:
        found = self.rig.get(branch, session)
        expected = self.model.get((session, branch))
        if found.record is None:  # evicted, once nothing of its chain was left; never while pinned
            assert found.reason == "missing"
            assert expected is None or not expected.pinned
            self.model.pop((session, branch), None)
        else:
            assert found.record == expected

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        assert self.rig.store._state.lost_pins == 0
        for name, record in self.model.items():
            if record.pinned and name not in self.let_go:
                assert all(self.rig.store.has(key) for key in record.keys)

    @invariant()
    def the_books_are_right(self) -> None:
        state = self.rig.store._state
        with state.lock:
            state.books.check()
            assert state.books.pinned() == 0
            assert state.unsettled == 0

    def teardown(self) -> None:
        self.rig.quiet()
        self.rig.store.close(20.0)
        shutil.rmtree(self.folder)


RecordsModel.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestRecordsModel = RecordsModel.TestCase
