"""Putting one file on disk: data under a temporary name (writer threads), then publication (the committer thread).

After ``write_data`` returns the data is durable (sync=data) under ``tmp/``; if it raises, nothing is left there unless the
unlink failed too (``Stranded``). After ``publish`` names are durable, too, for every write it did not report.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvalet.store import header, layout
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.directory import Directory
from kvalet.store.faultwords import NO_DIRECT
from kvalet.store.fileio import CREATE_FLAGS
from kvalet.store.header import Home
from kvalet.store.janitor import round_block
from kvalet.store.record import RecordHome, encode
from kvalet.store.writeboard import Write

MAX_STALLS = 2
"""Calls that may bring a file no further (a short write below one block) before it counts as an I/O error."""


class Stranded(Exception):
    """A failed write could not remove its file; ``n_bytes`` stay on disk until the next open sweeps them."""

    def __init__(self, cause: OSError | MemoryError, n_bytes: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.n_bytes = n_bytes


def write_data(disk: Directory, home: Home, write: Write, created_ns: int, *, sync: bool) -> str:
    """Header into the slot's first block, then the whole slot into a new file in tmp/; a record is encoded here, and goes
    through the page cache. Returns the file's name.

    ValueError: a record that cannot be told; nothing was begun. OSError/MemoryError: the write failed and left nothing.
    Stranded: it left bytes. fdatasync is never tried twice.
    """
    if write.record is not None:
        data = encode(write.record, record_home(disk, home, write), created_ns)
        write.file_bytes = round_block(len(data))
        return _write_new(disk, write, memoryview(data), 0, sync=sync)
    view = write.slot[: write.n_bytes]
    if write.meta.state is not None:
        view[BLOCK_BYTES + write.meta.state.n_bytes :] = bytes(len(view) - BLOCK_BYTES - write.meta.state.n_bytes)
    payload_digest = header.digest(view[BLOCK_BYTES:])
    view[:BLOCK_BYTES] = header.pack(home, write.meta, payload_digest, created_ns)
    return _write_new(disk, write, view, disk.data_flags, sync=sync)


def record_home(disk: Directory, home: Home, write: Write) -> RecordHome:
    assert write.record is not None
    return RecordHome(home.store_id, home.identity, layout.tenant_hash(disk.secret, write.record.tenant), write.file.session)


def _write_new(disk: Directory, write: Write, view: memoryview, flags: int, *, sync: bool) -> str:
    while True:
        name = disk.new_tmp_name()
        try:
            _write_file(disk, name, view, write.recency, flags, sync=sync)
            return name
        except OSError as error:
            discard(disk, name, write.n_bytes, error)
            if not flags or error.errno not in NO_DIRECT:
                raise
            disk.direct_refused("write")
            flags = 0
        except MemoryError as error:
            discard(disk, name, write.n_bytes, error)
            raise


def discard(disk: Directory, name: str, n_bytes: int, cause: OSError | MemoryError) -> None:
    """Unlink a temporary file. Stranded if that fails for another reason than that it is not there."""
    try:
        disk.io.unlink(name, dir_fd=disk.folder_fds[layout.TMP])
    except FileNotFoundError:
        pass
    except (OSError, MemoryError):
        raise Stranded(cause, n_bytes) from cause


def _write_file(disk: Directory, name: str, view: memoryview, recency: int, flags: int, *, sync: bool) -> None:
    io = disk.io
    fd = io.open(name, CREATE_FLAGS | flags, 0o600, dir_fd=disk.folder_fds[layout.TMP])
    with ExitStack() as opened:
        opened.callback(disk.close_quietly, fd)  # after another error, which is the one to report
        done = stalls = 0
        while done < len(view):
            before = done
            done += io.pwritev(fd, [view[done:]], done)
            if flags and done < len(view):
                done -= done % BLOCK_BYTES  # direct I/O goes on at a block boundary only
            stalls += done <= before
            if stalls > MAX_STALLS:
                raise OSError(errno.EIO, "writes make no progress")
        io.utime(fd, recency)
        if sync:
            io.fdatasync(fd)
        if not flags:
            io.drop_cache(fd)
        opened.pop_all()
    io.close(fd)


@dataclass(frozen=True, slots=True)
class PublishFailure:
    """``stranded_bytes``: of a file that could be neither made durable nor removed again. ``replaced``: the name was taken
    over before the failure, so an older file under it is gone. ``defect``: not the disk but kvalet failed."""

    write: Write
    error: OSError | MemoryError
    stranded_bytes: int = 0
    replaced: bool = False
    defect: bool = False


def publish(disk: Directory, wave: Sequence[Write], *, sync: bool) -> list[PublishFailure]:
    """Rename every write of the wave into its shard (one for all of them), then make it durable with one fsync.

    Parents of all writes of a wave are durable already. Returns those that failed; their files are gone again.
    """
    file = wave[0].file
    try:
        shard_fd = disk.make_shard(file.folder, file.shard)
    except (OSError, MemoryError) as error:
        return [_take_back(disk, write, error) for write in wave]
    try:
        if sync:
            disk.flush_folders()
        return _publish_shard(disk, shard_fd, wave, sync=sync)
    except (OSError, MemoryError) as error:  # of flush_folders: nothing is renamed yet
        return [_take_back(disk, write, error) for write in wave]
    finally:
        disk.close_quietly(shard_fd)


def _publish_shard(disk: Directory, shard_fd: int, writes: Sequence[Write], *, sync: bool) -> list[PublishFailure]:
    failures: list[PublishFailure] = []
    renamed: list[Write] = []
    for write in writes:
        try:
            disk.io.rename(write.tmp, write.file.name, old_dir=disk.folder_fds[layout.TMP], new_dir=shard_fd)
            renamed.append(write)
        except (OSError, MemoryError) as error:
            failures.append(_take_back(disk, write, error))
    if sync and renamed:
        try:
            disk.io.fsync(shard_fd)
        except (OSError, MemoryError) as error:
            failures += [_unpublish(disk, shard_fd, write, error) for write in renamed]
    return failures


def _take_back(disk: Directory, write: Write, error: OSError | MemoryError) -> PublishFailure:
    error.__traceback__ = None  # its frames hold the list that will hold the error, and the write's slot with them
    try:
        discard(disk, write.tmp, write.n_bytes, error)
    except Stranded as stranded:
        return PublishFailure(write, error, stranded.n_bytes)
    return PublishFailure(write, error)


def _unpublish(disk: Directory, shard_fd: int, write: Write, error: OSError | MemoryError) -> PublishFailure:
    """The name may or may not survive; it was never acknowledged, so it goes."""
    error.__traceback__ = None
    try:
        disk.io.unlink(write.file.name, dir_fd=shard_fd)
    except FileNotFoundError:
        pass
    except (OSError, MemoryError):
        return PublishFailure(write, error, write.n_bytes, replaced=True)
    return PublishFailure(write, error, replaced=True)
