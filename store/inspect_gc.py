"""``gc``: which files go, in which order, and why. Pure; store/inspect_remove.py deletes.

The set that goes is closed under descendants, so what stays is closed under ancestors; and the order is deepest first, so
that this holds after every single deletion, wherever somebody interrupts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from kvalet.store import layout
from kvalet.store.books import Books
from kvalet.store.entries import UNKNOWN_ORDINAL, Entry
from kvalet.store.inspect_file import Facts, Verdict
from kvalet.store.inspect_tree import DEPTH, dead_tails
from kvalet.store.inspect_walk import Found, Listing

ORDER = (layout.STATES, layout.TAILS, layout.CHUNKS, layout.RECORDS)
"""Nothing in one of these folders goes on from something in an earlier one."""
REFUSED = frozenset({"size", "header", "payload", "key"})
"""Reasons for which a server sets a file aside; what is foreign or cannot be read stays."""


class Cause(StrEnum):
    LEFTOVER = "left in tmp/ by a killed process"
    ASIDE = "set aside in bad/"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    DEAD_TAIL = "tail that a longer one replaced"
    REPLACED = "older file of a record"
    IDENTITY = "of another identity"
    EXPIRED = "expired record"
    OLD = "not used for long enough"
    CAP = "over the cap"
    SESSION = "of the session"


@dataclass(frozen=True, slots=True)
class Removal:
    """One file to delete. ``shard`` is "" in tmp/ and bad/. ``key``, ``parent``: where known; b"" else."""

    folder: str
    shard: str
    name: str
    n_bytes: int
    cause: Cause
    key: bytes = b""
    parent: bytes = b""

    @property
    def path(self) -> str:
        return "/".join(part for part in (self.folder, self.shard, self.name) if part)


@dataclass(frozen=True, slots=True)
class GcOptions:
    """``cap_bytes``: what all files may hold afterwards (None: any). ``before_ns``: files last used before go (None:
    none for their age). ``identity``: files of any other go (None: none)."""

    cap_bytes: int | None = None
    before_ns: int | None = None
    identity: bytes | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """What records say. ``pinned``: keys (first 8 bytes) of files that go only if they are refused; ``named``: of tails that a
    record names, so not dead. ``replaced``, ``expired``, ``old``: record files that have a newer one, are past their time to
    live, or were not used for long enough."""

    pinned: AbstractSet[bytes] = frozenset()
    named: AbstractSet[bytes] = frozenset()
    replaced: Sequence[Found] = ()
    expired: Sequence[Found] = ()
    old: Sequence[Found] = ()


def plan(
    listing: Listing, verdicts: Sequence[Verdict], lost: Mapping[Found, str], options: GcOptions, keep: Keep
) -> list[Removal]:
    """All removals, in the order in which to make them. ``verdicts``: of every file; ``lost``: those that cannot be reached
    (``inspect_tree.unreachable``)."""
    facts = {verdict.found: verdict.facts for verdict in verdicts if verdict.facts is not None}
    causes: dict[Found, Cause] = {}
    for verdict in verdicts:
        if verdict.reason in REFUSED:
            causes[verdict.found] = Cause.REFUSED
        elif _of_another(verdict.facts, options.identity) and verdict.found.file.index_key[:8] not in keep.pinned:
            causes[verdict.found] = Cause.IDENTITY
    for found in lost:
        if found.file.index_key[:8] not in keep.pinned:
            causes.setdefault(found, Cause.UNREACHABLE)
    for found in dead_tails(verdicts):
        if found.file.index_key[:8] not in keep.pinned | keep.named:
            causes.setdefault(found, Cause.DEAD_TAIL)
    staying = [v.found for v in verdicts if v.found not in causes and v.found.file.folder != layout.RECORDS]
    if options.before_ns is not None:
        for found in _old(staying, facts, options.before_ns, keep.pinned):
            causes[found] = Cause.OLD
        staying = [found for found in staying if found not in causes]
    if options.cap_bytes is not None:
        going = {*keep.replaced, *keep.expired, *keep.old}
        records = [f for f in listing.files if f.file.folder == layout.RECORDS and f not in causes and f not in going]
        for found in _over(staying, records, facts, options.cap_bytes, keep.pinned):
            causes[found] = Cause.CAP
    causes.update((found, Cause.REPLACED) for found in keep.replaced)
    causes.update((found, Cause.EXPIRED) for found in keep.expired)
    causes.update((found, Cause.OLD) for found in keep.old)
    return [*_loose(listing), *in_order(causes, facts)]


def _of_another(facts: Facts | None, identity: bytes | None) -> bool:
    return identity is not None and facts is not None and facts.identity != identity


def in_order(causes: Mapping[Found, Cause], facts: Mapping[Found, Facts]) -> list[Removal]:
    """Deepest first, and records last: a record that outlives its chunks is harmless and says what is left
    to do, chunks that outlive their record cannot be told from others."""

    def depth(found: Found) -> tuple[int, int, str]:
        return ORDER.index(found.file.folder), -found.file.ordinal, found.file.name

    removals = []
    for found in sorted(causes, key=depth):
        known = facts.get(found)
        parent = known.parent if known and known.parent != known.identity else b""
        key = known.key if known else b""
        removals.append(
            Removal(found.file.folder, found.file.shard, found.file.name, found.n_bytes, causes[found], key, parent)
        )
    return removals


def _loose(listing: Listing) -> list[Removal]:
    causes = {layout.TMP: Cause.LEFTOVER, layout.BAD: Cause.ASIDE}
    return [Removal(one.folder, "", one.name, one.n_bytes, causes[one.folder]) for one in listing.loose]


def _old(staying: Iterable[Found], facts: Mapping[Found, Facts], before_ns: int, pinned: AbstractSet[bytes]) -> Iterable[Found]:
    """Deepest first: a file that something younger or pinned follows stays, whatever its own age."""
    known = [found for found in staying if found in facts]
    children = Counter(facts[found].parent for found in known)
    for found in sorted(known, key=lambda f: (facts[f].ordinal, DEPTH[f.file.folder]), reverse=True):
        if not children[facts[found].key] and found.st.mtime_ns < before_ns and found.file.index_key[:8] not in pinned:
            children[facts[found].parent] -= 1
            yield found


def _over(
    staying: Sequence[Found],
    records: Sequence[Found],
    facts: Mapping[Found, Facts],
    cap_bytes: int,
    pinned: AbstractSet[bytes],
) -> list[Found]:
    """The same victims that a server with this cap would choose (store/books.py): records only when the chain that they name
    is gone."""
    books = Books(cap_bytes, b"")
    record_bytes = sum(found.n_bytes for found in records)
    by_key = {found.file.index_key: found for found in staying}
    for found in sorted(staying, key=lambda f: facts[f].ordinal if f in facts else UNKNOWN_ORDINAL):
        known = facts.get(found)
        ordinal = known.ordinal if known else UNKNOWN_ORDINAL
        entry = Entry(found.file, found.n_bytes, max(found.st.mtime_ns, 0), ordinal)
        if known is not None:
            entry.key, entry.parent = known.key, known.parent
        books.add(entry)
        if known is None:
            books.mark_unusable(found.file.index_key, "foreign")
    books.pin(key for key in by_key if key[:8] in pinned)
    victims = [by_key[entry.index_key] for entry in books.evict(books.live_bytes + record_bytes - cap_bytes, partly=True) or []]
    heads = {entry.index_key[:8] for entry in books.entries() if entry.ordinal == 0}
    for found in sorted(records, key=lambda found: found.st.mtime_ns):
        if books.live_bytes + record_bytes > cap_bytes and not found.file.pinned and found.file.head not in heads:
            victims.append(found)
            record_bytes -= found.n_bytes
    return victims
