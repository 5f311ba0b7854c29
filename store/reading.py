"""Reading one chunk or tail file into a slot and believing none of it. Runs on reader threads; touches no index."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvalet.store import header
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.directory import Directory
from kvalet.store.faultwords import NO_DIRECT, STRANGE, explain, read_reason
from kvalet.store.fileio import READ_FLAGS, FileStat
from kvalet.store.header import Header, Home, Refused
from kvalet.store.ids import ChunkKey, ChunkMeta, chunk_key
from kvalet.store.jobs import NO_KEY
from kvalet.store.layout import FileName
from kvalet.store.record import Record

MAX_TAIL_CANDIDATES = 4


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """``reason`` and ``field`` as in Refused ("" = the slot holds the verified payload). ``file``: which file was read or
    refused. ``stranger``: what stands there is not a file of ours (a link, a pipe, another owner) and must not be touched."""

    reason: str = ""
    field: str = ""
    file: FileName | None = None
    key: ChunkKey = NO_KEY
    parent: bytes = b""
    ids: tuple[int, ...] = ()
    n_bytes: int = 0
    read_ms: float = 0.0
    verify_ms: float = 0.0
    stranger: bool = False
    record: Record | None = None


class Stranger(Exception):
    """What stands under the name is not a regular file that we wrote."""


def read_chunk(disk: Directory, home: Home, meta: ChunkMeta, file: FileName, slot: memoryview) -> ReadOutcome:
    """Whole file into ``slot``, verified against ``meta``. Never raises for what the disk does; the slot's bytes are
    worthless unless ``reason`` is ""."""
    n_bytes = home.geometry.bytes_of(meta)
    started = time.perf_counter()
    try:
        refused = _read_file(disk, file, slot, n_bytes)
    except (OSError, MemoryError) as error:
        return failed(error, file)
    except Stranger as strange:
        return ReadOutcome("foreign", str(strange), file, stranger=True)
    read_ms = (time.perf_counter() - started) * 1e3
    if refused is None:
        refused = verify(home, meta, slot[:n_bytes])
    verify_ms = (time.perf_counter() - started) * 1e3 - read_ms
    if refused is not None:
        return ReadOutcome(refused.reason, refused.field, file, read_ms=read_ms, verify_ms=verify_ms)
    return ReadOutcome("", "", file, meta.key, meta.parent, meta.ids, n_bytes, read_ms, verify_ms)


def verify(home: Home, meta: ChunkMeta, data: memoryview) -> Refused | None:
    """Header fields against ``meta``, then the payload against the header's digest."""
    found = header.unpack(data[:BLOCK_BYTES])
    if isinstance(found, Refused):
        return found
    refused = header.refuse_meta(found, home, meta)
    if refused is None and header.digest(data[BLOCK_BYTES:]) != found.payload_digest:
        refused = Refused("payload", "payload_digest")
    return refused


@dataclass(frozen=True, slots=True)
class TailWish:
    """What a reader of tails expects: any tail after ``parent`` whose ids begin as ``ids`` do. ``secret``: the tenant's."""

    parent: bytes
    ordinal: int
    first_token: int
    ids: tuple[int, ...]
    secret: bytes


def read_tail(disk: Directory, home: Home, wish: TailWish, files: Sequence[FileName], slot: memoryview) -> list[ReadOutcome]:
    """Headers of up to 4 ``files``, then the one with the longest common prefix whole. The last outcome is the answer;
    those before it are candidates that were refused on the way (to be acted upon like any refusal)."""
    refusals: list[ReadOutcome] = []
    found: list[tuple[int, FileName, Header]] = []
    for file in files[:MAX_TAIL_CANDIDATES]:
        outcome = _tail_header(disk, home, wish, file, slot)
        if isinstance(outcome, ReadOutcome):
            refusals.append(outcome)
        else:
            common = common_prefix(outcome.ids, wish.ids)
            if common:
                found.append((common, file, outcome))
    found.sort(key=lambda item: item[0], reverse=True)  # stable: of equals the most recent stays first
    for _, file, head in found:
        outcome = read_chunk(disk, home, _meta_of(head, wish, file), file, slot)
        refusals.append(outcome)
        if not outcome.reason:
            return refusals
    if not refusals:
        refusals.append(ReadOutcome("no_prefix", "ids"))
    return refusals


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items are equal."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _tail_header(disk: Directory, home: Home, wish: TailWish, file: FileName, slot: memoryview) -> Header | ReadOutcome:
    try:
        refused = _read_file(disk, file, slot, BLOCK_BYTES, whole=False)
    except (OSError, MemoryError) as error:
        return failed(error, file)
    except Stranger as strange:
        return ReadOutcome("foreign", str(strange), file, stranger=True)
    head = refused or header.unpack(slot[:BLOCK_BYTES])
    if isinstance(head, Header):
        refused = header.refuse_home(head, home) or _refuse_tail(head, home, wish, file)
        if refused is None:
            return head
        head = refused
    return ReadOutcome(head.reason, head.field, file)


def _refuse_tail(head: Header, home: Home, wish: TailWish, file: FileName) -> Refused | None:
    """A tail's ids come from its own header, so its key is computed again from them."""
    for name, expected in (
        ("kind", header.KIND_TAIL),
        ("parent", wish.parent),
        ("ordinal", wish.ordinal),
        ("first_token", wish.first_token),
        ("n_tokens", file.n_tokens),
        ("n_pages", home.geometry.pages_for(file.n_tokens)),
    ):
        if getattr(head, name) != expected:
            return Refused("key", name)
    if head.key[:8] != file.index_key:
        return Refused("key", "key")
    if head.key != chunk_key(wish.secret, wish.parent, head.ids):
        return Refused("no_prefix", "tenant")  # first chunks of all tenants have one parent; the file is right, but not ours
    return None


def _meta_of(head: Header, wish: TailWish, file: FileName) -> ChunkMeta:
    key = ChunkKey(head.key)
    return ChunkMeta(key, wish.parent, wish.ordinal, wish.first_token, head.ids, head.n_pages, tail=True)


def refuse_strangers(st: FileStat) -> None:
    """Stranger if it is not a regular file of ours that nothing else links to."""
    if not stat.S_ISREG(st.mode):
        raise Stranger("not a regular file")
    if st.nlink != 1:
        raise Stranger("hard link")
    if st.uid != os.geteuid():
        raise Stranger("owner")


def failed(error: OSError | MemoryError, file: FileName) -> ReadOutcome:
    reason = read_reason(error)
    return ReadOutcome(reason, explain(error), file, stranger=isinstance(error, OSError) and error.errno in STRANGE)


def _read_file(disk: Directory, file: FileName, slot: memoryview, n_bytes: int, *, whole: bool = True) -> Refused | None:
    """``n_bytes`` from the start of the file into the slot. ``whole``: the file must be exactly that long."""
    shard_fd = disk.open_shard(file.folder, file.shard)
    try:
        flags = disk.data_flags
        try:
            return _read_once(disk, shard_fd, file, slot[:n_bytes], flags, whole=whole)
        except OSError as error:
            if not flags or error.errno not in NO_DIRECT:
                raise
        # a directory or a FIFO refuses direct I/O whatever the file system can do: only a good file tells
        found = _read_once(disk, shard_fd, file, slot[:n_bytes], 0, whole=whole)
        disk.direct_refused(f"read of {file.folder}/{file.shard}/{file.name[:16]}")
        return found
    finally:
        disk.close_quietly(shard_fd)


def _read_once(disk: Directory, shard_fd: int, file: FileName, view: memoryview, flags: int, *, whole: bool) -> Refused | None:
    io = disk.io
    fd = io.open(file.name, READ_FLAGS | flags, dir_fd=shard_fd)
    try:
        st = io.fstat(fd)
        refuse_strangers(st)
        if st.size != len(view) if whole else st.size < len(view):
            return Refused("size", "file size")
        done = 0
        while done < len(view):
            n = io.preadv(fd, [view[done:]], done)
            if n <= 0:
                return Refused("size", "short file")
            done += n
            if flags and done < len(view):
                done -= done % BLOCK_BYTES  # direct I/O goes on at a block boundary only
                if n < BLOCK_BYTES:
                    return Refused("size", "short read")
        if not flags:
            io.drop_cache(fd)
        return None
    finally:
        disk.close_quietly(fd)
