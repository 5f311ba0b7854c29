"""The small files that make a directory a store: LOCK, STORE, SECRET; and which directories are refused.

Whoever holds the lock may write; the lock is a flock, so it ends with the process, however that ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import re
import stat
import time
from contextlib import ExitStack

from kvalet.store import layout
from kvalet.store.config import StoreConfig
from kvalet.store.errors import StoreLocked, StoreNewer, StoreRefused
from kvalet.store.fileio import CREATE_FLAGS, READ_FLAGS
from kvalet.store.header import FORMAT_VERSION, digest
from kvalet.store.ids import Identity

log = logging.getLogger("kvalet.store")
NETWORK_TYPES = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x01021997: "9p",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x0BD00BD0: "Lustre",
}
IDENTITY_LIMIT = 1 << 20
STORE_LIMIT = 4096
"""STORE is one line; anything longer is not ours."""


def refuse_network(root_fd: int, config: StoreConfig) -> None:
    kind = NETWORK_TYPES.get(file_system_type(root_fd))
    if kind and not config.force_network_fs:
        raise StoreRefused(
            f"The store directory {config.directory!r} is on a network file system ({kind}), whose locks and flushes kvalet "
            "does not trust; use a local disk, or force it."
        )


def file_system_type(fd: int) -> int:
    """f_type of fstatfs (Linux); 0 where it cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(256)
        if libc.fstatfs(fd, buffer):
            return 0
    except (OSError, AttributeError):
        return 0
    return int(ctypes.c_ulong.from_buffer(buffer).value) & 0xFFFFFFFF


def refuse_unknown(path: str, root_fd: int) -> None:
    """A directory that has files but no STORE is somebody else's."""
    names = os.listdir(root_fd)
    ours = {layout.LOCK_FILE, layout.SECRET_FILE, ".STORE.new", ".SECRET.new", "lost+found", *layout.FOLDERS}
    if layout.STORE_FILE not in names and not ours.issuperset(names):
        raise StoreRefused(f"The directory {path!r} is not empty and holds no kvalet store (no file named STORE).")


def take_lock(path: str, root_fd: int) -> int:
    fd = os.open(layout.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
    with ExitStack() as opened:
        opened.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreRefused(f"LOCK in the store {path!r} is not a regular file.")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreLocked(f"The store {path!r} is in use by another kvalet process (pid {holder}).") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        opened.pop_all()
    return fd


def read_small(root_fd: int, name: str, limit: int = STORE_LIMIT) -> bytes | None:
    """Contents of a regular file of ours, at most ``limit`` bytes; None if it does not exist."""
    try:
        fd = os.open(name, READ_FLAGS, dir_fd=root_fd)
    except FileNotFoundError:
        return None
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_size > limit:
            raise StoreRefused(f"{name} in the store is not a file that kvalet wrote.")
        return os.read(fd, limit)
    finally:
        os.close(fd)


def write_small(root_fd: int, name: str, data: bytes) -> None:
    """Durable, by rename; readers see all of it or nothing."""
    tmp = f".{name}.new"
    try:
        os.unlink(tmp, dir_fd=root_fd)
    except FileNotFoundError:
        pass
    fd = os.open(tmp, CREATE_FLAGS, 0o600, dir_fd=root_fd)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(tmp, name, src_dir_fd=root_fd, dst_dir_fd=root_fd)
    os.fsync(root_fd)


def store_file(path: str, root_fd: int) -> tuple[bytes, bool]:
    data = read_small(root_fd, layout.STORE_FILE)
    if data is None:
        store_id = os.urandom(16)
        write_small(root_fd, layout.STORE_FILE, store_line(store_id, int(time.time())))
        return store_id, True
    return parse_store_line(path, data), False


def store_line(store_id: bytes, created_s: int) -> bytes:
    """One JSON line and its own digest: {"created": ..., "format": 1, "store_id": "..."} <32 hex>."""
    body = json.dumps({"created": created_s, "format": FORMAT_VERSION, "store_id": store_id.hex()}, sort_keys=True).encode()
    return body + b" " + digest(body).hex().encode() + b"\n"


def parse_store_line(path: str, data: bytes) -> bytes:
    """The store id. StoreRefused if the line is damaged, StoreNewer if a later version wrote it."""
    match = re.fullmatch(rb"(\{.*\}) ([0-9a-f]{32})\n", data)
    if not match or digest(match[1]).hex().encode() != match[2]:
        raise StoreRefused(f"The file STORE in {path!r} is damaged; nothing was changed. Restore it or use a new directory.")
    fields = json.loads(match[1])
    if fields["format"] != FORMAT_VERSION:
        raise StoreNewer(f"The store {path!r} has format {fields['format']}; this kvalet reads format {FORMAT_VERSION}.")
    return bytes.fromhex(fields["store_id"])


def identity_file(path: str, root_fd: int, identity: Identity) -> list[str]:
    """Which fields of the identity differ from those of the last opening ("kv_dtype: bf16 -> fp32"); informational. Chunks
    of another identity have other keys, so they are not found; they stay until they are the least recent. Then the file is
    brought up to date. A damaged or missing IDENTITY names no field."""
    data = read_small(root_fd, layout.IDENTITY_FILE, IDENTITY_LIMIT)
    now = json.dumps(dict(identity.fields), sort_keys=True).encode()
    if data == now:
        return []
    write_small(root_fd, layout.IDENTITY_FILE, now)
    try:
        before = json.loads(data or b"null")
    except ValueError:
        before = None
    if not isinstance(before, dict):
        return []
    after = dict(identity.fields)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"{name}: {before.get(name, '(none)')} -> {after.get(name, '(none)')}" for name in names]


def secret_file(path: str, root_fd: int, *, created: bool) -> bytes:
    """Made with the store. If it was lost, a new one is made: nothing stored under the old one is ever found again."""
    data = read_small(root_fd, layout.SECRET_FILE)
    if data is None:
        if not created:
            log.warning("store %r: SECRET is missing; a new one is made, and what was stored before will not be used", path)
        data = os.urandom(32)
        write_small(root_fd, layout.SECRET_FILE, data)
    if len(data) != 32:
        raise StoreRefused(f"The file SECRET in the store {path!r} must have 32 bytes, not {len(data)}.")
    return data
