"""Which directories become a store, and which are refused untouched (X2, X4, C2, C3, F-B1 for STORE, network file systems)."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kvalet.store import storefiles
from kvalet.store.config import StoreConfig
from kvalet.store.errors import StoreLocked, StoreRefused
from kvalet.store.header import digest
from storekit import Rig

HOLDER = """
import sys
sys.path.insert(0, {support!r})
from pathlib import Path
from storekit import Rig
rig = Rig(Path(sys.argv[1]))
metas = rig.chain(3)
print([r.reason for r in rig.write(metas)], flush=True)
sys.stdin.read()
"""
SUPPORT = str(Path(__file__).resolve().parent.parent / "support")


def snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every path below ``root`` with mode, mtime and contents."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        st = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(st.st_mode) else b""
        found[str(path.relative_to(root))] = (st.st_mode, st.st_mtime_ns, data)
    return found


def refused(directory: Path, match: str, **config: object) -> None:
    with pytest.raises(StoreRefused, match=match) as caught:
        Rig(directory, **config)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_directory_with_other_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "photos"
    target.mkdir(mode=0o700)
    (target / "cat.jpg").write_bytes(b"meow")
    before = snapshot(target)
    refused(target, "holds no kvalet store")
    assert snapshot(target) == before


def test_a_file_a_link_and_a_missing_parent_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    refused(tmp_path / "file", "not a directory")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refused(tmp_path / "link", "symbolic link")
    assert os.listdir(tmp_path / "real") == []
    refused(tmp_path / "no" / "such", "cannot be made")
    refused(tmp_path / "nul\0byte", "cannot be made")


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "s"
    target.mkdir()
    target.chmod(mode)
    refused(target, "chmod 700")
    assert os.listdir(target) == []
    target.chmod(0o700)
    with Rig(target) as rig:  # positive control
        assert rig.store.accepts_writes()


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "s"
    target.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: target.stat().st_uid + 1)
    refused(target, "belongs to user")


@pytest.mark.parametrize("path", ["with space", "ümläut ☃", "a'quote\"", "new\nline"])
def test_any_path_works(tmp_path: Path, path: str) -> None:
    with Rig(tmp_path / path) as rig:
        metas = rig.chain(2)
        assert [r.reason for r in rig.write(metas)] == ["", ""]
    with Rig(tmp_path / path) as rig:
        assert [rig.read(meta) for meta in metas] == ["", ""]


def test_a_relative_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Rig(Path("s")) as rig:
        metas = rig.chain(1)
        monkeypatch.chdir("/")  # descriptors, not paths, are used from here on
        assert rig.write(metas)[0].reason == ""
        assert rig.read(metas[0]) == ""


@pytest.mark.parametrize("name", ["tmp", "c", "t", "bad"])
@pytest.mark.parametrize("kind", ["symlink", "file"])
def test_a_folder_that_is_a_link_or_a_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    with Rig(tmp_path / "s"):
        pass
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "1.1.0123456789abcdef").write_bytes(b"looks like a temporary file of ours")
    (tmp_path / "s" / name).rmdir()
    if kind == "symlink":
        (tmp_path / "s" / name).symlink_to(elsewhere)
    else:
        (tmp_path / "s" / name).write_bytes(b"")
    refused(tmp_path / "s", "not a directory of ours")
    assert os.listdir(elsewhere) == ["1.1.0123456789abcdef"]


def test_a_linked_shard_is_not_followed(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas[:1])
        shard = rig.path(metas[0]).parent
        shard.rename(tmp_path / "away")
        shard.symlink_to(tmp_path / "away")
        before = snapshot(tmp_path / "away")
        assert rig.read(metas[0]) == "foreign"
        assert snapshot(tmp_path / "away") == before
    with Rig(tmp_path / "s") as rig:
        assert rig.store.found.strangers == 1
        assert not rig.store.has(metas[0].key)
        assert rig.write(metas[:1])[0].reason == "blocked"
        assert snapshot(tmp_path / "away") == before


@pytest.mark.parametrize("name", ["STORE", "SECRET", "LOCK", "IDENTITY"])
def test_small_files_that_are_links_or_pipes_are_refused(tmp_path: Path, name: str) -> None:
    for kind in ("symlink", "fifo"):
        target = tmp_path / f"{name}-{kind}"
        with Rig(target):
            pass
        (target / name).unlink()
        elsewhere = tmp_path / f"else-{kind}"
        elsewhere.write_bytes(b"z" * 32)
        if kind == "symlink":
            (target / name).symlink_to(elsewhere)
        else:
            os.mkfifo(target / name)
        with pytest.raises(StoreRefused):
            Rig(target)
        assert elsewhere.read_bytes() == b"z" * 32


def test_every_byte_of_STORE_counts(tmp_path: Path) -> None:
    """B1: a damaged STORE refuses the tier and deletes nothing."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas)
    path = tmp_path / "s" / "STORE"
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        with pytest.raises(StoreRefused, match="damaged"):
            storefiles.parse_store_line("d", path.read_bytes())
        path.write_bytes(good[:i])
        with pytest.raises(StoreRefused, match="damaged"):
            storefiles.parse_store_line("d", path.read_bytes())
    refused(tmp_path / "s", "damaged")
    assert sum(p.is_file() for p in (tmp_path / "s" / "c").rglob("*")) == 2
    path.write_bytes(good)
    with Rig(tmp_path / "s") as rig:
        assert [rig.read(meta) for meta in metas] == ["", ""]


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    with Rig(tmp_path / "s"):
        pass
    body = b'{"created": 1, "format": 2, "store_id": "00"}'
    (tmp_path / "s" / "STORE").write_bytes(body + b" " + digest(body).hex().encode() + b"\n")
    refused(tmp_path / "s", "format 2")


def test_a_lost_secret_means_new_keys_and_a_short_one_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(1)
        rig.write(metas)
        old = rig.store.secret
    (tmp_path / "s" / "SECRET").unlink()
    with Rig(tmp_path / "s") as rig:
        assert rig.store.secret != old
        assert not rig.store.has(rig.chain(1)[0].key)
    assert "SECRET is missing" in caplog.text
    (tmp_path / "s" / "SECRET").write_bytes(b"short")
    refused(tmp_path / "s", "32 bytes")


def test_a_network_file_system_is_refused_unless_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storefiles.file_system_type(os.open("/", os.O_RDONLY | os.O_CLOEXEC)) != 0
    monkeypatch.setattr(storefiles, "file_system_type", lambda fd: 0x6969)
    refused(tmp_path / "s", "NFS")
    with Rig(tmp_path / "s", force_network_fs=True) as rig:
        assert rig.write(rig.chain(1))[0].reason == ""


def test_another_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    """C2, C3, P31."""
    program = HOLDER.format(support=SUPPORT)
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(tmp_path / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "['', '', '']"
        with pytest.raises(StoreLocked, match=str(child.pid)):
            Rig(tmp_path / "s")
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=20)
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3)
        assert [rig.read(meta) for meta in metas] == ["", "", ""]
        rig.check_books()


def test_only_our_own_leftovers_are_swept(tmp_path: Path) -> None:
    with Rig(tmp_path / "s"):
        pass
    tmp = tmp_path / "s" / "tmp"
    ours = tmp / "123.4.0123456789abcdef"
    ours.write_bytes(b"half a chunk")
    (tmp / "notes.txt").write_bytes(b"somebody's")
    (tmp / "5.5.0123456789abcdef").mkdir()
    with Rig(tmp_path / "s"):
        assert sorted(os.listdir(tmp)) == ["5.5.0123456789abcdef", "notes.txt"]


def test_a_store_that_is_switched_off_deletes_nothing(tmp_path: Path) -> None:
    """G2: cap 0."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas)
    with Rig(tmp_path / "s", cap_bytes=0) as rig:
        assert not rig.store.has(metas[0].key)
        assert not rig.store.accepts_writes()
        assert rig.read(metas[0]) == "closed"
        assert rig.write(metas)[0].reason == "read_only"
    with Rig(tmp_path / "s") as rig:
        assert [rig.read(meta) for meta in metas] == ["", ""]


def test_names_that_are_not_ours_are_counted_and_left_alone(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.write(rig.chain(2))
    shard = next(p for p in (tmp_path / "s" / "c").iterdir() if p.is_dir())
    (shard / "README").write_text("x")
    (tmp_path / "s" / "c" / "zz").mkdir()
    (tmp_path / "s" / "c" / "zz" / "y").write_text("x")
    with Rig(tmp_path / "s", cap_bytes=4096) as rig:  # evicts down: but only what is ours
        rig.quiet()
        assert rig.store.found.strangers == 2
        assert rig.store.statistics().files == 0
    assert (shard / "README").exists()
    assert (tmp_path / "s" / "c" / "zz" / "y").exists()


def test_configuration_is_one_frozen_value() -> None:
    config = StoreConfig("d", 1)
    with pytest.raises(AttributeError):
        config.cap_bytes = 2  # type: ignore[misc]
