"""`kvalet store export`: a tar that anybody can read, the same bytes each time, verified, and nothing else anywhere."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import tarfile
from pathlib import Path

import pytest
from damagekit import flip, replace_by
from kvalet.store import inspect_export
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.ids import ChunkMeta
from kvalet.store.inspect_export import Changed, export, named_files, record_json
from kvalet.store.inspect_file import Reader, Verdict
from kvalet.store.inspect_open import open_to_look
from kvalet.store.inspect_records import Stored, each_record
from kvalet.store.inspect_walk import Found, list_store
from recordfiles import put_record, record_of
from storekit import FILE_BYTES, Rig
from storetool import child, picture, tool

WAIT_S = 60


@pytest.fixture
def metas(tmp_path: Path) -> list[ChunkMeta]:
    """One session "a" of three chunks and a tail in ``tmp_path / "s"``, beside another conversation."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3, tail=5)
        rig.write([*metas, *rig.chain(2, seed=1)])
    put_record(tmp_path / "s", record_of("a", metas))
    return metas


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path, "r:") as tar:
        found = {}
        for info in tar:
            assert info.isreg()
            assert (info.mtime, info.uid, info.gid, info.mode, info.uname) == (0, 0, 0, 0o600, "")
            found[info.name] = tar.extractfile(info).read()  # type: ignore[union-attr]
    return found


def test_the_tar_holds_the_session_and_says_so(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    before = picture(tmp_path / "s")
    ran = tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "a.tar"), "--json")
    assert (ran.status, ran.data["missing"]) == (0, [])
    assert picture(tmp_path / "s") == before
    found = members(tmp_path / "a.tar")
    names = list(found)
    assert names[-1] == "MANIFEST.json"
    assert names[:-1] == sorted(names[:-1])
    assert [name.split("/")[0] for name in names[:-1]] == ["c", "c", "c", "r", "records", "t"]
    for name, data in found.items():
        if name[0] in "crt" and name[1] == "/":
            assert (tmp_path / "s" / name).read_bytes() == data
    manifest = json.loads(found["MANIFEST.json"])
    assert {one["name"]: (one["bytes"], one["sha256"]) for one in manifest["members"]} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in found.items() if name != "MANIFEST.json"
    }
    assert (manifest["session"], manifest["missing"], manifest["identity"]["weights"]) == ("a", [], "w")
    record = json.loads(found["records/00000000000000b1.json"])
    assert record["session"] == "a"
    assert record["chunk_keys"] == [meta.key.hex() for meta in metas[:3]]
    assert record["ids"] == [token for meta in metas for token in meta.ids]
    assert (tmp_path / "a.tar").stat().st_mode & 0o777 == 0o600


def test_the_same_session_gives_the_same_bytes(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "1.tar"))
    for path in (tmp_path / "s").rglob("*"):
        os.utime(path, (1, 1))
    record = next((tmp_path / "s" / "r").rglob("*.s"))
    os.utime(record, (2, 2))
    tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "2.tar"))
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()


def test_to_standard_output(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "a.tar"))
    process = child("export", "--store", str(tmp_path / "s"), "a", "-o", "-")
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, (tmp_path / "a.tar").read_bytes())
    assert err.endswith(b"to -\n")
    ran = tool("export", tmp_path / "s", "a", "-o", "-", "--json")
    assert (ran.status, ran.out) == (2, "")
    ran = tool("export", tmp_path / "s", "nobody", "-o", "-")
    assert (ran.status, ran.out) == (1, ""), "no text where a tar is expected"
    assert "there is no session nobody" in ran.err


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    process = child("export", "--store", str(tmp_path / "s"), "a", "-o", "-")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (1, b"")


@pytest.mark.parametrize("what", ["file", "link", "dangling link", "fifo", "directory"])
def test_nothing_is_overwritten(tmp_path: Path, metas: list[ChunkMeta], what: str) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    out = tmp_path / "out"
    if what == "file":
        out.write_bytes(b"mine")
    elif what == "directory":
        out.mkdir()
    elif what == "fifo":
        os.mkfifo(out)
    else:
        out.symlink_to(tmp_path / ("precious" if what == "link" else "nothing"))
    before = picture(tmp_path)
    ran = tool("export", tmp_path / "s", "a", "-o", str(out))
    assert (ran.status, ran.out) == (2, "")
    assert "is there already" in ran.err
    assert picture(tmp_path) == before


@pytest.mark.parametrize("where", ["s/x.tar", "s/tmp/x.tar", "alias/c/x.tar", "missing/x.tar", "s/../s/x.tar"])
def test_outputs_in_the_store_or_nowhere_are_refused(tmp_path: Path, metas: list[ChunkMeta], where: str) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "s")
    before = picture(tmp_path)
    ran = tool("export", tmp_path / "s", "a", "-o", str(tmp_path / where))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvalet store export: The output ")
    assert picture(tmp_path) == before


def test_an_unknown_session_leaves_no_file(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    ran = tool("export", tmp_path / "s", "nobody", "-o", str(tmp_path / "a.tar"))
    assert (ran.status, ran.err) == (1, "")
    assert "there is no session nobody of the default tenant" in ran.out
    assert not (tmp_path / "a.tar").exists()


def test_what_is_bad_or_missing_is_left_out_and_named(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    with Rig(tmp_path / "s") as rig:
        paths = [rig.path(meta) for meta in metas]
    flip(paths[0], FILE_BYTES - 1)
    paths[3].unlink()
    (tmp_path / "elsewhere").write_bytes(paths[2].read_bytes())
    replace_by("symlink", paths[2], tmp_path / "elsewhere")
    ran = tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "a.tar"), "--json")
    assert ran.status == 1
    assert sorted(one["reason"] for one in ran.data["missing"]) == ["missing", "missing", "payload"]
    found = members(tmp_path / "a.tar")
    assert [name for name in found if name.startswith("c/")] == [str(paths[1].relative_to(tmp_path / "s"))]
    missing = json.loads(found["MANIFEST.json"])["missing"]
    assert {(one["reason"], one["path"].split("/")[0]) for one in missing} == {
        ("payload", "c"),
        ("missing", "c"),
        ("missing", "t"),
    }


def test_a_file_that_changes_while_it_is_copied_leaves_nothing(
    tmp_path: Path, metas: list[ChunkMeta], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path / "s") as rig:
        path = rig.path(metas[1])
    examine = Reader.examine

    def then_damaged(self: Reader, found: Found, *, payload: bool) -> Verdict:
        verdict = examine(self, found, payload=payload)
        if found.path.endswith(path.name):
            flip(path, FILE_BYTES - 1)
        return verdict

    monkeypatch.setattr(Reader, "examine", then_damaged)
    ran = tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "a.tar"))
    assert (ran.status, ran.out) == (2, "")
    assert f"{path.name} changed, or could not be read, while it was copied; nothing was kept." in ran.err
    assert not (tmp_path / "a.tar").exists()


def test_a_file_that_is_evicted_after_it_was_verified_is_left_out(
    tmp_path: Path, metas: list[ChunkMeta], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path / "s") as rig:
        path = rig.path(metas[3])
    examine = Reader.examine

    def then_gone(self: Reader, found: Found, *, payload: bool) -> Verdict:
        verdict = examine(self, found, payload=payload)
        if found.path.endswith(path.name):
            path.unlink()
        return verdict

    monkeypatch.setattr(Reader, "examine", then_gone)
    ran = tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "a.tar"), "--json")
    assert (ran.status, [one["reason"] for one in ran.data["missing"]]) == (1, ["gone"])
    assert len(members(tmp_path / "a.tar")) == 6


def test_a_file_that_cannot_be_opened_is_left_out_and_named(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    """Every opening of the export in turn, of folders and files: what is in the tar is whole."""
    fired = 0
    for nth in range(1, 200):
        io_ = FaultIO(Fault("open", nth=nth))
        with open_to_look(str(tmp_path / "s"), io_) as place:
            listing = list_store(place)
            stored = [one for one in each_record(place, listing.files) if isinstance(one, Stored)]
            files, _ = named_files(stored, listing.files)
            io_.arm()
            done = export(place, stored, files, io.BytesIO())
        assert len(done.members) + len(done.missing) == 6
        assert [finding.reason for finding in done.missing] == ["io"] * len(done.missing)
        fired += io_.fired
        if not io_.fired:
            break
    assert fired == nth - 1 >= 8


@pytest.mark.parametrize("kind", ["errno", "short"])
def test_a_disk_that_fails_while_copying_ends_it(tmp_path: Path, metas: list[ChunkMeta], kind: str) -> None:
    """Every read of the copy in turn; the positive control is the run in which nothing fires."""
    fired = 0
    for nth in range(1, 200):
        io_ = FaultIO(Fault("preadv", nth=nth, kind=kind))
        with open_to_look(str(tmp_path / "s"), io_) as place:
            listing = list_store(place)
            stored = [one for one in each_record(place, listing.files) if isinstance(one, Stored)]
            files, _ = named_files(stored, listing.files)
            out = io.BytesIO()
            io_.arm()
            try:
                done = export(place, stored, files, out)
            except Changed:
                fired += 1
                continue
        if not io_.fired:
            assert (len(done.members), done.missing) == (6, [])
            break
        fired += 1
        if done.missing:
            assert {finding.reason for finding in done.missing} <= {"io", "size"}
    else:
        pytest.fail("the fault fired without end")
    assert fired >= 8


def test_an_output_that_is_full_is_said_and_removed(
    tmp_path: Path, metas: list[ChunkMeta], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inspect_export, "_add", full)
    ran = tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "a.tar"))
    assert (ran.status, ran.out) == (2, "")
    assert "cannot be written: ENOSPC" in ran.err
    assert not (tmp_path / "a.tar").exists()


def test_an_interrupted_export_leaves_no_file(tmp_path: Path, metas: list[ChunkMeta], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(inspect_export, "_add", interrupted)
    ran = tool("export", tmp_path / "s", "a", "-o", str(tmp_path / "a.tar"))
    assert (ran.status, ran.out, ran.err) == (130, "", "kvalet store export: interrupted\n")
    assert not (tmp_path / "a.tar").exists()


def test_texts_of_a_record_survive_as_json(metas: list[ChunkMeta]) -> None:
    record = record_of("ümläut \ud800 ☃", metas, space=b"12345678", decoded=((3, 9),))
    loaded = json.loads(record_json(record).decode("utf-8", "surrogatepass"))
    assert (loaded["session"], loaded["space"], loaded["decoded"]) == (record.session, b"12345678".hex(), [[3, 9]])
