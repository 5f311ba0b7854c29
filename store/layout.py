"""Names of files. Pure. Every path is built from hex digits we computed ourselves; docs/store-format.md lists them.

STORE SECRET IDENTITY BUDGET LOCK tmp/ bad/
c/<2 hex of key>/<64 hex key>.<ordinal>.<8 hex tenant tag>
t/<2 hex of parent>/<64 hex parent>.<n tokens>.<16 hex of key>.<8 hex tenant tag>
s/<2 hex of key>/<64 hex key>.<ordinal>.<8 hex tenant tag>
r/<2 hex of session>/<32 hex session>.<16 hex branch>.<16 hex of the first key it names>.<s|p|m>
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from kvalet.store.ids import ChunkMeta
from kvalet.store.record import Record

CHUNKS = "c"
TAILS = "t"
STATES = "s"
RECORDS = "r"
TMP = "tmp"
BAD = "bad"
STORE_FILE = "STORE"
SECRET_FILE = "SECRET"
LOCK_FILE = "LOCK"
IDENTITY_FILE = "IDENTITY"
BUDGET_FILE = "BUDGET"
SHARDED = (CHUNKS, TAILS, STATES, RECORDS)
FOLDERS = (*SHARDED, TMP, BAD)
SHARDS = tuple(f"{i:02x}" for i in range(256))

_CHUNK_NAME = re.compile(r"([0-9a-f]{64})\.(0|[1-9][0-9]{0,9})\.([0-9a-f]{8})")
_TAIL_NAME = re.compile(r"([0-9a-f]{64})\.([1-9][0-9]{0,3})\.([0-9a-f]{16})\.([0-9a-f]{8})")
_RECORD_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{16})\.([0-9a-f]{16})\.([spm])")
_BRANCH = re.compile(r"[0-9a-f]{16}")
_BAD_NAME = re.compile(r"[0-9]{20}\.(?:[0-9a-f.]{75,110}|[0-9a-f.]{67}[spm])")
_TMP_NAME = re.compile(r"[0-9]+\.[0-9]+\.[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class FileName:
    """One file. ``index_key``: what the index calls it: the whole key of a chunk or a state, the first 8 bytes of a tail's
    key (all that a tail's name holds; the header is compared in full at every read), 16 bytes for a record, whose ``session``,
    ``branch``, ``head`` and ``pinned`` are told by its name."""

    folder: str
    shard: str
    name: str
    index_key: bytes
    ordinal: int = -1
    parent: bytes | None = None
    n_tokens: int = 0
    session: bytes = b""
    branch: str = ""
    head: bytes = b""
    pinned: bool = False

    @property
    def is_tail(self) -> bool:
        return self.folder == TAILS

    @property
    def is_record(self) -> bool:
        return self.folder == RECORDS


def index_key(meta: ChunkMeta) -> bytes:
    return meta.key[:8] if meta.tail else bytes(meta.key)


def tenant_tag(store_secret: bytes, namespace: str) -> str:
    """8 hex digits, so that a tenant's bytes can be summed without reading headers. Not a secret and not a check."""
    return hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), key=store_secret, digest_size=4).hexdigest()


def file_name(meta: ChunkMeta, tag: str) -> FileName:
    if meta.tail:
        parent = meta.parent.hex()
        name = f"{parent}.{len(meta.ids)}.{meta.key.hex()[:16]}.{tag}"
        return FileName(TAILS, parent[:2], name, meta.key[:8], meta.ordinal, bytes(meta.parent), len(meta.ids))
    key = meta.key.hex()
    folder = CHUNKS if meta.state is None else STATES
    return FileName(folder, key[:2], f"{key}.{meta.ordinal}.{tag}", bytes(meta.key), meta.ordinal, bytes(meta.parent))


def tenant_hash(store_secret: bytes, tenant: str) -> bytes:
    """16 bytes, keyed: what a record says of its tenant."""
    data = b"tenant:" + tenant.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, key=store_secret, digest_size=16).digest()


def session_hash(store_secret: bytes, tenant: bytes, session: str) -> bytes:
    """16 bytes, keyed. ``tenant``: its ``tenant_hash``."""
    data = b"session:" + tenant + session.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, key=store_secret, digest_size=16).digest()


def record_index_key(session: bytes, branch: str) -> bytes:
    """16 bytes. ``session``: its ``session_hash``."""
    return hashlib.blake2b(session + branch.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def record_name(session: bytes, record: Record) -> FileName:
    """``session``: its ``session_hash``. ValueError if the branch is not 16 hex digits."""
    if not _BRANCH.fullmatch(record.branch):
        raise ValueError(f"a branch is 16 hex digits, not {record.branch!r}")
    letter = "m" if record.kind == "meta" else "p" if record.pinned else "s"
    name = f"{session.hex()}.{record.branch}.{record.head.hex()}.{letter}"
    return _record_file(session, record.branch, record.head, letter, name)


def _record_file(session: bytes, branch: str, head: bytes, letter: str, name: str) -> FileName:
    return FileName(
        RECORDS,
        name[:2],
        name,
        record_index_key(session, branch),
        session=session,
        branch=branch,
        head=head,
        pinned=letter == "p",
    )


def parse_name(folder: str, shard: str, name: str) -> FileName | None:
    """None: not a name of ours, or in the wrong shard. A tail's ordinal is not in its name (-1)."""
    if folder == RECORDS:
        match = _RECORD_NAME.fullmatch(name)
        if match and match[1][:2] == shard:
            session, head = bytes.fromhex(match[1]), bytes.fromhex(match[3])
            return _record_file(session, match[2], head, match[4], name)
        return None
    if folder in (CHUNKS, STATES):
        match = _CHUNK_NAME.fullmatch(name)
        if match and match[1][:2] == shard:
            return FileName(folder, shard, name, bytes.fromhex(match[1]), int(match[2]))
        return None
    match = _TAIL_NAME.fullmatch(name)
    if match and match[1][:2] == shard:
        return FileName(folder, shard, name, bytes.fromhex(match[3]), -1, bytes.fromhex(match[1]), int(match[2]))
    return None


def tmp_name(pid: int, counter: int, random_hex: str) -> str:
    return f"{pid}.{counter}.{random_hex}"


def is_tmp_name(name: str) -> bool:
    """Only such names are swept from tmp/."""
    return _TMP_NAME.fullmatch(name) is not None


def bad_name(now_ns: int, name: str) -> str:
    """Of a refused file in bad/: sorts by time."""
    return f"{max(now_ns, 0):020d}.{name}"


def is_bad_name(name: str) -> bool:
    """Only such names are ever deleted from bad/."""
    return _BAD_NAME.fullmatch(name) is not None
