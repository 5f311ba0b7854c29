"""Verifying one stored file without knowing what a session expects of it: its name, its header and its payload must
agree with each other and with the store. The comparisons are those of store/header.py, with the name's and the header's own
claims as what is expected.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from kvalet.store import header, layout, record
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.faultwords import NO_DIRECT, explain, read_reason
from kvalet.store.fileio import DIRECTORY_FLAGS, READ_FLAGS, FileStat
from kvalet.store.header import Geometry, Header, Home, Refused
from kvalet.store.ids import ChunkKey, ChunkMeta, StatePart, ids_le
from kvalet.store.inspect_open import Place
from kvalet.store.inspect_walk import Found, strangeness
from kvalet.store.layout import FileName
from kvalet.store.record import MAX_RECORD_BYTES, RECORD_HEADER_BYTES, RecordHead, RecordHome
from kvalet.store.recordfiles import refuse_name

PIECE_BYTES = 4 << 20
"""Payloads are read and digested in pieces of this size, whatever the file's size."""
LOOKS = 4
"""How often a refused file is looked at again when another has taken its name meanwhile."""
GONE = "gone"
"""Not a reason: the file was evicted while it was looked at."""


class Interrupted(Exception):
    """The person does not want to know any more."""


class Facts(NamedTuple):
    """What is kept of a header: 100,000 whole ones would take a gigabyte. ``ids``: u32 little-endian, only where asked for."""

    identity: bytes
    key: bytes
    parent: bytes
    ordinal: int
    n_tokens: int
    ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` and ``field`` as in Refused, "" = good, GONE = not there any more. ``facts``: of a header that agrees with
    the file's name. ``read_bytes``: how much was read for it. ``data``: all of a record's file, if it is good and was asked
    for."""

    found: Found
    reason: str = ""
    field: str = ""
    facts: Facts | None = None
    read_bytes: int = 0
    data: bytes = b""


class Everything:
    """Holds everything."""

    def __contains__(self, item: object) -> bool:
        return True


class Reader:
    """Reads files of one store in one thread, with one buffer of PIECE_BYTES. ``direct``: past the page cache where the file
    system allows it. ``stopped`` is asked between pieces. ``ids_after``: of chunks and tails after these parents the token ids
    are kept."""

    def __init__(
        self,
        place: Place,
        *,
        direct: bool = True,
        stopped: Callable[[], bool] = lambda: False,
        ids_after: Container[bytes] = frozenset(),
    ) -> None:
        self._ids_after = ids_after
        self._place = place
        self._io = place.io
        self._flags = os.O_DIRECT if direct else 0
        self._stopped = stopped
        self._buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))

    def examine(self, found: Found, *, payload: bool) -> Verdict:
        """Header, and with ``payload`` all of the file. Never raises for what the disk does; Interrupted if stopped. A file
        that is refused counts only if it still stands there: one that was replaced is looked at again, one that was evicted
        is GONE."""
        for _ in range(LOOKS):
            verdict, seen = self._once(found, payload=payload)
            if verdict.reason in ("", GONE):
                return verdict
            now = self._stat(found.file)
            if now is None:
                return Verdict(found, GONE)
            if seen is not None and (now.dev, now.ino) == (seen.dev, seen.ino):
                return verdict
            found = Found(found.file, now)
        return verdict

    def _once(self, found: Found, *, payload: bool) -> tuple[Verdict, FileStat | None]:
        """The verdict, and which file it is about (None if it could not be opened: then about the one that ``found`` saw)."""
        fd, st = -1, None
        try:
            fd = self._open(found.file)
            st = self._io.fstat(fd)
            return self._verify(fd, st, found, payload=payload), st
        except FileNotFoundError:
            return Verdict(found, GONE), None
        except (OSError, MemoryError) as error:
            if not (self._flags and isinstance(error, OSError) and error.errno in NO_DIRECT):
                return Verdict(found, read_reason(error), explain(error)), st or found.st
        finally:
            if fd >= 0:
                self._place.close_quietly(fd)
        self._flags = 0  # the file system takes no direct I/O: buffered from here on
        return self._once(found, payload=payload)

    def _verify(self, fd: int, st: FileStat, found: Found, *, payload: bool) -> Verdict:
        if st.nlink == 0:
            return Verdict(found, GONE)
        strange = strangeness(st, self._place.owner)
        if strange:
            return Verdict(found, "foreign", strange)
        if found.file.folder == layout.RECORDS:
            return self._verify_record(fd, st, found, payload=payload)
        if st.size < BLOCK_BYTES or self._read(fd, 0, BLOCK_BYTES) < BLOCK_BYTES:
            return Verdict(found, "size", "shorter than a header")
        head = header.unpack(self._buffer[:BLOCK_BYTES])
        if isinstance(head, Refused):
            return Verdict(found, head.reason, head.field, read_bytes=BLOCK_BYTES)
        refused = refuse(head, found.file, self._place.store_id)
        facts = None if refused else self._facts(head)
        refused = refused or _refuse_size(head, st)
        n_read = BLOCK_BYTES
        if refused is None and payload:
            refused = self._refuse_payload(fd, head)
            n_read += head.payload_len
        if not self._flags:
            self._io.drop_cache(fd)
        reason, field = (refused.reason, refused.field) if refused else ("", "")
        return Verdict(found, reason, field, facts, n_read)

    def _verify_record(self, fd: int, st: FileStat, found: Found, *, payload: bool) -> Verdict:
        """A record is small: with ``payload`` it is read whole and decoded. The secret, where it is known, tells whether its
        session belongs to its name."""
        if not RECORD_HEADER_BYTES <= st.size <= MAX_RECORD_BYTES:
            return Verdict(found, "size", "file size")
        data = self._read_all(fd, st.size) if payload else bytes(self._buffer[: self._read(fd, 0, min(st.size, BLOCK_BYTES))])
        head = record.unpack(data)
        if not isinstance(head, Refused):
            refused = refuse_record(head, found.file, self._place.store_id)
            refused = refused or (Refused("size", "file size") if head.file_bytes != st.size else None)
            if refused is None and payload:
                refused = self._refuse_content(data, head, found.file)
            head = refused or head
        if not self._flags:
            self._io.drop_cache(fd)
        if isinstance(head, Refused):
            return Verdict(found, head.reason, head.field, read_bytes=len(data))
        return Verdict(found, read_bytes=len(data), data=data if payload else b"")

    def _refuse_content(self, data: bytes, head: RecordHead, file: FileName) -> Refused | None:
        decoded = record.decode(data)
        if isinstance(decoded, Refused):
            return decoded
        secret, session = self._place.secret, file.session
        if secret is not None:
            session = layout.session_hash(secret, head.home.tenant, decoded.session)
        return refuse_name(decoded, file, session)

    def _read_all(self, fd: int, n_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < n_bytes:
            got = self._read(fd, len(data), min(PIECE_BYTES, n_bytes - len(data)))
            if not got:
                break
            data += self._buffer[:got]
        return bytes(data)

    def _facts(self, head: Header) -> Facts:
        ids = ids_le(head.ids) if head.parent in self._ids_after else b""
        return Facts(head.identity, head.key, head.parent, head.ordinal, head.n_tokens, ids)

    def _refuse_payload(self, fd: int, head: Header) -> Refused | None:
        digest = header.running_digest()
        for at in range(BLOCK_BYTES, BLOCK_BYTES + head.payload_len, PIECE_BYTES):
            if self._stopped():
                raise Interrupted
            n = min(PIECE_BYTES, BLOCK_BYTES + head.payload_len - at)
            if self._read(fd, at, n) < n:
                return Refused("size", "short file")
            digest.update(self._buffer[:n])
        return None if digest.digest() == head.payload_digest else Refused("payload", "payload_digest")

    def _open(self, file: FileName) -> int:
        shard_fd = self._shard(file)
        try:
            return self._io.open(file.name, READ_FLAGS | self._flags, dir_fd=shard_fd)
        finally:
            self._place.close_quietly(shard_fd)

    def _shard(self, file: FileName) -> int:
        return self._io.open(file.shard, DIRECTORY_FLAGS, dir_fd=self._place.folder_fds[file.folder])

    def _stat(self, file: FileName) -> FileStat | None:
        """Of what has the name now; None if nothing has."""
        try:
            shard_fd = self._shard(file)
        except OSError:
            return None
        try:
            return FileStat.of(os.stat(file.name, dir_fd=shard_fd, follow_symlinks=False))
        except FileNotFoundError:
            return None
        finally:
            self._place.close_quietly(shard_fd)

    def _read(self, fd: int, at: int, n: int) -> int:
        """Bytes of the file from ``at`` on, in the buffer; fewer than ``n`` only where the file ends."""
        done = 0
        while done < n:
            got = self._io.preadv(fd, [self._buffer[done:n]], at + done)
            if got <= 0:
                break
            done += got
            if self._flags and done < n:
                if got < BLOCK_BYTES:
                    break
                done -= done % BLOCK_BYTES  # direct I/O goes on at a block boundary only
        return done


def refuse(head: Header, file: FileName, store_id: bytes | None) -> Refused | None:
    """Do header and name agree, and the header with itself? ``store_id`` None: unknown, so any is taken."""
    try:
        whole = head.n_tokens if file.folder == layout.CHUNKS else header.MAX_IDS - header.MAX_IDS % head.page_tokens
        geometry = Geometry(head.page_tokens, head.page_bytes, head.page_stride, whole)
    except (ValueError, ZeroDivisionError):
        return Refused("foreign", "geometry")
    home = Home(store_id or head.store_id, head.identity, geometry)
    return header.refuse_meta(head, home, CLAIMS[file.folder](head, file, geometry))


def _chunk_claim(head: Header, file: FileName, geometry: Geometry) -> ChunkMeta:
    """What the name says, and what follows from it and from the header's other fields."""
    parent = head.identity if file.ordinal == 0 else head.parent
    first = file.ordinal * head.n_tokens
    pages = geometry.pages_for(head.n_tokens)
    return ChunkMeta(ChunkKey(file.index_key), parent, file.ordinal, first, head.ids, pages)


def _tail_claim(head: Header, file: FileName, geometry: Geometry) -> ChunkMeta:
    key = head.key if head.key[:8] == file.index_key else file.index_key  # all that the name has of it
    first = head.first_token if head.ordinal else 0
    ids = head.ids if head.n_tokens == file.n_tokens else head.ids[:0]
    pages = geometry.pages_for(file.n_tokens)
    return ChunkMeta(ChunkKey(key), file.parent or b"", head.ordinal, first, ids, pages, tail=True)


def _state_claim(head: Header, file: FileName, geometry: Geometry) -> ChunkMeta:
    part = StatePart(head.state_bytes, head.part, head.parts)
    return ChunkMeta(ChunkKey(file.index_key), head.parent, file.ordinal, head.first_token, (), 0, state=part)


CLAIMS = {layout.CHUNKS: _chunk_claim, layout.TAILS: _tail_claim, layout.STATES: _state_claim}


def refuse_record(head: RecordHead, file: FileName, store_id: bytes | None) -> Refused | None:
    """Do a record's header and its name agree?"""
    home = head.home
    expected = RecordHome(store_id or home.store_id, home.identity, home.tenant, file.session)
    refused = record.refuse_home(home, expected)
    letter = "m" if head.kind == record.KINDS["meta"] else "p" if head.flags & record.FLAG_PINNED else "s"
    return refused or (None if file.name.endswith(letter) else Refused("key", "pinned"))


def _refuse_size(head: Header, st: FileStat) -> Refused | None:
    """The header is right in itself, so its length is the file's."""
    return None if st.size == BLOCK_BYTES + head.payload_len else Refused("size", "file size")
