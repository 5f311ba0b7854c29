"""Power loss without pulling the plug: what a disk may hold after a crash at any moment of a recorded run.

A file's data counts as kept once fdatasync returned; before that each file may hold all of it, nothing, or half. A rename,
an unlink or a new directory counts as kept once its directory was fsynced; before that each of them may or may not have
happened, independently (a disk that honours flush, and a file system that promises nothing else).
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvalet.store.fileio import FileIO


@dataclass(slots=True)
class Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    is_folder: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One change of names, not flushed yet: ``path`` now means ``inode`` (None: no longer there)."""

    folder: str
    path: str
    inode: Inode | None


@dataclass(frozen=True, slots=True)
class Moment:
    """The disk after one operation: flushed names, changes in flight, and what was acknowledged by then."""

    kept: dict[str, Inode]
    pending: tuple[Change, ...]
    files: dict[int, tuple[bytes, bytes]]
    acked: frozenset[bytes]
    made: frozenset[str]
    """Folders made during the run: without its folder a file is lost."""


class RecordingIO(FileIO):
    """Does the real thing and keeps a ``Moment`` after every operation that changes the disk. ``acked`` is filled by the
    test; ``honour_flush`` False records a protocol that never flushes."""

    def __init__(self, *, skip_fdatasync: bool = False, skip_fsync: bool = False) -> None:
        self.moments: list[Moment] = []
        self.acked: set[bytes] = set()
        self._skip_fdatasync = skip_fdatasync
        self._skip_fsync = skip_fsync
        self._kept: dict[str, Inode] = {}
        self._live: dict[str, Inode] = {}
        self._made: set[str] = set()
        self._pending: list[Change] = []
        self._open: dict[int, Inode] = {}
        self._lock = threading.RLock()

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        with self._lock:
            fd = super().open(path, flags, mode, dir_fd=dir_fd)
            if flags & os.O_CREAT:
                inode = Inode()
                self._open[fd] = inode
                self._change(self._where(dir_fd), path, inode)
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            super().close(fd)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        n = super().pwritev(fd, buffers, offset)
        with self._lock:
            data = self._open[fd].data
            data[offset : offset + n] = bytes(buffers[0][:n])
            self._note()
        return n

    def fdatasync(self, fd: int) -> None:
        if self._skip_fdatasync:
            return
        super().fdatasync(fd)
        with self._lock:
            inode = self._open[fd]
            inode.synced = bytes(inode.data)
            self._note()

    def fsync(self, fd: int) -> None:
        if self._skip_fsync:
            return
        folder = self._where(fd)
        with self._lock:
            before = [change for change in self._pending if change.folder == folder]
        super().fsync(fd)
        with self._lock:
            for change in before:
                self._pending.remove(change)
                self._apply(self._kept, change)
            self._note()

    def rename(self, old: str, new: str, *, old_dir: int, new_dir: int) -> None:
        with self._lock:
            super().rename(old, new, old_dir=old_dir, new_dir=new_dir)
            inode = self._live[os.path.join(self._where(old_dir), old)]
            self._change(self._where(new_dir), new, inode)
            self._change(self._where(old_dir), old, None)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        with self._lock:
            super().unlink(path, dir_fd=dir_fd)
            self._change(self._where(dir_fd), path, None)

    def mkdir(self, path: str, *, dir_fd: int) -> None:
        with self._lock:
            super().mkdir(path, dir_fd=dir_fd)
            self._made.add(os.path.join(self._where(dir_fd), path))
            self._change(self._where(dir_fd), path, Inode(is_folder=True))

    def acknowledge(self, key: bytes) -> None:
        with self._lock:
            self.acked.add(key)
            self._note()

    def _where(self, fd: int | None) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def _change(self, folder: str, name: str, inode: Inode | None) -> None:
        change = Change(folder, os.path.join(folder, name), inode)
        self._apply(self._live, change)
        self._pending.append(change)
        self._note()

    @staticmethod
    def _apply(names: dict[str, Inode], change: Change) -> None:
        if change.inode is None:
            names.pop(change.path, None)
        else:
            names[change.path] = change.inode

    def _note(self) -> None:
        inodes = {id(i): (bytes(i.data), i.synced) for i in self._live.values()}
        self.moments.append(
            Moment(dict(self._kept), tuple(self._pending), inodes, frozenset(self.acked), frozenset(self._made))
        )


def crash_states(moment: Moment, rng: random.Random, at_most: int) -> Iterator[dict[str, bytes]]:
    """Path -> contents, for subsets of the pending changes (all of them if few, else ``at_most`` random ones)."""
    pending = moment.pending
    if 2 ** len(pending) <= at_most:
        subsets: Iterator[tuple[bool, ...]] = itertools.product((False, True), repeat=len(pending))
    else:
        subsets = iter([tuple(rng.random() < 0.5 for _ in pending) for _ in range(at_most)])
    for subset in subsets:
        names = dict(moment.kept)
        for kept, change in zip(subset, pending, strict=True):
            if kept:
                RecordingIO._apply(names, change)
        state = {}
        for path, inode in names.items():
            folder = os.path.dirname(path)
            if inode.is_folder or (folder in moment.made and folder not in names):
                continue
            data, synced = moment.files.get(id(inode), (bytes(inode.data), inode.synced))
            state[path] = synced if synced == data else rng.choice((synced, data, data[: len(data) // 2], bytes(len(data))))
        yield state


def materialise(state: dict[str, bytes], original: Path, target: Path) -> None:
    """A fresh store directory holding exactly ``state``, with the small files of the original."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(mode=0o700)
    for name in ("STORE", "SECRET"):
        shutil.copyfile(original / name, target / name)
    for path, data in state.items():
        place = target / Path(path).relative_to(original)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(0o600)
    for folder in target.iterdir():
        if folder.is_dir():
            folder.chmod(0o700)
