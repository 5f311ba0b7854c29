"""Names of stored bytes: identity, chain keys, chunk descriptions. Pure; standard library only.

Key chain (docs/architecture.md): key_i = blake2b-256(key = tenant secret, parent || token ids as u32 LE || extras); the
parent of the first chunk is the identity digest. A key therefore names all tokens from position 0 to the end of its chunk, the
tenant, and everything that decides what the bytes mean.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Digest over what stored bytes mean, with the fields it was made from, so that a refusal can name the one that differs."""

    digest: bytes
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Identity:
        """Order of the mapping does not matter. Names and values are any text."""
        items = tuple(sorted(fields.items()))
        mac = hashlib.blake2b(digest_size=32)
        for name, value in items:
            for part in (name, value):
                data = part.encode()
                mac.update(len(data).to_bytes(4, "little") + data)
        return cls(mac.digest(), items)


def tenant_secret(store_secret: bytes, tenant: str, salt: str = "") -> bytes:
    """32 bytes. ``salt`` (a request's cache_salt) only splits further inside the tenant."""
    secret = hmac.new(store_secret, b"tenant:" + tenant.encode(), hashlib.sha256).digest()
    return hmac.new(secret, b"salt:" + salt.encode(), hashlib.sha256).digest() if salt else secret


def ids_le(ids: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian, as they stand in keys and headers."""
    words = array("I", ids)
    if words.itemsize != 4:  # no platform we support; a wrong width must not make other keys
        raise RuntimeError("this platform has no 4-byte unsigned int")
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def chunk_key(secret: bytes, parent: bytes, ids: Sequence[int], extras: bytes = b"") -> ChunkKey:
    """Key of the chunk (or tail) that holds ``ids`` and follows ``parent`` (the identity digest for the first one).

    ``extras``: image hashes, adapter ids and the like that start inside the chunk's token range.
    """
    mac = hashlib.blake2b(parent, key=secret, digest_size=32)
    mac.update(ids_le(ids))
    if extras:
        mac.update(extras)
    return ChunkKey(mac.digest())


def state_key(secret: bytes, parent: bytes, part: int = 0, parts: int = 1) -> ChunkKey:
    """Key of a part of the running state at the end of ``parent``, the chunk or tail whose key names all tokens before it."""
    message = parent + b"state" + part.to_bytes(4, "little") + parts.to_bytes(4, "little")
    return ChunkKey(hashlib.blake2b(message, key=secret, digest_size=32).digest())


@dataclass(frozen=True, slots=True)
class StatePart:
    """Which part of a running state: ``part`` of ``parts`` (a state longer than a slot is cut), and its bytes, unpadded."""

    n_bytes: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class ChunkMeta:
    """What a chunk or a tail claims to be, and what a reader expects of it. Everything but the payload.

    ``ordinal``: index of the chunk in its chain; a tail has the ordinal the next whole chunk would have.
    ``ids``: its token ids; ``n_pages``: ceil(len(ids) / page tokens). ``tail``: fewer tokens than a chunk.
    ``state``: it is no chunk but a part of the running state after ``parent``, at token ``first_token``; ``ids`` are empty.
    ``namespace``: name of the tenant space, for quotas ("" = default); hashed before it reaches a path.
    """

    key: ChunkKey
    parent: bytes
    ordinal: int
    first_token: int
    ids: tuple[int, ...]
    n_pages: int
    tail: bool = False
    namespace: str = ""
    state: StatePart | None = None


@dataclass(frozen=True, slots=True)
class TailRef:
    """A stored tail, as the index knows it without opening the file: the file's name holds these."""

    parent: bytes
    n_tokens: int
    key_hex16: str
    """First 16 hex digits of the tail's key."""
