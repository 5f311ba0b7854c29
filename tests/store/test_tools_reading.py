"""How the tools read: in pieces of a fixed buffer, past the page cache or not, and with any system call failing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from damagekit import flip
from kvalet.store import inspect_file
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.errors import StoreError
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.fileio import FileIO
from kvalet.store.ids import ChunkMeta
from kvalet.store.inspect_check import CheckPlan, CheckReport, check_store
from kvalet.store.inspect_file import Reader
from kvalet.store.inspect_open import open_to_look
from kvalet.store.inspect_walk import list_store
from recordfiles import put_record, record_of
from storekit import FILE_BYTES, Rig
from storetool import picture, tool


@pytest.fixture
def metas(tmp_path: Path) -> list[ChunkMeta]:
    """A session of three chunks and a tail in ``tmp_path / "s"``, with a record of several blocks."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3, tail=5)
        rig.write(metas)
    ids = tuple(token for meta in metas for token in meta.ids) + tuple(range(4000))
    put_record(tmp_path / "s", record_of("a", metas, ids=ids))
    return metas


def checked(directory: Path, io: FileIO | None = None, *, arm: bool = False, **plan: bool) -> CheckReport:
    with open_to_look(str(directory), io) as place:
        if arm and isinstance(io, FaultIO):
            io.arm()
        return check_store(place, list_store(place), CheckPlan(payload=True, threads=1, **plan))


@pytest.mark.parametrize("piece", [BLOCK_BYTES, 2 * BLOCK_BYTES, 5 * BLOCK_BYTES])
@pytest.mark.parametrize("direct", [True, False])
def test_pieces_and_ways_of_reading_tell_the_same(
    tmp_path: Path, metas: list[ChunkMeta], piece: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checked(tmp_path / "s")
    assert whole.good
    monkeypatch.setattr(inspect_file, "PIECE_BYTES", piece)
    assert checked(tmp_path / "s", direct=direct) == whole
    with Rig(tmp_path / "s") as rig:
        path = rig.path(metas[1])
    for offset in (0, BLOCK_BYTES, FILE_BYTES - 1):
        flip(path, offset)
        assert list(checked(tmp_path / "s", direct=direct).reasons) == ["payload" if offset else "header"]
        flip(path, offset)
    assert checked(tmp_path / "s", direct=direct) == whole


def test_memory_is_one_buffer_whatever_the_file_says(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    """The buffer is made once, and no read asks for more than it holds."""

    class Watched(FileIO):
        largest = 0

        def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
            self.largest = max(self.largest, sum(map(len, buffers)))
            return super().preadv(fd, buffers, offset)

    io = Watched()
    with open_to_look(str(tmp_path / "s"), io) as place:
        reader = Reader(place)
        assert {reader.examine(found, payload=True).reason for found in list_store(place).files} == {""}
    assert 0 < io.largest <= inspect_file.PIECE_BYTES


@pytest.mark.parametrize("op", ["open", "preadv"])
def test_a_file_system_without_direct_io_is_read_through_the_cache(tmp_path: Path, metas: list[ChunkMeta], op: str) -> None:
    io = FaultIO(Fault(op, code=errno.EINVAL, sticky=True, direct_only=op == "preadv"))
    if op == "open":
        io = NoDirect()
    report = checked(tmp_path / "s", io, arm=True)
    assert io.fired > 0
    assert report == checked(tmp_path / "s")


class NoDirect(FaultIO):
    """Refuses O_DIRECT at open, as some file systems do."""

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            self.fired += 1
            raise OSError(errno.EINVAL, "no direct I/O here")
        return super().open(path, flags, mode, dir_fd=dir_fd)


@pytest.mark.parametrize("op", ["open", "close", "fstat", "preadv", "scan", "free_bytes", "drop_cache"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES], ids=["EIO", "EMFILE", "EACCES"])
def test_any_failing_call_is_a_finding_or_a_sentence(tmp_path: Path, metas: list[ChunkMeta], op: str, code: int) -> None:
    """One call after the other fails; nothing raises anything else, nothing changes, and no damage of bytes is claimed."""
    before = picture(tmp_path / "s")
    fired = 0
    for nth in range(1, 400):
        io = FaultIO(Fault(op, nth=nth, code=code))
        try:
            report = checked(tmp_path / "s", io, arm=True, direct=False)
        except StoreError:
            fired += 1
            continue
        if not io.fired:
            assert report.good
            break
        fired += 1
        assert set(report.reasons) <= {"io", "resources", "foreign"}, (op, nth)
    else:
        pytest.fail("the fault fired without end")
    assert fired > 0 or op == "free_bytes"
    assert picture(tmp_path / "s") == before


def test_files_of_another_owner_are_foreign(tmp_path: Path, metas: list[ChunkMeta]) -> None:
    with open_to_look(str(tmp_path / "s")) as place:
        place.owner += 1
        listing = list_store(place)
    assert listing.files == []
    assert {(finding.reason, finding.field) for finding in listing.findings} == {("foreign", "owner")}


def test_an_error_that_nobody_expected_is_a_sentence(
    tmp_path: Path, metas: list[ChunkMeta], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("kvalet.api.store_look.list_store", failing)
    ran = tool("ls", tmp_path / "s")
    assert (ran.status, ran.out, ran.err) == (2, "", "kvalet store ls: the system refused: EIO (Input/output error)\n")
