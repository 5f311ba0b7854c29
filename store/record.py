"""A session record as bytes, format 1: what a branch was, so that a session comes back at the token where it stopped. Pure.

A record names chunks, a tail and states; it never holds KV. Lost or damaged, it costs ids and transcript, never a chunk.
Layout: a header of 256 bytes with its own digest; then one JSON map, the token ids as u32 LE, the keys of the whole chunks.
``docs/store-format.md`` has the table. Nothing is sized from the file: it is read whole, and only up to MAX_RECORD_BYTES.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Any

import orjson
from kvalet.store.header import CODEC_RAW, DIGEST_XXH3_128, FORMAT_VERSION, Refused, digest
from kvalet.store.ids import ChunkKey, ids_le
from kvalet.store.recordmap import Taker, rest_bytes, rest_of

RECORD_MAGIC = b"kvaletRC"
MAX_RECORD_BYTES = 8 << 20
"""A longer record is not written, a longer file is refused ("size"). A million tokens and their keys take less than 5 MB."""
RECORD_HEADER_BYTES = 256
KINDS = {"session": 1, "meta": 2}
"""``meta`` is reserved for what the server learns (waits, rates): written by nobody yet, and decoded like the other."""
KIND_NAMES = {number: name for name, number in KINDS.items()}
FLAG_PINNED = 1
DIGEST_AT = RECORD_HEADER_BYTES - 16
_FIXED = struct.Struct("<8sIIBBBBIQQQQ16s16s32s16s16s")
"""In order: magic, version, header length, kind, codec, digest algorithm, flags, ttl seconds (0 = none), map bytes, n ids,
n keys, written ns, payload digest, store id, identity, tenant, session (keyed hashes). Zeros to 240, the header's digest."""
KEY_BYTES = 32
MAX_TTL_S = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Text that the server produced, and where its ids stand: ``ids[start:end]`` of the record. ``calls``: ids of the tool
    calls in it. ``rest``: keys of its map that this version does not know, as JSON."""

    text: str
    start: int
    end: int
    calls: tuple[str, ...] = ()
    rest: bytes = b""


@dataclass(frozen=True, slots=True)
class Record:
    """One branch of one session, as of its last durable snapshot.

    ``tenant``: not in the file; the reader, who had to know it to find the file, fills it in. ``branch``: 16 hex digits,
    stable while the branch grows. ``ids``: all its token ids; the KV of the first ``kv_len`` is durable: whole chunks
    ``chunk_keys`` in order, then ``tail_key``. ``boundary``: where the prompt of its last turn ends. ``decoded``: ranges of
    positions that decode steps computed. ``space``: which tenant secret its keys are made with; opaque here. ``parent``,
    ``fork_at``: the branch it forked from, and where. ``pinned``: what it names is not evicted. ``ttl_s``: deleted so long
    after its last use (None: kept until evicted). ``state_keys``: running state at the boundary and at the end. ``rest``: keys
    of the map that this version does not know, as JSON; they are kept.
    """

    tenant: str
    session: str
    branch: str
    ids: tuple[int, ...]
    boundary: int
    kv_len: int
    decoded: tuple[tuple[int, int], ...] = ()
    space: bytes = b""
    chunk_keys: tuple[ChunkKey, ...] = ()
    tail_key: ChunkKey | None = None
    parent: str = ""
    fork_at: int = 0
    pinned: bool = False
    ttl_s: int | None = None
    last_use_ns: int = 0
    state_keys: tuple[ChunkKey, ...] = ()
    spans: tuple[Span, ...] = ()
    kind: str = "session"
    rest: bytes = b""

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """All that it names, ancestors first."""
        tail = () if self.tail_key is None else (self.tail_key,)
        return (*self.chunk_keys, *tail, *self.state_keys)

    @property
    def head(self) -> bytes:
        """The first 8 bytes of the first key: while that piece is stored, the record is of use."""
        return bytes(self.keys[0][:8]) if self.keys else bytes(8)


@dataclass(frozen=True, slots=True)
class RecordHome:
    """Where a record belongs: the store's id, the identity digest, the keyed hashes of tenant and session (16 bytes each)."""

    store_id: bytes
    identity: bytes
    tenant: bytes
    session: bytes


@dataclass(frozen=True, slots=True)
class RecordHead:
    """A record's header: its own digest is right, nothing else is believed yet."""

    kind: int
    flags: int
    ttl_s: int
    map_bytes: int
    n_ids: int
    n_keys: int
    written_ns: int
    payload_digest: bytes
    home: RecordHome

    @property
    def file_bytes(self) -> int:
        return RECORD_HEADER_BYTES + self.map_bytes + 4 * self.n_ids + KEY_BYTES * self.n_keys


def size_bound(record: Record) -> int:
    """Bytes that ``encode`` needs at most. JSON escapes a character into at most 6 bytes."""
    text = len(record.session) + len(record.branch) + len(record.parent) + len(record.space)
    text += sum(len(span.text) + len(span.rest) + sum(map(len, span.calls)) + 8 * len(span.calls) + 32 for span in record.spans)
    fixed = 1024 + len(record.rest) + 48 * len(record.decoded) + 80 * len(record.state_keys)
    return RECORD_HEADER_BYTES + fixed + 6 * text + 4 * len(record.ids) + KEY_BYTES * len(record.chunk_keys)


def encode(record: Record, home: RecordHome, written_ns: int) -> bytes:
    """The whole file. ValueError if it cannot be told: too long, ids beyond 32 bits, text that is not Unicode."""
    try:
        body = orjson.dumps(_map_of(record)) + ids_le(record.ids)
        kind = KINDS[record.kind]
    except (TypeError, OverflowError, KeyError) as error:
        raise ValueError(f"a record that cannot be written: {error}") from error
    map_bytes = len(body) - 4 * len(record.ids)
    body += b"".join(record.chunk_keys)
    if len(body) + RECORD_HEADER_BYTES > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(body)} bytes: more than {MAX_RECORD_BYTES}")
    fixed = _FIXED.pack(
        RECORD_MAGIC,
        FORMAT_VERSION,
        RECORD_HEADER_BYTES,
        kind,
        CODEC_RAW,
        DIGEST_XXH3_128,
        FLAG_PINNED * record.pinned,
        min(max(record.ttl_s, 1), MAX_TTL_S) if record.ttl_s is not None else 0,
        map_bytes,
        len(record.ids),
        len(record.chunk_keys),
        written_ns,
        digest(body),
        home.store_id,
        home.identity,
        home.tenant,
        home.session,
    ).ljust(DIGEST_AT, b"\0")
    return fixed + digest(fixed) + body


def unpack(block: bytes | memoryview) -> RecordHead | Refused:
    """The first RECORD_HEADER_BYTES. "header": damaged; "foreign": another version or algorithm wrote it."""
    if len(block) < RECORD_HEADER_BYTES:
        return Refused("size", "header_len")
    if digest(block[:DIGEST_AT]) != bytes(block[DIGEST_AT:RECORD_HEADER_BYTES]):
        return Refused("header", "header_digest")
    magic, version, length, kind, codec, algo, flags, *rest = _FIXED.unpack_from(block)
    for name, found, known in (
        ("magic", magic, (RECORD_MAGIC,)),
        ("version", version, (FORMAT_VERSION,)),
        ("header_len", length, (RECORD_HEADER_BYTES,)),
        ("kind", kind, KIND_NAMES),
        ("codec", codec, (CODEC_RAW,)),
        ("digest_algo", algo, (DIGEST_XXH3_128,)),
        ("flags", flags, (0, FLAG_PINNED)),
    ):
        if found not in known:
            return Refused("foreign", name)
    ttl_s, map_bytes, n_ids, n_keys, written_ns, checksum, *home = rest
    return RecordHead(kind, flags, ttl_s, map_bytes, n_ids, n_keys, written_ns, checksum, RecordHome(*home))


def verify(data: bytes | memoryview) -> RecordHead | Refused:
    """``data`` is a whole file: are all of its bytes those that were written?"""
    if len(data) > MAX_RECORD_BYTES:
        return Refused("size", "file size")
    head = unpack(data[:RECORD_HEADER_BYTES])
    if isinstance(head, Refused):
        return head
    if head.file_bytes != len(data):
        return Refused("size", "file size")
    if digest(data[RECORD_HEADER_BYTES:]) != head.payload_digest:
        return Refused("payload", "payload_digest")
    return head


def refuse_home(found: RecordHome, expected: RecordHome) -> Refused | None:
    for name, reason in (("store_id", "foreign"), ("session", "key"), ("tenant", "key"), ("identity", "identity")):
        if getattr(found, name) != getattr(expected, name):
            return Refused(reason, name)
    return None


def decode(data: bytes | memoryview, *, tenant: str = "") -> Record | Refused:
    """A whole file, verified. Whose it is must be compared by the caller (``refuse_home``, and its name)."""
    head = verify(data)
    if isinstance(head, Refused):
        return head
    view = memoryview(data)
    ids_at = RECORD_HEADER_BYTES + head.map_bytes
    keys_at = ids_at + 4 * head.n_ids
    try:
        fields = orjson.loads(view[RECORD_HEADER_BYTES:ids_at])
    except ValueError:
        return Refused("payload", "map")
    if not isinstance(fields, dict):
        return Refused("payload", "map")
    keys = bytes(view[keys_at:])
    chunk_keys = tuple(ChunkKey(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES))
    return _record_of(fields, head, tenant, _ids_of(view[ids_at:keys_at]), chunk_keys)


def _ids_of(data: memoryview) -> tuple[int, ...]:
    words = array("I")
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)


def _map_of(record: Record) -> dict[str, Any]:
    fields = rest_of(record.rest)
    fields |= {
        "session": record.session,
        "branch": record.branch,
        "boundary": record.boundary,
        "kv_len": record.kv_len,
        "decoded": record.decoded,
        "space": record.space.hex(),
        "tail": None if record.tail_key is None else record.tail_key.hex(),
        "states": [key.hex() for key in record.state_keys],
        "parent": record.parent,
        "fork_at": record.fork_at,
        "last_use_ns": record.last_use_ns,
        "spans": [
            rest_of(span.rest) | {"text": span.text, "start": span.start, "end": span.end, "calls": span.calls}
            for span in record.spans
        ],
    }
    return fields


def _record_of(
    fields: dict[str, Any], head: RecordHead, tenant: str, ids: tuple[int, ...], chunk_keys: tuple[ChunkKey, ...]
) -> Record | Refused:
    """The digests are right, so what does not fit here was written by another program: "foreign", naming the first field."""
    take = Taker(fields)
    tail = take.hexes("tail", [] if fields.get("tail") is None else [fields.get("tail")], KEY_BYTES)
    take.left.pop("tail", None)
    record = Record(
        tenant=tenant,
        session=take.text("session"),
        branch=take.text("branch"),
        ids=ids,
        boundary=take.number("boundary"),
        kv_len=take.number("kv_len"),
        decoded=take.pairs("decoded"),
        space=take.blob("space"),
        chunk_keys=chunk_keys,
        tail_key=ChunkKey(tail[0]) if tail else None,
        parent=take.text("parent"),
        fork_at=take.number("fork_at"),
        pinned=bool(head.flags & FLAG_PINNED),
        ttl_s=head.ttl_s or None,
        last_use_ns=take.number("last_use_ns"),
        state_keys=tuple(ChunkKey(key) for key in take.hexes("states", take.items("states"), KEY_BYTES)),
        spans=tuple(_span_of(take, span) for span in take.items("spans")),
        kind=KIND_NAMES[head.kind],
        rest=rest_bytes(take.left),
    )
    return Refused("foreign", take.wrong) if take.wrong else record


def _span_of(outer: Taker, fields: Any) -> Span:
    take = Taker(fields if isinstance(fields, dict) else {})
    span = Span(take.text("text"), take.number("start"), take.number("end"), take.texts("calls"), rest_bytes(take.left))
    if take.wrong:
        outer.blame("spans")
    return span
