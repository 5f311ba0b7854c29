"""The 4096-byte header in front of every stored payload (format 1). Pure bytes. docs/store-format.md describes it.

Everything a reader needs to refuse stands here; a reader compares each field with what IT expects and sizes nothing from
the file. The last 16 bytes are the header's own digest; magic, version and the place of that digest stay the same in all
later versions, so that an old reader can tell "newer" from "damaged".
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass, replace

import xxhash
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.ids import ChunkMeta, StatePart, ids_le

FORMAT_VERSION = 1
MAGIC = b"kvaletKV"
CODEC_RAW = 0
DIGEST_XXH3_128 = 1
KIND_CHUNK = 1
KIND_TAIL = 2
KIND_STATE = 3
MAX_IDS = 512
"""Token ids that fit a header: more than any chunk has."""

IDS_AT = 256
DIGEST_AT = BLOCK_BYTES - 16
_FIXED = struct.Struct("<8sIIBBBBIQIIIIQQQQ16s16s32s32s32s")
"""In order: magic, version, header length, kind, codec, digest algorithm, flags, ordinal, first token, n tokens, n pages,
page tokens, reserved 0, page bytes, page stride, payload bytes, created ns, payload digest, store id, identity, key, parent.
Then, in states only, STATE; zeros to 256, the token ids, zeros to 4080, the header's digest."""
_STATE = struct.Struct("<QII")
"""State bytes without padding, part, parts. All 0 in a chunk or a tail."""


def digest(data: bytes | memoryview) -> bytes:
    """xxh3_128 of ``data``, 16 bytes. Releases the GIL above 64 KiB."""
    return xxhash.xxh3_128_digest(data)


def running_digest() -> xxhash.xxh3_128:
    """The same digest, fed piece by piece with ``update`` and read with ``digest``."""
    return xxhash.xxh3_128()


@dataclass(frozen=True, slots=True)
class Geometry:
    """What page bytes mean to this store. ``page_bytes`` <= ``page_stride`` (the padding up to 4096 is stored too)."""

    page_tokens: int
    page_bytes: int
    page_stride: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        if self.page_stride < 1 or self.page_stride % BLOCK_BYTES:
            raise ValueError(f"page_stride must be a positive multiple of {BLOCK_BYTES}, not {self.page_stride}")
        if not 0 < self.page_bytes <= self.page_stride:
            raise ValueError(f"page_bytes must be within (0, {self.page_stride}], not {self.page_bytes}")
        if self.page_tokens < 1 or self.chunk_tokens % self.page_tokens or not 0 < self.chunk_tokens <= MAX_IDS:
            raise ValueError(f"chunk_tokens must be a multiple of page_tokens and at most {MAX_IDS}: {self}")

    def file_bytes(self, n_pages: int) -> int:
        return BLOCK_BYTES + n_pages * self.page_stride

    def bytes_of(self, meta: ChunkMeta) -> int:
        """Length of its file: header and padded payload."""
        if meta.state is not None:
            return BLOCK_BYTES - (-meta.state.n_bytes // BLOCK_BYTES) * BLOCK_BYTES
        return self.file_bytes(meta.n_pages)

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class Home:
    """What is the same in every file of one store: its id (16 bytes), the identity digest (32) and the geometry."""

    store_id: bytes
    identity: bytes
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Header:
    """A header as it was read: its own digest is right, nothing else is believed yet. Lengths in bytes."""

    magic: bytes
    version: int
    header_len: int
    kind: int
    codec: int
    digest_algo: int
    flags: int
    ordinal: int
    first_token: int
    n_tokens: int
    n_pages: int
    page_tokens: int
    reserved: int
    page_bytes: int
    page_stride: int
    payload_len: int
    created_ns: int
    payload_digest: bytes
    store_id: bytes
    identity: bytes
    key: bytes
    parent: bytes
    state_bytes: int = 0
    part: int = 0
    parts: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Why bytes were not believed. ``reason``: a word of store.jobs.ReadResult; ``field``: what differed."""

    reason: str
    field: str


def pack(home: Home, meta: ChunkMeta, payload_digest: bytes, created_ns: int) -> bytes:
    """The 4096 bytes that go in front of ``meta``'s payload. ValueError if ``meta`` does not fit the store's geometry."""
    geometry = home.geometry
    if meta.state is None:
        _check_tokens(geometry, meta)
    else:
        _check_state(meta, meta.state)
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        BLOCK_BYTES,
        _kind_of(meta),
        CODEC_RAW,
        DIGEST_XXH3_128,
        0,
        meta.ordinal,
        meta.first_token,
        len(meta.ids),
        meta.n_pages,
        geometry.page_tokens,
        0,
        geometry.page_bytes,
        geometry.page_stride,
        geometry.bytes_of(meta) - BLOCK_BYTES,
        created_ns,
        payload_digest,
        home.store_id,
        home.identity,
        meta.key,
        meta.parent,
    )
    fixed += _STATE.pack(*_state_of(meta))
    body = (fixed.ljust(IDS_AT, b"\0") + ids_le(meta.ids)).ljust(DIGEST_AT, b"\0")
    return body + digest(body)


def _check_tokens(geometry: Geometry, meta: ChunkMeta) -> None:
    whole = len(meta.ids) == geometry.chunk_tokens
    if not meta.ids or len(meta.ids) > geometry.chunk_tokens or whole == meta.tail:
        what = "a tail" if meta.tail else "a chunk"
        raise ValueError(f"{what} of {len(meta.ids)} tokens where a chunk has {geometry.chunk_tokens}")
    if meta.n_pages != geometry.pages_for(len(meta.ids)):
        raise ValueError(f"{len(meta.ids)} tokens are {geometry.pages_for(len(meta.ids))} pages, not {meta.n_pages}")


def _check_state(meta: ChunkMeta, part: StatePart) -> None:
    if meta.ids or meta.n_pages or meta.tail or part.n_bytes < 1 or not 0 <= part.part < part.parts:
        raise ValueError(f"a state has bytes and no tokens of its own: {meta}")


def _kind_of(meta: ChunkMeta) -> int:
    if meta.state is not None:
        return KIND_STATE
    return KIND_TAIL if meta.tail else KIND_CHUNK


def _state_of(meta: ChunkMeta) -> tuple[int, int, int]:
    return (0, 0, 0) if meta.state is None else (meta.state.n_bytes, meta.state.part, meta.state.parts)


def unpack(block: bytes | memoryview) -> Header | Refused:
    """Read one header block. Refused "header" if its own digest, magic or zeros are wrong, "foreign" if another version or
    algorithm wrote it."""
    if len(block) < BLOCK_BYTES:
        return Refused("size", "header_len")
    if digest(block[:DIGEST_AT]) != bytes(block[DIGEST_AT:BLOCK_BYTES]):
        return Refused("header", "header_digest")
    fields = _FIXED.unpack_from(block)
    header = Header(*fields, *_STATE.unpack_from(block, _FIXED.size))
    if header.magic != MAGIC:
        return Refused("foreign", "magic")
    for name, expected in (("version", FORMAT_VERSION), ("header_len", BLOCK_BYTES), ("codec", CODEC_RAW)):
        if getattr(header, name) != expected:
            return Refused("foreign", name)
    for name, expected in (("digest_algo", DIGEST_XXH3_128), ("flags", 0), ("reserved", 0)):
        if getattr(header, name) != expected:
            return Refused("foreign", name)
    if header.n_tokens > MAX_IDS:
        return Refused("header", "n_tokens")
    ids = array("I", bytes(block[IDS_AT : IDS_AT + 4 * header.n_tokens]))
    if sys.byteorder == "big":
        ids.byteswap()
    return replace(header, ids=tuple(ids))


def refuse_home(header: Header, home: Home) -> Refused | None:
    """Does the file belong to this store, model and layout at all?"""
    geometry = home.geometry
    for name, reason, expected in (
        ("store_id", "foreign", home.store_id),
        ("identity", "identity", home.identity),
        ("page_tokens", "identity", geometry.page_tokens),
        ("page_bytes", "identity", geometry.page_bytes),
        ("page_stride", "identity", geometry.page_stride),
    ):
        if getattr(header, name) != expected:
            return Refused(reason, name)
    return None


def refuse_meta(header: Header, home: Home, meta: ChunkMeta) -> Refused | None:
    """Is it the very chunk that ``meta`` describes? The first differing field is named."""
    refused = refuse_home(header, home)
    if refused:
        return refused
    for name, reason, expected in (
        ("kind", "key", _kind_of(meta)),
        ("key", "key", meta.key),
        ("parent", "key", meta.parent),
        ("ordinal", "key", meta.ordinal),
        ("first_token", "key", meta.first_token),
        ("n_tokens", "key", len(meta.ids)),
        ("ids", "key", meta.ids),
        ("n_pages", "size", meta.n_pages),
        ("payload_len", "size", home.geometry.bytes_of(meta) - BLOCK_BYTES),
    ):
        if getattr(header, name) != expected:
            return Refused(reason, name)
    for name, number in zip(("state_bytes", "part", "parts"), _state_of(meta), strict=True):
        if getattr(header, name) != number:
            return Refused("key", name)
    return None
