"""`kvalet store gc`: deletes what is of no use, the deepest first, keeps what is left closed under ancestors, and says what."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from damagekit import flip, replace_by
from kvalet.api.store_change import gc_plan
from kvalet.store import inspect_remove
from kvalet.store.errors import StoreRefused
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.ids import ChunkMeta, Identity
from kvalet.store.inspect_check import CheckPlan, examine_all
from kvalet.store.inspect_gc import Cause, GcOptions, Keep, Removal, plan
from kvalet.store.inspect_open import Place, open_to_change, open_to_look
from kvalet.store.inspect_remove import Removed, remove
from kvalet.store.inspect_tree import MISSING, dead_tails, parents_of_tails, unreachable
from kvalet.store.inspect_walk import list_store
from recordfiles import put_record, record_of
from storekit import FILE_BYTES, Rig
from storetool import Ran, picture, tool

SECOND = 10**9


def gc(directory: Path, *arguments: str) -> Ran:
    """`--dry-run` first: it must promise the same and change nothing."""
    before = picture(directory)
    dry = tool("gc", directory, "--json", "--dry-run", *arguments)
    assert picture(directory) == before
    ran = tool("gc", directory, "--json", *arguments)
    if ran.status == 0:
        assert dry.data["causes"] == ran.data["causes"]
    assert tool("check", directory, "--json").data["orphans"]["files"] == 0
    return ran


def age(path: Path, seconds: int) -> None:
    """Last used so long ago."""
    then = path.stat().st_mtime_ns - seconds * SECOND
    os.utime(path, ns=(then, then))


def left(rig: Rig, metas: list[ChunkMeta]) -> list[bool]:
    """Which of ``metas`` can still be read, every byte compared."""
    return [rig.store.has(meta.key) and rig.read(meta) == "" for meta in metas]


def test_a_good_store_loses_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3, tail=5)
        rig.write(metas)
    ran = gc(tmp_path / "s")
    assert (ran.status, ran.data["files"], ran.data["causes"]) == (0, 0, {})
    with Rig(tmp_path / "s") as rig:
        assert left(rig, metas[:3]) == [True] * 3
        assert len(rig.store.tails(bytes(metas[2].key))) == 1


def test_leftovers_refused_and_unreachable_files_go_and_foreign_ones_stay(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas, other = rig.chain(4, tail=5), rig.chain(3, seed=1)
        rig.write([*metas, *other])
        flip(rig.path(metas[1]), 300)
        path = rig.path(other[2])
        replace_by("symlink", path, tmp_path / "nothing")
    for name in ("12.3.0123456789abcdef", "notes.txt"):
        (tmp_path / "s" / "tmp" / name).write_bytes(b"x")
    for name in (f"{7:020d}.{'a' * 64}.0.{'b' * 8}", "note"):
        (tmp_path / "s" / "bad" / name).write_bytes(b"x")
    ran = gc(tmp_path / "s")
    assert {name: one["files"] for name, one in ran.data["causes"].items()} == {
        "leftover": 1,
        "aside": 1,
        "refused": 1,
        "unreachable": 3,  # two chunks and the tail
    }
    assert os.listdir(tmp_path / "s" / "tmp") == ["notes.txt"]
    assert os.listdir(tmp_path / "s" / "bad") == ["note"]
    assert path.is_symlink()
    with Rig(tmp_path / "s") as rig:
        assert left(rig, [*metas[:4], *other]) == [True, False, False, False, True, True, False]
        assert rig.store.found.files == 3


def test_wrong_payloads_go_only_when_asked_for(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3)
        rig.write(metas)
        flip(rig.path(metas[2]), FILE_BYTES - 1)
    assert gc(tmp_path / "s").data["causes"] == {}
    assert gc(tmp_path / "s", "--read-data").data["causes"] == {"refused": {"files": 1, "bytes": FILE_BYTES}}


def test_the_cap_takes_the_least_used_and_deepest(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        old, new = rig.chain(4), rig.chain(3, seed=1)
        rig.write([*old, *new])
        paths = [rig.path(meta) for meta in old]
    for path in paths:
        age(path, 1000)
    ran = gc(tmp_path / "s", "--cap", str(5 * FILE_BYTES))
    assert ran.data["causes"] == {"cap": {"files": 2, "bytes": 2 * FILE_BYTES}}
    with Rig(tmp_path / "s") as rig:
        assert left(rig, [*old, *new]) == [True, True, False, False, True, True, True]
    assert gc(tmp_path / "s", "--cap", "0").data["files"] == 5
    assert tool("ls", tmp_path / "s", "--json").data["files"] == 0


def test_the_cap_of_gc_is_the_cap_of_a_server(tmp_path: Path) -> None:
    """The same victims as a server that opens the same store with the same cap."""
    stores = (tmp_path / "a", tmp_path / "b")
    kept = []
    for store in stores:
        with Rig(store) as rig:
            metas = [meta for seed in range(4) for meta in rig.chain(3, seed=seed, secret=b"s" * 32)]
            rig.write(metas)
            for number, meta in enumerate(metas):
                then = (number // 3 * 7 % 4 + 100) * SECOND  # one time for each conversation, as a server sets it
                os.utime(rig.path(meta), ns=(then, then))
    gc(stores[0], "--cap", str(5 * FILE_BYTES))
    for store in stores:
        with Rig(store, cap_bytes=5 * FILE_BYTES) as rig:
            rig.quiet()
            kept.append([rig.store.has(meta.key) for meta in metas])
    assert kept[0] == kept[1]
    assert sum(kept[0]) == 5


def test_what_is_old_goes_unless_something_younger_follows_it(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas, other = rig.chain(4, tail=5), rig.chain(2, seed=1)
        rig.write([*metas, *other])
        for meta in [*metas[:2], *metas[3:], *other]:
            age(rig.path(meta), 86_400)
    ran = gc(tmp_path / "s", "--older-than", "1h")
    assert ran.data["causes"]["old"]["files"] == 4  # a chunk and the tail at the end; the other conversation
    with Rig(tmp_path / "s") as rig:
        assert left(rig, [*metas[:4], *other]) == [True, True, True, False, False, False]


def test_other_identities_go_only_when_asked_for(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3, tail=4)
        rig.write(metas)
    with Rig(tmp_path / "s", identity=Identity.of({"weights": "v"})) as rig:
        new = rig.chain(2)
        rig.write(new)
    assert gc(tmp_path / "s").data["files"] == 0
    assert gc(tmp_path / "s", "--identity-other").data["causes"]["identity"]["files"] == 4
    with Rig(tmp_path / "s", identity=Identity.of({"weights": "v"})) as rig:
        assert left(rig, new) == [True, True]
        assert rig.store.found.files == 2
    (tmp_path / "s" / "IDENTITY").unlink()
    ran = tool("gc", tmp_path / "s", "--identity-other")
    assert (ran.status, ran.out) == (2, "")
    assert "IDENTITY" in ran.err


def test_a_tail_is_dead_only_if_something_longer_begins_with_it(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        base = rig.chain(1)
        long, short = rig.chain(0, after=base, tail=20)[0], rig.chain(0, after=base, tail=6)[0]
        fork = rig.chain(0, after=base, tail=7, seed=3)[0]
        first = rig.chain(0, tail=9)[0]  # at token 0, where nobody can tell whose it is
        rig.write([*base, long, short, fork, first])
        tails = {meta.key: rig.path(meta).name for meta in (long, short, fork, first)}
    with open_to_look(str(tmp_path / "s")) as place:
        files = list_store(place).files
        verdicts = examine_all(place, files, CheckPlan(), ids_after=parents_of_tails(files))
        assert [found.file.name for found in dead_tails(verdicts)] == [tails[short.key]]
        kept = plan(list_store(place), verdicts, {}, GcOptions(), Keep(named=frozenset({short.key[:8]})))
        assert kept == []
    assert gc(tmp_path / "s").data["causes"]["dead_tail"]["files"] == 1
    with Rig(tmp_path / "s") as rig:
        whole = rig.chain(1, after=base)  # a chunk that begins with the long tail: now that one is dead too
        rig.write(whole)
    assert gc(tmp_path / "s").data["causes"]["dead_tail"]["files"] == 1
    names = {path.name for path in (tmp_path / "s" / "t").rglob("*") if path.is_file()}
    assert names == {tails[fork.key], tails[first.key]}


def test_pinned_files_go_only_if_they_are_refused(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        pinned, other = rig.chain(3), rig.chain(3, seed=1)
        rig.write([*pinned, *other])
        rig.path(pinned[1]).unlink()
    keep = Keep(pinned=frozenset(meta.key[:8] for meta in pinned))
    with open_to_look(str(tmp_path / "s")) as place:
        listing = list_store(place)
        verdicts = examine_all(place, listing.files, CheckPlan())
        lost = unreachable(listing.files, verdicts)
        assert list(lost.values()) == [MISSING]
        for options in (GcOptions(cap_bytes=0), GcOptions(before_ns=1 << 62), GcOptions(identity=b"none")):
            removals = plan(listing, verdicts, lost, options, keep)
            assert {removal.key for removal in removals} == {meta.key for meta in other}, options


@pytest.mark.parametrize("seed", range(6))
def test_after_every_single_deletion_what_is_left_is_closed(tmp_path: Path, seed: int) -> None:
    """Random trees, ages and caps: wherever somebody interrupts, no file's parent is missing."""
    rng = random.Random(seed)
    with Rig(tmp_path / "s", sync="none") as rig:
        metas: list[ChunkMeta] = []
        branches: list[list[ChunkMeta]] = [[]]
        for number in range(8):
            after = rng.choice(branches)
            new = rig.chain(rng.randrange(1, 4), after=after, seed=number, tail=rng.randrange(0, 20))
            branches.append([*after, *(meta for meta in new if not meta.tail)])
            metas += new
        rig.write(metas)
        for meta in metas:
            age(rig.path(meta), rng.randrange(10_000))
    options = GcOptions(rng.randrange(12) * FILE_BYTES, None if seed % 2 else 1 << 62)
    keys = {meta.key: meta for meta in metas}
    with open_to_change(str(tmp_path / "s")) as place:
        listing = list_store(place)
        verdicts = examine_all(place, listing.files, CheckPlan())
        present = {verdict.facts.key for verdict in verdicts if verdict.facts}
        removals = plan(listing, verdicts, {}, options, Keep())
        assert removals, f"seed {seed}"
        for removal in removals:
            present.discard(removal.key)
            for key in present:
                meta = keys[key]  # type: ignore[index]
                assert meta.ordinal == 0 or meta.parent in present, f"seed {seed}: {removal}"
        remove(place, removals, Removed())
    assert tool("check", tmp_path / "s", "--json").data["files"] == len(present)


def test_an_interrupted_gc_says_what_it_did_and_leaves_a_good_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(5)
        rig.write(metas)
    calls = []
    unlink = inspect_remove._unlink

    def interrupted(place: Place, removal: Removal) -> None:
        calls.append(removal)
        if len(calls) == 3:
            raise KeyboardInterrupt
        unlink(place, removal)

    monkeypatch.setattr(inspect_remove, "_unlink", interrupted)
    ran = tool("gc", tmp_path / "s", "--cap", "0")
    assert (ran.status, ran.out) == (130, "")
    assert "deleted 2 files" in ran.err
    assert ran.err.endswith("interrupted\n")
    with Rig(tmp_path / "s") as rig:
        assert left(rig, metas) == [True, True, True, False, False]


def test_what_cannot_be_deleted_keeps_its_ancestors(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas, other = rig.chain(3), rig.chain(2, seed=1)
        rig.write([*metas, *other])
    io = FaultIO(Fault("unlink", nth=1, kind="errno"))
    with open_to_change(str(tmp_path / "s"), io) as place:
        listing = list_store(place)
        verdicts = examine_all(place, listing.files, CheckPlan())
        removals = plan(listing, verdicts, {}, GcOptions(cap_bytes=0), Keep())
        assert removals[0].key == metas[2].key
        io.arm()
        removed = remove(place, removals, Removed())
    assert io.fired == 1
    assert (removed.files, removed.kept, len(removed.failed)) == ({Cause.CAP: 2}, 2, 1)
    with Rig(tmp_path / "s") as rig:
        assert left(rig, metas) == [True] * 3


def test_a_disk_that_cannot_be_read_costs_nothing_but_that_file(tmp_path: Path) -> None:
    """A file with an I/O error may be good: neither it nor what follows it is deleted."""
    io = FaultIO(Fault("preadv", nth=1, kind="errno"))
    with Rig(tmp_path / "s") as rig:
        rig.write(rig.chain(3))
    with open_to_look(str(tmp_path / "s"), io) as place:
        listing = list_store(place)
        io.arm()
        verdicts = examine_all(place, listing.files, CheckPlan(threads=1))
        assert io.fired == 1
        assert sorted(verdict.reason for verdict in verdicts) == ["", "", "io"]
        lost = unreachable(listing.files, verdicts)
        assert plan(listing, verdicts, lost, GcOptions(), Keep()) == []


def test_a_record_that_cannot_be_read_now_stops_who_deletes(tmp_path: Path) -> None:
    """It may be pinned: what it names must not look like nobody's. A damaged one protects nothing, as in a server."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas)
    path = put_record(tmp_path / "s", record_of("a", metas, pinned=True))
    for code in (errno.EIO, errno.EMFILE):
        io = FaultIO(Fault("preadv", nth=3, code=code, sticky=True))  # after the headers of both chunks
        with open_to_change(str(tmp_path / "s"), io) as place:
            io.arm()
            with pytest.raises(StoreRefused, match="what is whose cannot be told"):
                gc_plan(place, GcOptions(cap_bytes=0))
        assert io.fired
    assert gc(tmp_path / "s", "--cap", "0").data["causes"] == {}
    flip(path, 60)
    assert gc(tmp_path / "s", "--cap", "0").data["causes"]["cap"]["files"] == 2


@pytest.mark.parametrize("name", ["STORE", "LOCK"])
def test_a_store_that_no_server_would_open_is_refused(tmp_path: Path, name: str) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.write(rig.chain(1))
    (tmp_path / "s" / name).unlink()
    if name == "LOCK":
        (tmp_path / "elsewhere").write_bytes(b"z")
        (tmp_path / "s" / name).symlink_to(tmp_path / "elsewhere")
    before = picture(tmp_path)
    ran = tool("gc", tmp_path / "s", "--cap", "0")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvalet store gc: The ")
    assert picture(tmp_path) == before
