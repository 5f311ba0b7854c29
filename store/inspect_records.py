"""Sessions of a store, by their records: who they are, what they name, and how much of that is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvalet.store import layout, record
from kvalet.store.errors import StoreRefused
from kvalet.store.header import Refused
from kvalet.store.inspect_file import GONE, Reader, Verdict
from kvalet.store.inspect_gc import Keep
from kvalet.store.inspect_open import Place
from kvalet.store.inspect_walk import Found
from kvalet.store.record import Record, RecordHead


@dataclass(frozen=True, slots=True)
class Stored:
    """One record file, believed. ``tenant``: keyed hash of its tenant's name, which itself is in no file."""

    found: Found
    record: Record
    tenant: bytes
    identity: bytes
    data: bytes

    @property
    def last_use_ns(self) -> int:
        """As the server takes it: the file's time, which is brought up to date whenever the session is used."""
        return self.found.st.mtime_ns

    def expired(self, now_ns: int) -> bool:
        ttl_s = self.record.ttl_s
        return ttl_s is not None and not self.record.pinned and self.last_use_ns + ttl_s * 10**9 < now_ns


def read_records(place: Place, files: Iterable[Found]) -> tuple[list[Stored], list[Verdict]]:
    """All records among ``files``, in their order, and the verdicts on those that are refused. One that is replaced or
    deleted meanwhile is left out."""
    reader = Reader(place)
    stored, refused = [], []
    for found in files:
        if found.file.folder != layout.RECORDS:
            continue
        verdict = reader.examine(found, payload=True)
        if verdict.reason and verdict.reason != GONE:
            refused.append(verdict)
        elif not verdict.reason:
            head, decoded = record.unpack(verdict.data), record.decode(verdict.data)
            assert isinstance(head, RecordHead)
            assert not isinstance(decoded, Refused), "examine has believed it"
            stored.append(Stored(verdict.found, decoded, head.home.tenant, head.home.identity, verdict.data))
    return stored, refused


def doubles(stored: Iterable[Stored]) -> list[Stored]:
    """Older files of records that also have a newer one. A server that changes a record's name (another first chunk, pinned or
    not) has both for a moment, and deletes the older at its next start if it was killed then."""
    newest: dict[bytes, Stored] = {}
    older = []
    for one in stored:
        key = one.found.file.index_key
        other = newest.setdefault(key, one)
        if other is not one:
            newest[key] = max(one, other, key=lambda one: (one.found.st.mtime_ns, one.record.pinned))
            older.append(one if newest[key] is other else other)
    return older


def session_of(place: Place, tenant: str, session: str) -> bytes:
    """What the names of this session's records begin with. StoreRefused if the secret that names are made with is lost."""
    if place.secret is None:
        raise StoreRefused(f"SECRET in the store {place.path!r} is missing or damaged, so no session can be found by its name.")
    return layout.session_hash(place.secret, layout.tenant_hash(place.secret, tenant), session)


@dataclass(frozen=True, slots=True)
class Presence:
    """How much of what a record names is on disk: whole chunks from token 0 on without a gap, and the tail after them (None:
    it names none)."""

    chunks: int
    of: int
    tail: bool | None


class OnDisk:
    """Which keys are on disk. ``tags``: the tenant tag in a chunk's or tail's name."""

    def __init__(self, files: Iterable[Found]) -> None:
        self._tags: dict[bytes, str] = {}
        for found in files:
            if found.file.folder in (layout.CHUNKS, layout.TAILS):
                self._tags[found.file.index_key[:8]] = found.tag

    def presence(self, of: Record) -> Presence:
        chunks = 0
        for key in of.chunk_keys:
            if key[:8] not in self._tags:
                break
            chunks += 1
        tail = None if of.tail_key is None else of.tail_key[:8] in self._tags and chunks == len(of.chunk_keys)
        return Presence(chunks, len(of.chunk_keys), tail)

    def tag(self, of: Record) -> str:
        """Of the first file that it names and that is there; "" if none is."""
        return next((self._tags[key[:8]] for key in of.keys if key[:8] in self._tags), "")


def what_to_keep(stored: Sequence[Stored], now_ns: int, before_ns: int | None = None) -> Keep:
    """For ``gc``: records past their time to live, or not used since ``before_ns``, protect nothing."""
    replaced = [one.found for one in doubles(stored)]
    stored = [one for one in stored if one.found not in set(replaced)]
    expired = [one.found for one in stored if one.expired(now_ns)]
    old = [one.found for one in stored if not one.expired(now_ns) and _is_old(one, before_ns)]
    living = [one.record for one in stored if one.found not in {*expired, *old}]
    return Keep(
        pinned=frozenset(bytes(key[:8]) for one in living if one.pinned for key in one.keys),
        named=frozenset(bytes(key[:8]) for one in living for key in one.keys),
        replaced=replaced,
        expired=expired,
        old=old,
    )


def _is_old(stored: Stored, before_ns: int | None) -> bool:
    return before_ns is not None and not stored.record.pinned and stored.last_use_ns < before_ns
