"""`kvalet store ls`, `rm`, `gc` and `check` on stores with session records: what is whose, what goes, what stays."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from damagekit import flip
from kvalet.store.ids import ChunkMeta
from kvalet.store.inspect_open import open_to_look
from kvalet.store.inspect_records import OnDisk, Stored, each_record, read_records
from kvalet.store.inspect_walk import list_store
from recordfiles import NOW_NS, put_record, record_of
from storekit import CHUNK_TOKENS, Rig
from storetool import Ran, picture, tool

HOUR_NS = 3600 * 10**9


class House:
    """A store with four conversations: "a" and "b" share two chunks, "c" has a tail only, and one has no record."""

    def __init__(self, directory: Path) -> None:
        with Rig(directory) as rig:
            prompt = rig.chain(2)
            self.a = [*prompt, *rig.chain(2, after=prompt, seed=1, tail=7)]
            self.b = [*prompt, *rig.chain(1, after=prompt, seed=2)]
            self.c = rig.chain(0, tail=9, seed=3)
            self.d = rig.chain(3, seed=4)
            for metas in (self.a, self.b, self.c, self.d):
                rig.write(metas)
            self.paths = {meta.key: rig.path(meta) for metas in (self.a, self.b, self.c, self.d) for meta in metas}
        self.records = {
            "a": put_record(directory, record_of("a", self.a)),
            "b": put_record(directory, record_of("b", self.b, pinned=True)),
            "c": put_record(directory, record_of("c", self.c, ttl_s=3600)),
        }
        self.directory = directory

    def there(self, metas: list[ChunkMeta]) -> list[bool]:
        return [self.paths[meta.key].exists() for meta in metas]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "s")


def rm(house: House, *arguments: str) -> Ran:
    """`--dry-run` first: it must promise the same and change nothing; afterwards the store must be good."""
    before = picture(house.directory)
    dry = tool("rm", house.directory, "--json", "--dry-run", *arguments)
    assert picture(house.directory) == before
    ran = tool("rm", house.directory, "--json", *arguments)
    if ran.status == 0:
        assert {**dry.data, "dry_run": False, "free_bytes": 0} == {**ran.data, "free_bytes": 0}
    checked = tool("check", house.directory, "--json").data
    assert (checked["good"], checked["orphans"]["files"]) == (True, 0)
    return ran


def test_a_store_with_records_is_good_and_they_are_counted(house: House) -> None:
    for arguments in ((), ("--read-data",)):
        ran = tool("check", house.directory, "--json", *arguments)
        assert (ran.status, ran.reasons()) == (0, {})
        assert ran.data["sums"]["records"]["files"] == 3


def test_ls_tells_sessions_and_how_much_of_them_is_there(house: House) -> None:
    house.paths[house.a[3].key].unlink()
    data = tool("ls", house.directory, "--json").data
    sessions = {one["session"]: one for one in data["sessions"]}
    assert list(sessions) == ["a", "b", "c"]
    a, b, c = sessions.values()
    assert (a["tokens"], a["chunks"], a["chunks_on_disk"], a["tail_on_disk"]) == (4 * CHUNK_TOKENS + 7, 4, 3, False)
    assert (b["chunks_on_disk"], b["tail_on_disk"], b["pinned"], b["ttl_s"]) == (3, None, True, None)
    assert (c["chunks"], c["tail_on_disk"], c["pinned"], c["ttl_s"]) == (0, True, False, 3600)
    assert {one["default_tenant"] for one in data["sessions"]} == {True}
    assert {one["last_use"] for one in data["sessions"]} == {NOW_NS / 1e9}
    lines = tool("ls", house.directory).out
    assert "3 of 4, no tail" in lines
    assert "pinned" in lines


def test_names_of_sessions_are_shown_harmlessly(house: House) -> None:
    put_record(house.directory, record_of("\x1b[31m\n../../etc/passwd\0" + "x" * 10_000, house.d))
    lines = tool("ls", house.directory).out
    assert "\x1b" not in lines
    assert "\\x1b[31m\\n../../etc/passwd\\x00xxx" in lines
    assert max(map(len, lines.splitlines())) < 400
    ran = rm(house, "\x1b[31m\n../../etc/passwd\0" + "x" * 10_000)
    assert (ran.status, ran.data["records"]) == (0, 1)
    assert house.there(house.d) == [False] * 3


def test_rm_deletes_what_only_this_session_names(house: House) -> None:
    ran = rm(house, "a")
    assert ran.status == 0
    assert (ran.data["files"], ran.data["shared"], ran.data["followed"], ran.data["records"]) == (4, 2, 0, 1)
    assert house.there(house.a) == [True, True, False, False, False]
    assert house.there([*house.b, *house.c, *house.d]) == [True] * 7
    assert [path.exists() for path in house.records.values()] == [False, True, True]
    again = rm(house, "a")
    assert (again.status, again.data["found"]) == (1, False)


def test_rm_deletes_a_pinned_session_too(house: House) -> None:
    assert rm(house, "b").data["causes"]["session"]["files"] == 2  # its own chunk and its record
    assert house.there(house.b) == [True, True, False]
    rm(house, "a")
    assert house.there(house.a) == [False] * 5


def test_what_goes_on_from_a_session_and_is_nobodys_keeps_it(house: House) -> None:
    """A fork without a record keeps what it needs, and nothing else."""
    with Rig(house.directory) as rig:
        rig.write(rig.chain(1, after=house.a[:3], seed=9))
    ran = rm(house, "a")
    assert ran.data["followed"] == 1
    assert house.there(house.a) == [True, True, True, False, False]


def test_what_the_session_wrote_after_its_last_record_goes_too(house: House) -> None:
    """Chunks beyond the record, and an older tail, have the session's own tokens."""
    with Rig(house.directory) as rig:
        more = rig.chain(2, after=house.a[:4], seed=1, tail=3)
        old_tail = rig.chain(0, after=house.a[:2], seed=1, tail=5)
        assert {result.reason for result in rig.write([*more, *old_tail])} == {""}
        extra = [rig.path(meta) for meta in (*more, *old_tail)]
    assert house.a[2].ids[:5] == old_tail[0].ids
    ran = rm(house, "a")
    assert (ran.status, ran.data["followed"]) == (0, 0)
    assert [path.exists() for path in extra] == [False] * 4
    assert house.there(house.a) == [True, True, False, False, False]


def test_a_record_that_lags_behind_knows_its_chunks_by_its_tokens(house: House) -> None:
    """The record names one chunk of three, but has the ids of all."""
    ids = tuple(token for meta in house.d for token in meta.ids)
    put_record(house.directory, record_of("d", house.d[:1], ids=ids))
    assert rm(house, "d").data["files"] == 4
    assert house.there(house.d) == [False] * 3


def test_what_another_session_goes_on_with_is_that_ones(house: House) -> None:
    """A session that took over the whole of another and went on."""
    with Rig(house.directory) as rig:
        more = rig.chain(2, after=house.d, seed=4)
        rig.write(more)
        house.paths |= {meta.key: rig.path(meta) for meta in more}
    put_record(house.directory, record_of("first", house.d))
    put_record(house.directory, record_of("second", [*house.d, *more]))
    ran = rm(house, "first")
    assert (ran.data["files"], ran.data["shared"]) == (1, 3)
    assert house.there([*house.d, *more]) == [True] * 5
    assert rm(house, "second").data["files"] == 6
    assert house.there([*house.d, *more]) == [False] * 5


def test_all_branches_of_a_session_go(house: House) -> None:
    put_record(house.directory, record_of("a", house.d, branch="00000000000000b2"))
    ran = rm(house, "a")
    assert (ran.data["records"], ran.data["files"]) == (2, 8)
    assert house.there(house.d) == [False] * 3


def test_tenants_are_told_apart(house: House) -> None:
    path = put_record(house.directory, record_of("x", house.d, tenant="bob"))
    ran = rm(house, "x")
    assert (ran.status, ran.data["other_tenants"]) == (1, 1)
    assert "other tenants with one of that name: 1" in tool("rm", house.directory, "x").out
    sessions = {one["session"]: one["default_tenant"] for one in tool("ls", house.directory, "--json").data["sessions"]}
    assert sessions == {"a": True, "b": True, "c": True, "x": False}
    assert path.exists()
    assert rm(house, "x", "--tenant", "bob").data["files"] == 4


def test_without_the_secret_no_session_can_be_named(house: House) -> None:
    (house.directory / "SECRET").unlink()
    ran = tool("rm", house.directory, "a")
    assert (ran.status, ran.out) == (2, "")
    assert "SECRET" in ran.err
    assert house.there(house.a) == [True] * 5
    assert not (house.directory / "SECRET").exists()


RECORD_DAMAGE = {
    "header": (lambda path: flip(path, 60), "header", True),
    "map": (lambda path: flip(path, 300), "payload", False),
    "keys": (lambda path: flip(path, path.stat().st_size - 1), "payload", False),
    "short": (lambda path: os.truncate(path, path.stat().st_size - 1), "size", True),
    "long": (lambda path: os.truncate(path, path.stat().st_size + 1), "size", True),
    "empty": (lambda path: os.truncate(path, 0), "size", True),
    "huge": (lambda path: os.truncate(path, 1 << 40), "size", True),
}


@pytest.mark.parametrize("name", RECORD_DAMAGE)
def test_a_damaged_record_is_named_costs_no_chunk_and_can_be_removed(house: House, name: str) -> None:
    damage, reason, at_once = RECORD_DAMAGE[name]
    damage(house.records["a"])
    path = str(house.records["a"].relative_to(house.directory))
    ran = tool("check", house.directory, "--read-data", "--json")
    assert {key: found[0] for key, found in ran.reasons().items()} == {path: reason}
    assert ran.data["behind_bad"] == ran.data["orphans"]["files"] == 0
    assert tool("check", house.directory, "--json").status == int(at_once)
    assert tool("ls", house.directory, "--json").data["unread_records"] == 1
    removed = tool("rm", house.directory, "--json", "a")
    assert (removed.status, removed.data["unread_records"], removed.data["files"]) == (0, 1, 1)
    assert house.there(house.a) == [True] * 5
    assert not house.records["a"].exists()


def test_records_under_the_wrong_name_are_named(house: House) -> None:
    a, b, c = (house.records[name] for name in "abc")
    pinned = a.with_name(a.name[:-1] + "p")
    a.rename(pinned)
    other = b.with_name(b.name.replace(".00000000000000b1.", ".00000000000000b2."))
    b.rename(other)
    wrong_session = c.with_name(c.name[:2] + "0" * 30 + c.name[32:])
    c.rename(wrong_session)
    quick = tool("check", house.directory, "--json").reasons()
    whole = tool("check", house.directory, "--json", "--read-data").reasons()
    names = {str(path.relative_to(house.directory)): path for path in (pinned, other, wrong_session)}
    assert set(whole) == set(names)
    assert {reason for reason, _ in whole.values()} == {"key"}
    assert quick == {path: found for path, found in whole.items() if names[path] != other}


def test_gc_keeps_what_is_pinned_and_deletes_what_has_expired(house: House) -> None:
    now = time.time_ns()
    for name, age in (("a", 0), ("b", 0), ("c", 2)):
        record_age(house, name, now - age * HOUR_NS)
    ran = tool("gc", house.directory, "--json")
    assert ran.data["causes"] == {"expired": {"files": 1, "bytes": 4096}}
    assert house.there(house.c) == [True]
    ran = tool("gc", house.directory, "--json", "--cap", "0")
    assert house.there(house.b) == [True] * 3
    assert house.there([*house.a[2:], *house.c, *house.d]) == [False] * 7
    assert (ran.status, house.records["b"].exists()) == (0, True)


def test_a_pinned_record_outlives_its_time(house: House) -> None:
    house.records["b"].unlink()
    put_record(house.directory, record_of("b", house.b, pinned=True, ttl_s=1, last_use_ns=10**18))
    house.records["c"].unlink()  # has expired
    assert tool("gc", house.directory, "--json").data["causes"] == {}
    assert tool("gc", house.directory, "--json", "--cap", "0").data["causes"].keys() == {"cap"}
    assert house.there(house.b) == [True] * 3


def test_gc_for_age_deletes_old_records_but_no_pinned_ones(house: House) -> None:
    now = time.time_ns()
    record_age(house, "a", now - 5 * HOUR_NS)
    record_age(house, "b", now - 5 * HOUR_NS)
    record_age(house, "c", now)
    tool("gc", house.directory, "--older-than", "1h")
    assert [path.exists() for path in house.records.values()] == [False, True, True]


def record_age(house: House, name: str, then_ns: int) -> None:
    """Writes the record again as of ``then_ns``."""
    with open_to_look(str(house.directory)) as place:
        stored = [one for one in each_record(place, list_store(place).files) if isinstance(one, Stored)]
    record = next(one.record for one in stored if one.record.session == name)
    put_record(house.directory, dataclasses.replace(record, last_use_ns=then_ns))


def test_a_tail_that_a_record_names_is_not_dead(house: House) -> None:
    with Rig(house.directory) as rig:
        rig.write(rig.chain(1, after=house.a[:4], seed=1))
    house.records["c"].unlink()  # has expired
    assert tool("gc", house.directory, "--json").data["causes"] == {}
    house.records["a"].unlink()
    assert tool("gc", house.directory, "--json").data["causes"]["dead_tail"]["files"] == 1


def test_a_record_may_be_there_twice_while_its_name_changes(house: House) -> None:
    """A server renames the new one into place, then unlinks the old: no alarm in between."""
    put_record(house.directory, record_of("a", house.a, pinned=True))
    assert tool("check", house.directory, "--read-data").status == 0


def test_presence_counts_from_token_0_without_a_gap(house: House) -> None:
    with open_to_look(str(house.directory)) as place:
        listing = list_store(place)
        a = next(one for one in read_records(place, listing.files)[0] if one.session == "a")
    for gap in range(4):
        missing = house.a[gap].key
        on_disk = OnDisk(found for found in listing.files if found.file.index_key != missing)
        presence = on_disk.presence(a)
        assert (presence.chunks, presence.of, presence.tail) == (gap, 4, False)
    assert OnDisk([]).tag(a) == ""
