"""Sessions of a store, by their records: who they are, what they name, and how much of that is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvalet.store import layout, record
from kvalet.store.errors import StoreRefused
from kvalet.store.header import Refused
from kvalet.store.inspect_file import GONE, Reader, Verdict
from kvalet.store.inspect_gc import Keep
from kvalet.store.inspect_open import Place
from kvalet.store.inspect_tree import UNSURE
from kvalet.store.inspect_walk import Found
from kvalet.store.record import Record, RecordHead


@dataclass(frozen=True, slots=True)
class Known:
    """What is kept of each record where all are looked at: ids and texts of one can be megabytes. ``tenant``: keyed hash of its
    tenant's name, which itself is in no file. Keys are their first 8 bytes."""

    found: Found
    tenant: bytes
    session: str
    branch: str
    n_ids: int
    kv_len: int
    pinned: bool
    ttl_s: int | None
    chunks: tuple[bytes, ...]
    tail: bytes | None
    states: tuple[bytes, ...]

    @property
    def keys(self) -> tuple[bytes, ...]:
        return (*self.chunks, *((self.tail,) if self.tail is not None else ()), *self.states)

    @property
    def last_use_ns(self) -> int:
        """As the server takes it: the file's time, which is brought up to date whenever the session is used."""
        return self.found.st.mtime_ns

    def expired(self, now_ns: int) -> bool:
        return self.ttl_s is not None and not self.pinned and self.last_use_ns + self.ttl_s * 10**9 < now_ns

    def old(self, before_ns: int | None) -> bool:
        return before_ns is not None and not self.pinned and self.last_use_ns < before_ns


@dataclass(frozen=True, slots=True)
class Stored:
    """One record file, whole and believed."""

    found: Found
    record: Record
    tenant: bytes
    data: bytes

    def known(self) -> Known:
        one = self.record
        return Known(
            self.found,
            self.tenant,
            one.session,
            one.branch,
            len(one.ids),
            one.kv_len,
            one.pinned,
            one.ttl_s,
            tuple(bytes(key[:8]) for key in one.chunk_keys),
            None if one.tail_key is None else bytes(one.tail_key[:8]),
            tuple(bytes(key[:8]) for key in one.state_keys),
        )


def each_record(place: Place, files: Iterable[Found]) -> Iterator[Stored | Verdict]:
    """All records among ``files``, in their order, one at a time; a verdict for each that is refused. One that is replaced or
    deleted meanwhile is left out."""
    reader = Reader(place)
    for found in files:
        if found.file.folder != layout.RECORDS:
            continue
        verdict = reader.examine(found, payload=True)
        if verdict.reason and verdict.reason != GONE:
            yield verdict
        elif not verdict.reason:
            head, decoded = record.unpack(verdict.data), record.decode(verdict.data)
            assert isinstance(head, RecordHead)
            assert not isinstance(decoded, Refused), "examine has believed it"
            yield Stored(verdict.found, decoded, head.home.tenant, verdict.data)


def read_records(place: Place, files: Iterable[Found]) -> tuple[list[Known], list[Verdict]]:
    """What is kept of all records, and the verdicts on those that are refused."""
    known, refused = [], []
    for one in each_record(place, files):
        if isinstance(one, Verdict):
            refused.append(one)
        else:
            known.append(one.known())
    return known, refused


def all_records(place: Place, files: Iterable[Found]) -> list[Known]:
    """For who deletes: StoreRefused if a record cannot be read now but may be good, because what it names, perhaps pinned,
    would look like nobody's. Damaged ones protect nothing, as in a server."""
    known, refused = read_records(place, files)
    for verdict in refused:
        if verdict.reason in UNSURE:
            raise StoreRefused(
                f"The record {verdict.found.path} cannot be read ({verdict.field}), so what is whose cannot be told."
            )
    return known


def doubles(records: Iterable[Known]) -> list[Found]:
    """Older files of records that also have a newer one. A server that changes a record's name (another first chunk, pinned or
    not) has both for a moment, and deletes the older at its next start if it was killed then."""
    newest: dict[bytes, Known] = {}
    older = []
    for one in records:
        key = one.found.file.index_key
        other = newest.setdefault(key, one)
        if other is not one:
            newest[key] = max(one, other, key=lambda known: (known.last_use_ns, known.pinned))
            older.append(one.found if newest[key] is other else other.found)
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

    def presence(self, of: Known) -> Presence:
        chunks = 0
        for key in of.chunks:
            if key not in self._tags:
                break
            chunks += 1
        tail = None if of.tail is None else of.tail in self._tags and chunks == len(of.chunks)
        return Presence(chunks, len(of.chunks), tail)

    def tag(self, of: Known) -> str:
        """Of the first file that it names and that is there; "" if none is."""
        return next((self._tags[key] for key in of.keys if key in self._tags), "")


def what_to_keep(records: Sequence[Known], now_ns: int, before_ns: int | None = None) -> Keep:
    """For ``gc``: records past their time to live, or not used since ``before_ns``, protect nothing."""
    replaced = doubles(records)
    without = set(replaced)
    current = [one for one in records if one.found not in without]
    expired = [one for one in current if one.expired(now_ns)]
    old = [one for one in current if not one.expired(now_ns) and one.old(before_ns)]
    living = [one for one in current if not one.expired(now_ns) and not one.old(before_ns)]
    return Keep(
        pinned=frozenset(key for one in living if one.pinned for key in one.keys),
        named=frozenset(key for one in living for key in one.keys),
        replaced=replaced,
        expired=[one.found for one in expired],
        old=[one.found for one in old],
    )
