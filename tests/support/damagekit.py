"""Ways in which a stored file can be bad, each with the reason for which it must be refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from kvalet.store.config import BLOCK_BYTES
from storekit import FILE_BYTES

SECTOR = 512


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def swap(path: Path, a: int, b: int) -> None:
    data = bytearray(path.read_bytes())
    data[a : a + SECTOR], data[b : b + SECTOR] = data[b : b + SECTOR], data[a : a + SECTOR]
    path.write_bytes(data)


def zero(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + SECTOR] = bytes(SECTOR)
    path.write_bytes(data)


def shift(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:BLOCK_BYTES] + bytes(SECTOR) + data[BLOCK_BYTES:-SECTOR])


def duplicate(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES + SECTOR : BLOCK_BYTES + 2 * SECTOR] = data[BLOCK_BYTES : BLOCK_BYTES + SECTOR]
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit of the payload": (lambda p: flip(p, FILE_BYTES - 1), "payload"),
    "one bit of the ids": (lambda p: flip(p, 300), "header"),
    "one bit of the digest": (lambda p: flip(p, BLOCK_BYTES - 1), "header"),
    "a zeroed sector": (lambda p: zero(p, BLOCK_BYTES + SECTOR), "payload"),
    "a zeroed header sector": (lambda p: zero(p, 0), "header"),
    "swapped sectors": (lambda p: swap(p, BLOCK_BYTES, BLOCK_BYTES + SECTOR), "payload"),
    "shifted sectors": (shift, "payload"),
    "a sector twice": (duplicate, "payload"),
    "half": (lambda p: os.truncate(p, FILE_BYTES // 2), "size"),
    "empty": (lambda p: os.truncate(p, 0), "size"),
    "one byte short": (lambda p: os.truncate(p, FILE_BYTES - 1), "size"),
    "one byte long": (lambda p: os.truncate(p, FILE_BYTES + 1), "size"),
    "one block long": (lambda p: os.truncate(p, FILE_BYTES + BLOCK_BYTES), "size"),
    "a sparse file": (lambda p: (os.truncate(p, 0), os.truncate(p, FILE_BYTES)), "header"),
    "deleted": (lambda p: p.unlink(), "missing"),
}


def replace_by(kind: str, path: Path, elsewhere: Path) -> None:
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "symlink":
        path.symlink_to(elsewhere)
    elif kind == "dangling":
        path.symlink_to(elsewhere.with_name("nothing"))
    elif kind == "hard link":
        os.link(elsewhere, path)
    else:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: would give endless bytes
