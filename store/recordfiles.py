"""Reading one record file and believing none of it. Runs on reader threads, and at open; touches no index.

Memory: one record at a time per thread, at most MAX_RECORD_BYTES and what it decodes to; no slot of the caller's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvalet.store import layout
from kvalet.store.directory import Directory
from kvalet.store.fileio import READ_FLAGS
from kvalet.store.header import Refused
from kvalet.store.layout import FileName
from kvalet.store.reading import ReadOutcome, Stranger, failed, refuse_strangers
from kvalet.store.record import (
    MAX_RECORD_BYTES,
    RECORD_HEADER_BYTES,
    Record,
    RecordHead,
    RecordHome,
    decode,
    refuse_home,
    unpack,
    verify,
)


@dataclass(frozen=True, slots=True)
class RecordWish:
    """What a reader expects: whose record, and of which identity."""

    tenant: str
    session: str
    branch: str
    home: RecordHome


def wish_for(disk: Directory, identity: bytes, tenant: str, session: str, branch: str) -> RecordWish:
    tenant_hash = layout.tenant_hash(disk.secret, tenant)
    home = RecordHome(disk.store_id, identity, tenant_hash, layout.session_hash(disk.secret, tenant_hash, session))
    return RecordWish(tenant, session, branch, home)


def read_record(disk: Directory, wish: RecordWish, file: FileName) -> ReadOutcome:
    """Whole file, verified and understood. Never raises for what the disk does."""
    started = time.perf_counter()
    try:
        data = read_bytes(disk, file, MAX_RECORD_BYTES)
    except (OSError, MemoryError) as error:
        return failed(error, file)
    except Stranger as strange:
        return ReadOutcome("foreign", str(strange), file, stranger=True)
    read_ms = (time.perf_counter() - started) * 1e3
    found = _understand(data, wish, file)
    verify_ms = (time.perf_counter() - started) * 1e3 - read_ms
    if isinstance(found, Refused):
        return ReadOutcome(found.reason, found.field, file, read_ms=read_ms, verify_ms=verify_ms)
    return ReadOutcome("", "", file, n_bytes=len(data), read_ms=read_ms, verify_ms=verify_ms, record=found)


def _understand(data: bytes, wish: RecordWish, file: FileName) -> Record | Refused:
    head = unpack(data[:RECORD_HEADER_BYTES])
    if isinstance(head, Refused):
        return head
    refused = refuse_home(head.home, wish.home)
    if refused is not None:
        return refused
    found = decode(data, tenant=wish.tenant)
    if isinstance(found, Refused):
        return found
    return refuse_name(found, file, wish.home.session) or found


def refuse_name(record: Record, file: FileName, session: bytes) -> Refused | None:
    """Does the file stand under the name that its contents give it?"""
    for name, told, found in (
        ("branch", record.branch, file.branch),
        ("head", record.head, file.head),
        ("pinned", record.pinned, file.pinned),
        ("session", session, file.session),
    ):
        if told != found:
            return Refused("key", name)
    return None


def read_keys(disk: Directory, file: FileName) -> tuple[tuple[bytes, ...], int | None] | Refused:
    """What the record in ``file`` names, of whatever identity, and its ttl; for its pins at open. Raises as ``read_bytes``."""
    data = read_bytes(disk, file, MAX_RECORD_BYTES)
    head = verify(data)
    if isinstance(head, Refused):
        return head
    if head.home.store_id != disk.store_id:
        return Refused("foreign", "store_id")
    found = decode(data)
    if isinstance(found, Refused):
        return found
    return refuse_name(found, file, head.home.session) or (found.keys, found.ttl_s)


def read_head(disk: Directory, file: FileName) -> RecordHead | Refused:
    """Only the header; for its ttl. Raises as ``read_bytes``."""
    return unpack(read_bytes(disk, file, RECORD_HEADER_BYTES, whole=False))


def read_bytes(disk: Directory, file: FileName, at_most: int, *, whole: bool = True) -> bytes:
    """The file's first ``at_most`` bytes; ``whole``: all of it, or as much as ``verify`` needs to see that it is too long.
    OSError, MemoryError, Stranger."""
    io = disk.io
    shard_fd = disk.open_shard(file.folder, file.shard)
    try:
        fd = io.open(file.name, READ_FLAGS, dir_fd=shard_fd)
        try:
            st = io.fstat(fd)
            refuse_strangers(st)
            data = bytearray(min(st.size, at_most + whole))
            with memoryview(data) as view:
                done = 0
                while done < len(view) and (n := io.preadv(fd, [view[done:]], done)) > 0:
                    done += n
            io.drop_cache(fd)
            return bytes(data[:done])
        finally:
            disk.close_quietly(fd)
    finally:
        disk.close_quietly(shard_fd)
