"""Opening a directory as a store: ownership, lock, STORE and SECRET files, direct I/O probe, sweep of our own tmp files.

Order matters: nothing is created, deleted or swept before the lock is held; nothing in a refused directory is changed.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvalet.store import layout
from kvalet.store.config import BLOCK_BYTES, StoreConfig
from kvalet.store.errors import StoreRefused
from kvalet.store.faultwords import NO_DIRECT, explain
from kvalet.store.fileio import CREATE_FLAGS, DIRECTORY_FLAGS, FileIO
from kvalet.store.storefiles import refuse_network, refuse_unknown, secret_file, store_file, take_lock

log = logging.getLogger("kvalet.store")


@dataclass(slots=True)
class Directory:
    """An open, locked store directory. All descriptors are closed by ``close``; the lock goes with the last one.

    ``direct``: files are opened with O_DIRECT. ``why_buffered``: what the probe said if not.
    """

    io: FileIO
    root_fd: int
    lock_fd: int
    store_id: bytes
    secret: bytes
    created: bool
    direct: bool = False
    why_buffered: str = ""
    folder_fds: dict[str, int] = field(default_factory=dict)
    swept: int = 0
    dirty_folders: set[str] = field(default_factory=lambda: set(layout.SHARDED))
    """All at first: whoever had the store before may have been killed between making a shard and flushing it."""
    _counter: int = 0
    _shard_lock: threading.Lock = field(default_factory=threading.Lock)

    def open_shard(self, folder: str, shard: str) -> int:
        """A descriptor of a shard of a folder; never through a symbolic link. The caller closes it."""
        return self.io.open(shard, DIRECTORY_FLAGS, dir_fd=self.folder_fds[folder])

    def make_shard(self, folder: str, shard: str) -> int:
        """Like ``open_shard``, made if missing; then ``folder`` is in ``dirty_folders`` until ``flush_folders``."""
        try:
            return self.open_shard(folder, shard)
        except FileNotFoundError:
            pass
        with self._shard_lock:
            self.dirty_folders.add(folder)
            try:
                self.io.mkdir(shard, dir_fd=self.folder_fds[folder])
            except FileExistsError:
                pass  # another thread was quicker
        return self.open_shard(folder, shard)

    def flush_folders(self) -> None:
        """Make new shards durable: one fsync per folder. A folder stays dirty until that has succeeded, and whoever finds
        none dirty may trust all shards that exist: no shard is made between a flush and its note here."""
        if not self.dirty_folders:
            return
        with self._shard_lock:
            for folder in sorted(self.dirty_folders):
                self.io.fsync(self.folder_fds[folder])
                self.dirty_folders.discard(folder)

    def new_tmp_name(self) -> str:
        self._counter += 1
        return layout.tmp_name(os.getpid(), self._counter, os.urandom(8).hex())

    def close_quietly(self, fd: int) -> None:
        """For descriptors whose data is not at stake: directories, and files only read."""
        try:
            self.io.close(fd)
        except OSError as error:
            log.warning("store: close failed: %s", explain(error))

    def direct_refused(self, what: str) -> None:
        """O_DIRECT was accepted at open and refused in use: the store goes on buffered, and says so."""
        self.direct = False
        self.why_buffered = f"direct I/O refused in use ({what})"
        log.warning("store: %s; buffered from now on", self.why_buffered)

    @property
    def data_flags(self) -> int:
        return os.O_DIRECT if self.direct else 0

    def close(self) -> None:
        for fd in (*self.folder_fds.values(), self.root_fd, self.lock_fd):
            os.close(fd)
        self.folder_fds = {}


def open_directory(config: StoreConfig, io: FileIO) -> Directory:
    """Blocking. StoreRefused/StoreLocked with one sentence; descriptors are closed again on any error."""
    with ExitStack() as opened:
        try:
            disk = _open(config, io, opened)
        except OSError as error:
            raise StoreRefused(f"The store {config.directory!r} cannot be opened: {explain(error)}.") from error
        opened.pop_all()
        return disk


def _open(config: StoreConfig, io: FileIO, opened: ExitStack) -> Directory:
    root_fd = _open_root(config)
    opened.callback(os.close, root_fd)
    refuse_network(root_fd, config)
    refuse_unknown(config.directory, root_fd)
    lock_fd = take_lock(config.directory, root_fd)
    opened.callback(os.close, lock_fd)
    store_id, created = store_file(config.directory, root_fd)
    secret = secret_file(config.directory, root_fd, created=created)
    disk = Directory(io, root_fd, lock_fd, store_id, secret, created)
    for folder in layout.FOLDERS:
        disk.folder_fds[folder] = _folder(config.directory, root_fd, folder)
        opened.callback(os.close, disk.folder_fds[folder])
    disk.swept = _sweep_tmp(disk)
    _probe_direct(disk, config)
    return disk


def _open_root(config: StoreConfig) -> int:
    path = config.directory
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except (OSError, ValueError) as error:
        raise StoreRefused(f"The store directory {path!r} cannot be made: {error}.") from error
    try:
        fd = os.open(path, DIRECTORY_FLAGS)
    except OSError as error:
        raise StoreRefused(f"The store path {path!r} is not a directory, or is a symbolic link: {explain(error)}.") from error
    st = os.fstat(fd)
    problem = ""
    if st.st_uid != os.geteuid():
        problem = f"belongs to user {st.st_uid}, not to {os.geteuid()}"
    elif st.st_mode & 0o022:
        problem = f"can be written by others (mode {stat.S_IMODE(st.st_mode):04o}); run chmod 700 on it"
    if problem:
        os.close(fd)
        raise StoreRefused(f"The store directory {path!r} {problem}.")
    return fd


def _folder(path: str, root_fd: int, name: str) -> int:
    try:
        os.mkdir(name, 0o700, dir_fd=root_fd)
        os.fsync(root_fd)
    except FileExistsError:
        pass
    try:
        return os.open(name, DIRECTORY_FLAGS, dir_fd=root_fd)
    except OSError as error:
        raise StoreRefused(f"{name} in the store {path!r} is not a directory of ours: {explain(error)}.") from error


def _sweep_tmp(disk: Directory) -> int:
    """Unlink what an earlier process left in tmp/. Only names of our own pattern; we hold the lock, so none is in use."""
    fd = disk.folder_fds[layout.TMP]
    swept = 0
    for name, st in disk.io.scan(fd):
        if layout.is_tmp_name(name) and stat.S_ISREG(st.mode):
            disk.io.unlink(name, dir_fd=fd)
            swept += 1
    return swept


def _probe_direct(disk: Directory, config: StoreConfig) -> None:
    """Direct I/O counts as available only if an aligned block was really written and read back with it."""
    if config.direct == "off":
        disk.why_buffered = "switched off"
        return
    try:
        write_probe(disk, os.O_DIRECT)
        disk.direct = True
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
        disk.why_buffered = explain(error)


def write_probe(disk: Directory, extra_flags: int) -> None:
    """Write one block in tmp/, flush it, rename it, read it back, delete it. OSError says what does not work."""
    io, tmp_fd = disk.io, disk.folder_fds[layout.TMP]
    name, moved = disk.new_tmp_name(), disk.new_tmp_name()
    block = mmap.mmap(-1, 2 * BLOCK_BYTES)
    try:
        with memoryview(block) as view, view[:BLOCK_BYTES] as out, view[BLOCK_BYTES:] as back:
            out[:] = os.urandom(BLOCK_BYTES)
            fd = io.open(name, CREATE_FLAGS | extra_flags, 0o600, dir_fd=tmp_fd)
            try:
                if io.pwritev(fd, [out], 0) != BLOCK_BYTES:
                    raise OSError(5, "short write of the probe block")
                io.fdatasync(fd)
                if io.preadv(fd, [back], 0) != BLOCK_BYTES or out != back:
                    raise OSError(5, "the probe block came back changed")
            finally:
                io.close(fd)
            io.rename(name, moved, old_dir=tmp_fd, new_dir=tmp_fd)
            name = moved
            io.fsync(tmp_fd)
    finally:
        block.close()
        try:
            io.unlink(name, dir_fd=tmp_fd)
        except FileNotFoundError:
            pass
