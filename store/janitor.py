"""Slow chores of one store on one thread: unlinks, set-aside files, recency, free space, probes, the walk of the disk.

Everything here may fail without harm: what cannot be deleted stays in the ledger, what cannot be touched keeps an older
recency after a restart.
"""

from __future__ import annotations

import stat
import threading
from dataclasses import dataclass, field

from kvalet.store import layout
from kvalet.store.config import BLOCK_BYTES, StoreConfig
from kvalet.store.directory import Directory, log
from kvalet.store.faultwords import explain
from kvalet.store.layout import FileName


class Gate:
    """Opens when all unlinks behind it are over. ``failed``: at least one file is still there."""

    def __init__(self, n: int) -> None:
        self._left = n
        self._lock = threading.Lock()
        self._open = threading.Event()
        self.failed = False
        if n == 0:
            self._open.set()

    def one_over(self, *, ok: bool) -> None:
        with self._lock:
            self._left -= 1
            self.failed = self.failed or not ok
            if self._left == 0:
                self._open.set()

    def wait(self, timeout_s: float) -> bool:
        """True if it opened and every file is gone."""
        return self._open.wait(timeout_s) and not self.failed


@dataclass(frozen=True, slots=True)
class Burial:
    """Unlink ``file`` (or move it to bad/ first, if ``aside``); ``n_bytes`` is what the ledger holds for it."""

    file: FileName
    n_bytes: int
    gate: Gate | None = None
    aside: bool = False


@dataclass(slots=True)
class BadFolder:
    """What bad/ holds: name -> bytes, oldest first."""

    files: dict[str, int] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(self.files.values())


def round_block(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


def bury(disk: Directory, burial: Burial) -> bool:
    """Unlink one file. True if it is gone (or was)."""
    file = burial.file
    try:
        shard_fd = disk.open_shard(file.folder, file.shard)
        try:
            disk.io.unlink(file.name, dir_fd=shard_fd)
        finally:
            disk.close_quietly(shard_fd)
    except FileNotFoundError:
        return True
    except (OSError, MemoryError) as error:
        log.warning("store: %s/%s/%s could not be deleted: %s", file.folder, file.shard, file.name, explain(error))
        return False
    return True


def set_aside(disk: Directory, bad: BadFolder, burial: Burial, config: StoreConfig, now_ns: int) -> bool:
    """Move a refused file to bad/ and keep bad/ small. True if the file is gone from its shard."""
    file = burial.file
    name = layout.bad_name(now_ns, file.name)
    try:
        shard_fd = disk.open_shard(file.folder, file.shard)
        try:
            disk.io.rename(file.name, name, old_dir=shard_fd, new_dir=disk.folder_fds[layout.BAD])
        finally:
            disk.close_quietly(shard_fd)
    except FileNotFoundError:
        return True
    except (OSError, MemoryError):
        return bury(disk, burial)
    bad.files[name] = burial.n_bytes  # until the scan has its true size (it may have been truncated or extended)
    try:
        bad.files.update((found, n_bytes) for found, n_bytes in _scan_bad(disk) if found == name)
    except (OSError, MemoryError) as error:
        log.warning("store: the size of bad/%s is not known: %s", name, explain(error))
    trim_bad(disk, bad, config)
    return True


def load_bad(disk: Directory) -> BadFolder:
    """At open: what earlier runs set aside, oldest first (their names begin with the time)."""
    return BadFolder(dict(sorted(_scan_bad(disk))))


def _scan_bad(disk: Directory) -> list[tuple[str, int]]:
    found = disk.io.scan(disk.folder_fds[layout.BAD])
    return [(name, round_block(st.size)) for name, st in found if layout.is_bad_name(name) and stat.S_ISREG(st.mode)]


def trim_bad(disk: Directory, bad: BadFolder, config: StoreConfig) -> None:
    while bad.files and (len(bad.files) > config.bad_files or bad.n_bytes > config.bad_bytes):
        name = next(iter(bad.files))
        try:
            disk.io.unlink(name, dir_fd=disk.folder_fds[layout.BAD])
        except FileNotFoundError:
            pass
        except (OSError, MemoryError) as error:
            log.warning("store: bad/%s could not be deleted: %s", name, explain(error))
            return
        del bad.files[name]
