"""All system calls of the store, in one small object, so that tests can make any of them fail, lie or hang.

Paths are relative to directory descriptors; the last component is never followed when it is a symbolic link.
Every method raises ``OSError`` as the system call does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileStat(NamedTuple):
    """What the store looks at: ``mode`` with the file type, owner, links, size in bytes, mtime in ns, device and inode."""

    mode: int
    uid: int
    nlink: int
    size: int
    mtime_ns: int
    dev: int
    ino: int

    @classmethod
    def of(cls, st: os.stat_result) -> FileStat:
        return cls(st.st_mode, st.st_uid, st.st_nlink, st.st_size, st.st_mtime_ns, st.st_dev, st.st_ino)


class FileIO:
    """The real thing: one method, one system call (``scan`` is readdir plus one stat per name)."""

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> FileStat:
        return FileStat.of(os.fstat(fd))

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, old: str, new: str, *, old_dir: int, new_dir: int) -> None:
        """Replaces ``new`` if it exists."""
        os.rename(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        os.unlink(path, dir_fd=dir_fd)

    def mkdir(self, path: str, *, dir_fd: int) -> None:
        os.mkdir(path, 0o700, dir_fd=dir_fd)

    def utime(self, target: str | int, mtime_ns: int, *, dir_fd: int | None = None) -> None:
        """``target``: a name relative to ``dir_fd`` (not followed), or an open descriptor."""
        if isinstance(target, int):
            os.utime(target, ns=(mtime_ns, mtime_ns))
        else:
            os.utime(target, ns=(mtime_ns, mtime_ns), dir_fd=dir_fd, follow_symlinks=False)

    def scan(self, fd: int) -> list[tuple[str, FileStat]]:
        """Names of a directory with their own (not their targets') stat; names that vanish meanwhile are left out."""
        found = []
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    found.append((entry.name, FileStat.of(entry.stat(follow_symlinks=False))))
                except FileNotFoundError:
                    continue
        return found

    def free_bytes(self, fd: int) -> int:
        """Bytes an ordinary user can still write on the file system of ``fd``."""
        st = os.fstatvfs(fd)
        return st.f_bavail * st.f_frsize

    def drop_cache(self, fd: int) -> None:
        """Buffered files only: the page cache is not a tier of ours."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
