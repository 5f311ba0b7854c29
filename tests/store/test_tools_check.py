"""F-S1: `kvalet store check` names every bad file with its reason, ends with the right status, and changes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from damagekit import DAMAGE, flip, replace_by
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.header import digest
from kvalet.store.ids import ChunkMeta, Identity, tenant_secret
from storekit import FILE_BYTES, IDENTITY, Rig
from storetool import Ran, picture, tool

Filled = tuple[list[ChunkMeta], dict[bytes, str]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Filled]:
    """Two conversations with tails, closed; their metas and the path of each, relative to the store."""
    directory = tmp_path_factory.mktemp("original") / "s"
    with Rig(directory) as rig:
        metas = [*rig.chain(3, tail=5), *rig.chain(2, seed=1, tail=20)]
        assert {result.reason for result in rig.write(metas)} == {""}
        paths = {bytes(meta.key): str(rig.path(meta).relative_to(directory)) for meta in metas}
    return directory, (metas, paths)


@pytest.fixture
def filled(original: tuple[Path, Filled], tmp_path: Path) -> Filled:
    """A copy of it in ``tmp_path / "s"``."""
    shutil.copytree(original[0], tmp_path / "s")
    return original[1]


def checked(directory: Path, *arguments: str) -> Ran:
    """`check --json`, which must leave everything as it was; the lines for people must have the same status."""
    before = picture(directory)
    ran = tool("check", directory, "--json", *arguments)
    assert tool("check", directory, *arguments).status == ran.status
    assert picture(directory) == before
    return ran


@pytest.mark.parametrize("arguments", [(), ("--read-data",)])
def test_a_good_store_is_good(tmp_path: Path, filled: Filled, arguments: tuple[str, ...]) -> None:
    metas, _ = filled
    ran = checked(tmp_path / "s", *arguments)
    assert (ran.status, ran.reasons(), ran.err) == (0, {}, "")
    n_bytes = sum(BLOCK_BYTES * (1 + meta.n_pages) for meta in metas)
    data = ran.data
    assert (data["files"], data["checked"], data["bytes"]) == (7, 7, n_bytes)
    assert data["read_bytes"] == (n_bytes if arguments else 7 * BLOCK_BYTES)
    assert data["sums"]["chunks"]["files"] == 5
    assert data["identities"] == {IDENTITY.digest.hex(): {"files": 7, "bytes": n_bytes, "current": True}}
    assert tool("check", tmp_path / "s", *arguments).out.endswith("\ngood\n")


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("which", [1, 3], ids=["chunk", "tail"])
def test_each_damage_is_named(tmp_path: Path, filled: Filled, name: str, which: int) -> None:
    """With --read-data all of them; without, all but those of payloads."""
    metas, paths = filled
    meta, (damage, reason) = metas[which], DAMAGE[name]
    path = paths[bytes(meta.key)]
    good = (tmp_path / "s" / path).read_bytes()
    (tmp_path / "s" / path).write_bytes(good.ljust(FILE_BYTES, b"\0"))  # the damages are made for whole chunks
    damage(tmp_path / "s" / path)
    if len(good) < FILE_BYTES and reason == "payload":
        reason = "size"
    ran = checked(tmp_path / "s", "--read-data")
    if reason == "missing":
        orphans = {1: 2, 3: 0}[which]  # the chunk and the tail after it
        assert (ran.status, ran.reasons(), ran.data["orphans"]["files"]) == (0, {}, orphans)
        return
    assert ran.status == 1
    assert {path: found[0] for path, found in ran.reasons().items()} == {path: reason}
    assert ran.data["behind_bad"] == {1: 2, 3: 0}[which]
    quick = checked(tmp_path / "s")
    assert quick.status == (0 if reason == "payload" else 1)
    assert path in tool("check", tmp_path / "s", "--read-data").out


def test_good_files_in_wrong_places_are_named(tmp_path: Path, filled: Filled) -> None:
    """B4 for the checker: under another key, in the wrong shard, of another tenant, position, parent."""
    metas, paths = filled
    root = tmp_path / "s"
    chunk, other, tail, other_tail = (paths[bytes(metas[i].key)] for i in (0, 4, 3, 6))
    shutil.copyfile(root / chunk, root / other)
    shutil.copyfile(root / other_tail, root / tail)
    lost = root / "c" / ("00" if chunk[2:4] != "00" else "01") / Path(chunk).name
    lost.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(root / chunk, lost)
    ranked = root / paths[bytes(metas[2].key)]
    renamed = ranked.with_name(ranked.name.replace(".2.", ".7."))
    ranked.rename(renamed)
    os.chmod(lost, 0o600)
    found = {path: reason for path, (reason, _) in checked(root).reasons().items()}
    assert found == {other: "key", tail: "key", str(lost.relative_to(root)): "key", str(renamed.relative_to(root)): "key"}
    assert checked(root).reasons()[str(lost.relative_to(root))] == ("key", "shard")


def test_a_second_file_of_a_key_is_foreign(tmp_path: Path, filled: Filled) -> None:
    _, paths = filled
    path = tmp_path / "s" / next(iter(paths.values()))
    shutil.copy(path, path.with_name(path.name[:-8] + "zzzzzzzz".replace("z", "f")))
    assert list(checked(tmp_path / "s").reasons().values()) == [("foreign", "a second file of this key")]


@pytest.mark.parametrize("kind", ["fifo", "directory", "symlink", "dangling", "hard link"])
def test_strange_things_in_place_of_a_chunk(tmp_path: Path, filled: Filled, kind: str) -> None:
    """Named as foreign; nothing hangs; what is behind a link is neither read nor counted."""
    metas, paths = filled
    path = tmp_path / "s" / paths[bytes(metas[1].key)]
    elsewhere = tmp_path / "elsewhere"
    shutil.copyfile(path, elsewhere)
    replace_by(kind, path, elsewhere)
    before = picture(tmp_path)
    ran = checked(tmp_path / "s", "--read-data")
    assert (ran.status, {p: r for p, (r, _) in ran.reasons().items()}) == (1, {paths[bytes(metas[1].key)]: "foreign"})
    assert ran.data["orphans"]["files"] == 2
    assert picture(tmp_path) == before


def test_linked_shards_and_folders_are_not_followed(tmp_path: Path, filled: Filled) -> None:
    metas, paths = filled
    shard = tmp_path / "s" / paths[bytes(metas[0].key)][:4]
    shard.rename(tmp_path / "away")
    shard.symlink_to(tmp_path / "away")
    ran = checked(tmp_path / "s")
    assert ran.reasons() == {paths[bytes(metas[0].key)][:4]: ("foreign", "not a directory")}
    assert ran.data["orphans"]["files"] == 3
    (tmp_path / "s" / "t").rename(tmp_path / "tails")
    (tmp_path / "s" / "t").symlink_to(tmp_path / "tails")
    ran = checked(tmp_path / "s")
    assert ran.reasons()["t"][0] == "foreign"
    assert "tails" not in ran.data["sums"]


def test_foreign_names_anywhere_are_named_and_harmless_to_the_terminal(tmp_path: Path, filled: Filled) -> None:
    for place in (".", "c", "t", "tmp", "bad", "c/zz"):
        (tmp_path / "s" / place).mkdir(exist_ok=True, mode=0o700)
        (tmp_path / "s" / place / "a\x1b[31m\nb").write_bytes(b"x")
        (tmp_path / "s" / place / ("x" * 255)).write_bytes(b"")
    (tmp_path / "s" / os.fsdecode(b"\xff\xfe")).write_bytes(b"")
    ran = checked(tmp_path / "s")
    assert ran.status == 1
    assert set(ran.reasons().values()) == {("foreign", "name")}
    assert len(ran.reasons()) == 2 * 5 + 1 + 1  # what is in c/zz is not even listed
    out = tool("check", tmp_path / "s").out
    assert "\x1b" not in out
    assert "a\\x1b[31m\\nb: foreign (name)" in out
    assert "\\xff\\xfe: foreign (name)" in out
    assert max(map(len, out.splitlines())) < 300


def test_lost_found_of_a_mount_point_is_no_finding(tmp_path: Path, filled: Filled) -> None:
    (tmp_path / "s" / "lost+found").mkdir(mode=0o755)
    assert checked(tmp_path / "s").status == 0


@pytest.mark.parametrize("path", [".", "SECRET", "STORE", "c", "tmp"])
def test_wrong_modes_are_named(tmp_path: Path, filled: Filled, path: str) -> None:
    (tmp_path / "s" / path).chmod(0o744)
    assert checked(tmp_path / "s").reasons() == {path: ("mode", "0744")}


def test_wrong_modes_of_files_and_shards_are_named(tmp_path: Path, filled: Filled) -> None:
    _, paths = filled
    file = tmp_path / "s" / next(iter(paths.values()))
    file.chmod(0o640)
    file.parent.chmod(0o777)
    found = checked(tmp_path / "s").reasons()
    assert sorted(found.values()) == [("mode", "0640"), ("mode", "0777")]


def test_a_missing_secret_is_said(tmp_path: Path, filled: Filled) -> None:
    (tmp_path / "s" / "SECRET").unlink()
    assert checked(tmp_path / "s").reasons() == {"SECRET": ("missing", "no such file")}
    assert "will ever be found again" in tool("check", tmp_path / "s").out
    (tmp_path / "s" / "SECRET").write_bytes(b"short")
    (tmp_path / "s" / "SECRET").chmod(0o600)
    assert checked(tmp_path / "s").reasons() == {"SECRET": ("size", "5 bytes")}


def test_a_damaged_or_missing_STORE_is_damage_and_the_files_are_still_checked(tmp_path: Path, filled: Filled) -> None:
    metas, paths = filled
    bad = paths[bytes(metas[0].key)]
    flip(tmp_path / "s" / bad, 10)
    flip(tmp_path / "s" / "STORE", 20)
    ran = checked(tmp_path / "s")
    assert {path: reason for path, (reason, _) in ran.reasons().items()} == {"STORE": "header", bad: "header"}
    (tmp_path / "s" / "STORE").unlink()
    assert {path: reason for path, (reason, _) in checked(tmp_path / "s").reasons().items()} == {
        "STORE": "missing",
        bad: "header",
    }


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"a": 1}', b"[" * 100_000, b"\xff"])
def test_a_damaged_identity_is_said(tmp_path: Path, filled: Filled, data: bytes) -> None:
    (tmp_path / "s" / "IDENTITY").write_bytes(data)
    ran = checked(tmp_path / "s")
    assert ran.reasons() == {"IDENTITY": ("header", "no JSON object of texts")}
    assert [one["current"] for one in ran.data["identities"].values()] == [False]


def test_small_files_that_are_links_or_pipes_are_named_and_not_followed(tmp_path: Path, filled: Filled) -> None:
    (tmp_path / "elsewhere").write_bytes(b"z" * 32)
    (tmp_path / "s" / "SECRET").unlink()
    (tmp_path / "s" / "SECRET").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "s" / "IDENTITY").unlink()
    os.mkfifo(tmp_path / "s" / "IDENTITY", 0o600)
    found = checked(tmp_path / "s").reasons()
    assert {path: reason for path, (reason, _) in found.items()} == {"SECRET": "foreign", "IDENTITY": "foreign"}


def test_a_newer_format_is_refused_by_name(tmp_path: Path, filled: Filled) -> None:
    body = b'{"created": 1, "format": 2, "store_id": "00"}'
    (tmp_path / "s" / "STORE").write_bytes(body + b" " + digest(body).hex().encode() + b"\n")
    ran = tool("check", tmp_path / "s")
    assert (ran.status, ran.out) == (2, "")
    assert "format 2" in ran.err


def test_files_of_another_store_are_foreign_and_of_another_identity_counted(tmp_path: Path) -> None:
    with Rig(tmp_path / "a") as a, Rig(tmp_path / "b") as b:
        meta = a.chain(1, secret=b"s" * 32)[0]
        for rig in (a, b):
            rig.write([meta])
        path = str(b.path(meta).relative_to(tmp_path / "b"))
        shutil.copyfile(a.path(meta), b.path(meta))
    assert checked(tmp_path / "b").reasons() == {path: ("foreign", "store_id")}
    other = Identity.of({"weights": "v"})
    with Rig(tmp_path / "a", identity=other) as a:
        a.write(a.chain(2, secret=tenant_secret(a.store.secret, "t")))
    ran = checked(tmp_path / "a")
    assert ran.status == 0
    assert {key: (one["files"], one["current"]) for key, one in ran.data["identities"].items()} == {
        IDENTITY.digest.hex(): (1, False),
        other.digest.hex(): (2, True),
    }


def test_leftovers_and_what_was_set_aside_are_counted(tmp_path: Path, filled: Filled) -> None:
    (tmp_path / "s" / "tmp" / "12.3.0123456789abcdef").write_bytes(b"half")
    (tmp_path / "s" / "tmp" / "12.3.0123456789abcdef").chmod(0o600)
    (tmp_path / "s" / "bad" / f"{7:020d}.{'a' * 64}.0.{'b' * 8}").write_bytes(b"bad" * 2000)
    ran = checked(tmp_path / "s")
    assert ran.status == 0
    assert ran.data["leftovers"] == {"files": 1, "bytes": 4096}
    assert ran.data["set_aside"] == {"files": 1, "bytes": 8192}


def test_a_huge_sparse_file_is_refused_by_its_size_and_not_read(tmp_path: Path, filled: Filled) -> None:
    metas, paths = filled
    os.truncate(tmp_path / "s" / paths[bytes(metas[0].key)], 1 << 40)
    before = (tmp_path / "s" / paths[bytes(metas[0].key)]).stat().st_mtime_ns
    ran = tool("check", tmp_path / "s", "--read-data", "--json")
    assert ran.reasons() == {paths[bytes(metas[0].key)]: ("size", "file size")}
    assert ran.data["read_bytes"] < 1 << 20
    assert (tmp_path / "s" / paths[bytes(metas[0].key)]).stat().st_mtime_ns == before


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_parts_of_a_store_cover_every_file_once(tmp_path: Path, filled: Filled, parts: int) -> None:
    metas, paths = filled
    flip(tmp_path / "s" / paths[bytes(metas[4].key)], FILE_BYTES - 1)
    runs = [checked(tmp_path / "s", "--read-data", "--subset", f"{n}/{parts}") for n in range(1, parts + 1)]
    assert sum(ran.data["checked"] for ran in runs) == len(metas)
    assert sorted(ran.status for ran in runs) == [0] * (parts - 1) + [1]


def test_one_thread_and_many_tell_the_same(tmp_path: Path, filled: Filled) -> None:
    metas, paths = filled
    for meta in metas[::2]:
        flip(tmp_path / "s" / paths[bytes(meta.key)], BLOCK_BYTES)
    runs = [checked(tmp_path / "s", "--read-data", "--threads", n).data for n in ("1", "2", "16")]
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]["findings"]) == 4
