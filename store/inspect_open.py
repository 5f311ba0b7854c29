"""Opening a store directory to look at it, beside a running server, or to change it, instead of one.

Looking takes no lock: it writes nothing, files appear only whole and by rename, and a file that vanishes while somebody
looks was evicted. Whether a server runs is read from the kernel's list of locks, because even trying the lock could make a
server that starts at that moment believe that the store is in use.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvalet.store import layout, storefiles
from kvalet.store.config import StoreConfig
from kvalet.store.errors import StoreNewer, StoreRefused
from kvalet.store.faultwords import STRANGE, explain
from kvalet.store.fileio import DIRECTORY_FLAGS, FileIO
from kvalet.store.ids import Identity

SECRET_BYTES = 32
KERNEL_LOCKS = Path("/proc/locks")
PRIVATE = 0o077
"""No bit of these may be set on anything in a store."""
LEFT_ALONE = frozenset({"lost+found"})
SMALL_FILES = (layout.STORE_FILE, layout.SECRET_FILE, layout.IDENTITY_FILE, layout.LOCK_FILE, layout.BUDGET_FILE)
MADE_WITH_A_STORE = frozenset({layout.SECRET_FILE, layout.LOCK_FILE, layout.IDENTITY_FILE})
"""One of them beside the chunks says that this is a store, though its STORE is lost."""
HALF_WRITTEN = frozenset(f".{name}.new" for name in SMALL_FILES)
"""What a kill in the middle of making a store leaves; the next opening replaces it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in the directory that is not as docs/store-format.md says. ``path``: relative to the store, as the system has
    it (any bytes). ``reason``: a word of that page, or "mode"; ``field``: what differs."""

    path: str
    reason: str
    field: str


@dataclass(slots=True)
class Place:
    """An open store directory. ``owner``: whose files it should hold. ``store_id``, ``secret`` and ``identity`` (the digest of
    IDENTITY) are None where their file is missing or damaged, which ``findings`` then says. ``folder_fds``: those folders
    that are there and are directories. ``lock_fd`` is -1 when opened to look."""

    path: str
    io: FileIO
    root_fd: int
    owner: int
    store_id: bytes | None = None
    secret: bytes | None = None
    identity: bytes | None = None
    identity_fields: tuple[tuple[str, str], ...] = ()
    folder_fds: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lock_fd: int = -1

    def close(self) -> None:
        for fd in (*self.folder_fds.values(), self.root_fd, self.lock_fd):
            if fd >= 0:
                os.close(fd)
        self.folder_fds = {}

    def close_quietly(self, fd: int) -> None:
        """For descriptors of directories and of files that were only read: nothing depends on how closing ends."""
        with suppress(OSError):
            self.io.close(fd)

    def free_bytes(self) -> int | None:
        """None where the system does not tell."""
        try:
            return self.io.free_bytes(self.root_fd)
        except OSError:
            return None


@contextmanager
def open_to_look(path: str, io: FileIO | None = None) -> Iterator[Place]:
    """StoreRefused with one sentence if this is no store or cannot be listed. Changes nothing, takes no lock."""
    place = _open_root(path, io or FileIO())
    try:
        try:
            _look(place)
        except OSError as error:
            raise StoreRefused(f"The store {path!r} cannot be read: {explain(error)}.") from error
        yield place
    finally:
        place.close()


@contextmanager
def open_to_change(path: str, io: FileIO | None = None) -> Iterator[Place]:
    """With the store's lock, so that no server runs meanwhile. StoreLocked names the pid of the holder; StoreRefused too for
    a store whose STORE is missing or damaged, that is another user's, or on a network file system."""
    place = _open_root(path, io or FileIO())
    try:
        try:
            _lock(place)
            _look(place)
        except OSError as error:
            raise StoreRefused(f"The store {path!r} cannot be changed: {explain(error)}.") from error
        yield place
    finally:
        place.close()


def _lock(place: Place) -> None:
    path = place.path
    if place.owner != os.geteuid():
        raise StoreRefused(f"The store {path!r} belongs to user {place.owner}; run this as that user.")
    if os.fstat(place.root_fd).st_mode & 0o022:
        raise StoreRefused(f"The store {path!r} can be written by others; run chmod 700 on it.")
    storefiles.refuse_network(place.root_fd, StoreConfig(path, 0))
    data = storefiles.read_small(place.root_fd, layout.STORE_FILE)
    if data is None:
        raise StoreRefused(f"The file STORE in {path!r} is missing; nothing was changed.")
    storefiles.parse_store_line(path, data)
    place.lock_fd = storefiles.take_lock(path, place.root_fd)


def _open_root(path: str, io: FileIO) -> Place:
    try:
        fd = os.open(path, DIRECTORY_FLAGS)
    except FileNotFoundError:
        raise StoreRefused(f"There is no directory {path!r}.") from None
    except (OSError, ValueError) as error:
        raise StoreRefused(f"The store path {path!r} cannot be opened as a directory: {explain(error)}.") from error
    try:
        names = set(os.listdir(fd))
        if layout.STORE_FILE not in names and not (layout.CHUNKS in names and names & MADE_WITH_A_STORE):
            raise StoreRefused(f"The directory {path!r} holds no kvalet store (no file named STORE).")
        return Place(path, io, fd, os.fstat(fd).st_uid)
    except OSError as error:
        os.close(fd)
        raise StoreRefused(f"The store {path!r} cannot be listed: {explain(error)}.") from error
    except StoreRefused:
        os.close(fd)
        raise


def _look(place: Place) -> None:
    """Root names, small files, folders."""
    for name, st in sorted(place.io.scan(place.root_fd)):
        if name in layout.FOLDERS:
            _look_at_folder(place, name)
        elif name not in {*SMALL_FILES, *HALF_WRITTEN, *LEFT_ALONE}:
            place.findings.append(Finding(name, "foreign", "name"))
        elif name not in LEFT_ALONE and st.mode & PRIVATE and stat.S_ISREG(st.mode):
            place.findings.append(Finding(name, "mode", f"{stat.S_IMODE(st.mode):04o}"))
    root_mode = os.fstat(place.root_fd).st_mode
    if root_mode & PRIVATE:
        place.findings.append(Finding(".", "mode", f"{stat.S_IMODE(root_mode):04o}"))
    data = _small(place, layout.STORE_FILE, storefiles.STORE_LIMIT)
    if data is not None:
        try:
            place.store_id = storefiles.parse_store_line(place.path, data)
        except StoreNewer:
            raise
        except StoreRefused:
            place.findings.append(Finding(layout.STORE_FILE, "header", "digest"))
    secret = _small(place, layout.SECRET_FILE, storefiles.STORE_LIMIT)
    if secret is not None and len(secret) != SECRET_BYTES:
        place.findings.append(Finding(layout.SECRET_FILE, "size", f"{len(secret)} bytes"))
    elif secret is not None:
        place.secret = secret
    _look_at_identity(place)


def _look_at_folder(place: Place, name: str) -> None:
    try:
        fd = place.io.open(name, DIRECTORY_FLAGS, dir_fd=place.root_fd)
    except OSError as error:
        place.findings.append(Finding(name, "foreign", explain(error)))
        return
    place.folder_fds[name] = fd
    mode = os.fstat(fd).st_mode
    if mode & PRIVATE:
        place.findings.append(Finding(name, "mode", f"{stat.S_IMODE(mode):04o}"))


def _small(place: Place, name: str, limit: int) -> bytes | None:
    try:
        data = storefiles.read_small(place.root_fd, name, limit)
    except StoreRefused:
        place.findings.append(Finding(name, "foreign", "not a file of ours"))
        return None
    except OSError as error:
        place.findings.append(Finding(name, "foreign" if error.errno in STRANGE else "io", explain(error)))
        return None
    if data is None:
        place.findings.append(Finding(name, "missing", "no such file"))
    return data


def _look_at_identity(place: Place) -> None:
    data = _small(place, layout.IDENTITY_FILE, storefiles.IDENTITY_LIMIT)
    if data is None:
        return
    try:
        fields = json.loads(data)
        texts = {name: value for name, value in fields.items() if isinstance(value, str)}
        if len(texts) != len(fields):
            raise ValueError("a value that is no text")
        identity = Identity.of(texts)
    except (ValueError, AttributeError, RecursionError):
        place.findings.append(Finding(layout.IDENTITY_FILE, "header", "no JSON object of texts"))
        return
    place.identity, place.identity_fields = identity.digest, identity.fields


def holder(place: Place) -> str:
    """Pid of the process that holds the store's lock, "" if none does or it cannot be told. Asks the kernel's list, matched by
    inode, and by device or by the pid that stands in LOCK (file systems such as overlayfs show another device)."""
    try:
        st = os.stat(layout.LOCK_FILE, dir_fd=place.root_fd, follow_symlinks=False)
        written = storefiles.read_small(place.root_fd, layout.LOCK_FILE) or b""
        lines = KERNEL_LOCKS.read_text().splitlines()
    except (OSError, StoreRefused):
        return ""
    device = f"{os.major(st.st_dev):02x}:{os.minor(st.st_dev):02x}"
    for line in lines:
        words = line.split()
        if len(words) < 8 or words[1] != "FLOCK" or words[3] != "WRITE":
            continue
        where, _, inode = words[5].rpartition(":")
        if inode == str(st.st_ino) and (where == device or words[4] == written.decode("ascii", "replace").strip()):
            return words[4]
    return ""
