"""`kvalet store` and running states (kind 3), which follow chunks and tails, beside the session records that name them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from damagekit import flip
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.ids import ChunkMeta
from kvalet.store.inspect_check import surely_orphan
from kvalet.store.inspect_open import open_to_look
from kvalet.store.inspect_walk import list_store
from recordkit import RecordRig, record_of, state_bytes, state_meta
from storetool import Ran, tool

STATE_BYTES = 5000


class House:
    """One session: three chunks, a tail; a state after the second chunk and one of two parts after the tail; a record."""

    def __init__(self, directory: Path, **fields: bool) -> None:
        self.directory = directory
        with RecordRig(directory, bytes_per_day=1 << 30) as rig:
            self.metas = rig.chain(3, tail=5)
            assert {result.reason for result in rig.write(self.metas)} == {""}
            ends = [(self.metas[1], 0, 1), (self.metas[3], 0, 2), (self.metas[3], 1, 2)]
            self.states = [state_meta(rig.secret, after, STATE_BYTES, part, parts) for after, part, parts in ends]
            assert [rig.put_state(state, state_bytes(state)) for state in self.states] == [""] * 3
            keys = tuple(state.key for state in self.states)
            assert rig.put(record_of(self.metas, session="a", tenant="", state_keys=keys, **fields)) == ""
            self.files = {meta.key: rig.path(meta) for meta in self.metas}
            self.files |= {state.key: next((directory / "s").glob(f"*/{state.key.hex()}.*")) for state in self.states}

    def there(self, metas: list[ChunkMeta]) -> list[bool]:
        return [self.files[meta.key].exists() for meta in metas]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "s")


def check(house: House) -> Ran:
    return tool("check", house.directory, "--read-data", "--json")


def test_states_and_records_that_a_store_wrote_are_good(house: House) -> None:
    ran = check(house)
    assert (ran.status, ran.reasons()) == (0, {})
    kinds = {kind: one["files"] for kind, one in ran.data["sums"].items()}
    assert kinds == {"chunks": 3, "tails": 1, "states": 3, "records": 1}
    assert ran.data["sums"]["states"]["bytes"] == 3 * (BLOCK_BYTES + 2 * BLOCK_BYTES)
    session = tool("ls", house.directory, "--json").data["sessions"][0]
    assert (session["session"], session["chunks_on_disk"], session["tail_on_disk"]) == ("a", 3, True)


@pytest.mark.parametrize(("offset", "reason"), [(60, "header"), (BLOCK_BYTES + 7, "payload"), (3 * BLOCK_BYTES - 1, "payload")])
def test_a_damaged_state_is_named_and_hurts_nobody(house: House, offset: int, reason: str) -> None:
    path = house.files[house.states[0].key]
    flip(path, offset)
    ran = check(house)
    assert {key: found[0] for key, found in ran.reasons().items()} == {str(path.relative_to(house.directory)): reason}
    assert ran.data["behind_bad"] == ran.data["orphans"]["files"] == 0


def test_a_state_in_the_wrong_place_is_named(house: House) -> None:
    path, other = (house.files[state.key] for state in house.states[1:])
    path.write_bytes(other.read_bytes())
    assert check(house).reasons() == {str(path.relative_to(house.directory)): ("key", "key")}
    path.write_bytes(house.files[house.metas[0].key].read_bytes())
    assert list(check(house).reasons().values()) == [("key", "kind")]


def test_states_after_something_missing_or_bad_cannot_be_reached(house: House) -> None:
    tail = house.files[house.metas[3].key]
    data = tail.read_bytes()
    flip(tail, 300)
    assert check(house).data["behind_bad"] == 2
    tail.unlink()
    assert check(house).data["orphans"]["files"] == 2
    tail.write_bytes(data)
    tail.chmod(0o600)
    house.files[house.metas[1].key].unlink()
    ran = check(house)
    assert (ran.status, ran.data["orphans"]["files"]) == (0, 5)  # a chunk, the tail, three states
    assert tool("gc", house.directory, "--json").data["causes"]["unreachable"]["files"] == 5
    assert house.there(house.metas) == [True, False, False, False]


def test_an_orphaned_state_is_looked_at_again(house: House) -> None:
    """Its tail, or its chunk, may have been written since the names were listed."""
    with open_to_look(str(house.directory)) as place:
        files = {found.file.index_key: found for found in list_store(place).files}
        for state, parent in ((house.states[0], house.metas[1]), (house.states[1], house.metas[3])):
            assert not surely_orphan(place, files[state.key], bytes(parent.key))
            house.files[parent.key].unlink()
            assert surely_orphan(place, files[state.key], bytes(parent.key))
            house.files[state.key].unlink()
            assert not surely_orphan(place, files[state.key], bytes(parent.key))


def test_gc_takes_states_before_what_they_follow(house: House) -> None:
    total = tool("ls", house.directory, "--json").data["bytes"]
    ran = tool("gc", house.directory, "--json", "--cap", str(total - 1))
    assert ran.data["files"] == 1
    assert house.there(house.metas) == [True] * 4
    assert check(house).data["orphans"]["files"] == 0
    for files in (5, 3, 1):
        tool("gc", house.directory, "--cap", str(files * 3 * BLOCK_BYTES))
        assert check(house).data["orphans"]["files"] == 0
    ran = tool("gc", house.directory, "--json", "--cap", "0")
    assert tool("ls", house.directory, "--json").data["files"] == 0, "a record whose chain is gone goes, too"


def test_gc_leaves_a_pinned_session_whole_and_so_does_the_next_server(tmp_path: Path) -> None:
    house = House(tmp_path / "s", pinned=True)
    for arguments in (("--cap", "0"), ("--older-than", "0s"), ("--identity-other",)):
        assert tool("gc", house.directory, "--json", *arguments).data["causes"] == {}
    with RecordRig(tmp_path / "s") as rig:
        assert [rig.read(meta) for meta in house.metas[:3]] == [""] * 3
        assert [rig.get_state(state) for state in house.states] == [("", state_bytes(state)) for state in house.states]
        assert rig.get(session="a", tenant="").reason == ""


def test_a_tail_that_a_state_follows_is_not_dead(house: House) -> None:
    next((house.directory / "r").glob("*/*")).unlink()
    with RecordRig(house.directory) as rig:
        rig.write(rig.chain(1, after=house.metas[:3]))
    assert tool("gc", house.directory, "--json").data["causes"] == {}
    for state in house.states[1:]:
        house.files[state.key].unlink()
    assert tool("gc", house.directory, "--json").data["causes"]["dead_tail"]["files"] == 1


def test_rm_takes_states_along_also_those_that_no_record_names(house: House) -> None:
    with RecordRig(house.directory) as rig:
        extra = state_meta(rig.secret, house.metas[0], STATE_BYTES)
        assert rig.put_state(extra, state_bytes(extra)) == ""
    ran = tool("rm", house.directory, "--json", "a")
    assert (ran.data["files"], ran.data["followed"], ran.data["shared"]) == (9, 0, 0)
    assert tool("ls", house.directory, "--json").data["files"] == 0


def test_export_holds_states(house: House, tmp_path: Path) -> None:
    assert tool("export", house.directory, "a", "-o", str(tmp_path / "a.tar")).status == 0
    with tarfile.open(tmp_path / "a.tar") as tar:
        names = tar.getnames()
    assert sum(name.startswith("s/") for name in names) == 3
    assert names[:-1] == sorted(names[:-1])


def test_a_record_that_changed_its_name_when_the_server_was_killed_counts_once(house: House) -> None:
    record = next((house.directory / "r").glob("*/*"))
    data, other = record.read_bytes(), record.with_name(record.name[:-1] + "p")
    with RecordRig(house.directory) as rig:
        stored = rig.get(session="a", tenant="").record
        assert stored is not None
        keys = tuple(state.key for state in house.states)
        rig.put(record_of(house.metas, session="a", tenant="", state_keys=keys, pinned=True))
        rig.quiet()
    assert other.exists()
    record.write_bytes(data)
    record.chmod(0o600)
    ran = check(house)
    assert (ran.status, ran.data["sums"]["records"]["files"]) == (0, 2)
    assert len(tool("ls", house.directory, "--json").data["sessions"]) == 1
    assert tool("gc", house.directory, "--json").data["causes"]["replaced"]["files"] == 1
    assert record.exists() != other.exists()
