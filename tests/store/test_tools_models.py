"""The pure parts of `kvalet store` against plain definitions, on random forests of chunks, tails and states, without a disk."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvalet.store import layout
from kvalet.store.fileio import FileStat
from kvalet.store.ids import ChunkKey, ids_le
from kvalet.store.inspect_check import Part
from kvalet.store.inspect_file import GONE, Facts, Verdict
from kvalet.store.inspect_gc import Cause, GcOptions, Keep, plan
from kvalet.store.inspect_records import Known, Stored, doubles, what_to_keep
from kvalet.store.inspect_session import plan_removal
from kvalet.store.inspect_sums import sums
from kvalet.store.inspect_tree import BAD, MISSING, dead_tails, unreachable
from kvalet.store.inspect_walk import Found, Listing
from kvalet.store.record import Record

ROOT = hashlib.blake2b(b"identity", digest_size=32).digest()
OTHER_ROOT = hashlib.blake2b(b"other", digest_size=32).digest()
TAG = "0a0b0c0d"
CHUNK = 4
KINDS = (layout.CHUNKS, layout.TAILS, layout.STATES)
CALM = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
"""The same examples each time, however busy the machine is."""


@dataclass
class Node:
    """One file of the forest. ``parent``: index of the node it follows, -1 for the root."""

    number: int
    parent: int
    folder: str
    ids: tuple[int, ...]
    mtime: int
    reason: str
    present: bool
    root: bytes
    ordinal: int = 0
    found: Found | None = None
    verdict: Verdict | None = None

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(self.number.to_bytes(4, "big"), digest_size=32).digest()


@dataclass
class Forest:
    nodes: list[Node] = field(default_factory=list)

    def parent_key(self, node: Node) -> bytes:
        return self.nodes[node.parent].key if node.parent >= 0 else node.root

    def there(self) -> list[Node]:
        return [node for node in self.nodes if node.present]

    def files(self) -> list[Found]:
        return [node.found for node in self.there() if node.found]

    def verdicts(self) -> list[Verdict]:
        return [node.verdict for node in self.there() if node.verdict]

    def node(self, found: Found) -> Node:
        return next(node for node in self.nodes if node.found is found)

    def ancestors(self, node: Node) -> list[Node]:
        line = []
        while node.parent >= 0:
            node = self.nodes[node.parent]
            line.append(node)
        return line

    def finish(self) -> Forest:
        """Names, stats and verdicts of all nodes."""
        for node in self.nodes:
            node.ordinal = self.nodes[node.parent].ordinal + 1 if node.parent >= 0 else 0
            parent, key = self.parent_key(node), node.key.hex()
            if node.folder == layout.TAILS:
                shard, name = parent.hex()[:2], f"{parent.hex()}.{len(node.ids)}.{key[:16]}.{TAG}"
            else:
                shard, name = key[:2], f"{key}.{node.ordinal}.{TAG}"
            file = layout.parse_name(node.folder, shard, name)
            assert file is not None
            node.found = Found(file, FileStat(stat.S_IFREG | 0o600, 0, 1, 4096, node.mtime, 1, node.number + 1))
            ids = ids_le(node.ids) if node.folder != layout.STATES else b""
            facts = Facts(node.root, node.key, parent, node.ordinal, len(node.ids), ids)
            node.verdict = Verdict(node.found, node.reason, facts=None if node.reason not in ("", "payload") else facts)
        return self


@st.composite
def forests(draw: st.DrawFn, *, damage: bool = True, holes: bool = True) -> Forest:
    forest = Forest()
    for number in range(draw(st.integers(1, 14))):
        carriers = [n.number for n in forest.nodes if n.folder == layout.CHUNKS]
        tails = [n.number for n in forest.nodes if n.folder == layout.TAILS]
        folder = draw(st.sampled_from(KINDS if carriers else (layout.CHUNKS, layout.TAILS)))
        parent = draw(st.sampled_from([-1, *carriers] if folder != layout.STATES else carriers + tails))
        length = {layout.CHUNKS: CHUNK, layout.TAILS: draw(st.integers(1, CHUNK - 1)), layout.STATES: 0}[folder]
        ids = tuple(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)))
        reason = draw(st.sampled_from(["", "", "", "header", "payload", "io", GONE])) if damage else ""
        root = forest.nodes[parent].root if parent >= 0 else draw(st.sampled_from([ROOT, ROOT, OTHER_ROOT]))
        present = draw(st.integers(0, 5)) > 0 or not holes
        forest.nodes.append(Node(number, parent, folder, ids, draw(st.integers(0, 9)), reason, present, root))
    return forest.finish()


@settings(CALM, max_examples=150)
@given(forests())
def test_unreachable_is_having_a_missing_or_bad_ancestor(forest: Forest) -> None:
    lost = unreachable(forest.files(), forest.verdicts())
    for node in forest.there():
        if node.reason:
            assert node.found not in lost
            continue
        causes = [
            MISSING if not ancestor.present else BAD
            for ancestor in forest.ancestors(node)
            if not ancestor.present or ancestor.reason not in ("", "io", GONE)
        ]
        unsure = any(ancestor.present and ancestor.reason in ("io", GONE) for ancestor in forest.ancestors(node))
        if not unsure:  # what cannot be read hides what is above it
            assert (node.found in lost) == bool(causes), node
        if node.found in lost:
            assert lost[node.found] in causes


@settings(CALM, max_examples=60)
@given(forests())
def test_a_parent_that_appears_at_the_second_look_loses_nobody(forest: Forest) -> None:
    lost = unreachable(forest.files(), forest.verdicts(), lambda found, parent: False)
    assert set(lost.values()) <= {BAD}


@settings(CALM, max_examples=150)
@given(forests(holes=False, damage=False))
def test_dead_tails_are_those_that_a_longer_sibling_begins_with(forest: Forest) -> None:
    dead = {forest.node(found).number for found in dead_tails(forest.verdicts())}
    plain = set()
    for node in forest.nodes:
        if node.folder != layout.TAILS or node.parent < 0:
            continue
        siblings = [other for other in forest.nodes if other.parent == node.parent and other.folder != layout.STATES]
        covered = any(len(o.ids) > len(node.ids) and o.ids[: len(node.ids)] == node.ids for o in siblings)
        if covered and not any(other.parent == node.number for other in forest.nodes):
            plain.add(node.number)
    assert dead == plain


def closed(forest: Forest, gone: set[int]) -> bool:
    """No file that stays has lost a parent by the removal."""
    return all(node.parent < 0 or node.parent not in gone for node in forest.there() if node.number not in gone)


OPTIONS = st.builds(
    GcOptions,
    st.none() | st.integers(0, 14).map(lambda n: n * 4096),
    st.none() | st.integers(0, 10),
    st.none() | st.just(ROOT),
)


@settings(CALM, max_examples=200)
@given(forests(), OPTIONS, st.sets(st.integers(0, 13), max_size=3))
def test_gc_keeps_what_it_must_and_every_prefix_of_it_is_closed(forest: Forest, options: GcOptions, pins: set[int]) -> None:
    pinned_nodes = {
        n.number for p in pins if p < len(forest.nodes) for n in (forest.nodes[p], *forest.ancestors(forest.nodes[p]))
    }
    pinned = frozenset(forest.nodes[number].key[:8] for number in pinned_nodes)
    listing = Listing(files=forest.files())
    lost = unreachable(listing.files, forest.verdicts())
    removals = plan(listing, forest.verdicts(), lost, options, Keep(pinned=pinned))
    by_name = {node.found.file.name: node for node in forest.there() if node.found}
    gone: set[int] = set()
    for removal in removals:
        node = by_name[removal.name]
        assert node.reason not in ("io", GONE) or removal.cause in (Cause.CAP, Cause.OLD), "may be good"
        assert node.number not in pinned_nodes or removal.cause is Cause.REFUSED
        before = closed(forest, gone)
        gone.add(node.number)
        hidden = any(other.reason in ("io", GONE) for other in forest.there())
        if removal.cause is not Cause.REFUSED and not hidden and not pinned_nodes:
            assert closed(forest, gone) or not before, removal
    left = [node for node in forest.there() if node.number not in gone]
    if options.cap_bytes == 0 and not pinned_nodes:
        assert left == []
    if options.identity is not None:
        assert all(node.root == ROOT or node.number in pinned_nodes or node.reason for node in left)
    if not any(node.reason for node in forest.nodes) and not pinned_nodes:
        assert unreachable([n.found for n in left if n.found], [n.verdict for n in left if n.verdict]) == {}


def stored(forest: Forest, end: Node, name: str) -> Stored:
    """A record of the chain that ends with ``end``."""
    line = [*reversed(forest.ancestors(end)), end]
    ids = tuple(token for node in line for token in node.ids)
    chunks = tuple(ChunkKey(node.key) for node in line if node.folder == layout.CHUNKS)
    tail = ChunkKey(end.key) if end.folder == layout.TAILS else None
    record = Record("", name, "00000000000000b1", ids, 0, len(ids), chunk_keys=chunks, tail_key=tail)
    return Stored(record_file(name), record, b"t" * 16, b"")


def record_file(name: str, mtime: int = 1, pinned: bool = False) -> Found:
    session = hashlib.blake2b(name.encode(), digest_size=16).digest()
    file_name = f"{session.hex()}.00000000000000b1.{'0' * 16}.{'p' if pinned else 's'}"
    file = layout.parse_name(layout.RECORDS, file_name[:2], file_name)
    assert file is not None
    return Found(file, FileStat(stat.S_IFREG | 0o600, 0, 1, 500, mtime, 1, 1))


@settings(CALM, max_examples=200)
@given(forests(holes=False, damage=False), st.data())
def test_rm_takes_all_that_is_the_sessions_and_nothing_that_is_not(forest: Forest, data: st.DataObject) -> None:
    ends = [node for node in forest.nodes if node.folder != layout.STATES]
    mine = stored(forest, data.draw(st.sampled_from(ends)), "mine")
    others = [
        stored(forest, end, f"other{n}").known() for n, end in enumerate(data.draw(st.lists(st.sampled_from(ends), max_size=2)))
    ]
    ids = {node.found: ids_le(node.ids) for node in forest.nodes}
    result = plan_removal([mine.found], [mine], others, forest.verdicts(), lambda found: ids[found])
    assert result.removals[-1].name == mine.found.file.name, "the record goes last"
    by_name = {node.found.file.name: node for node in forest.nodes if node.found}
    gone: set[int] = set()
    foreign = {key for other in others for key in other.keys}
    own = {key[:8] for key in mine.record.keys}
    for removal in result.removals[:-1]:
        node = by_name[removal.name]
        assert node.key[:8] not in foreign
        line = [node, *forest.ancestors(node)]
        assert any(one.key[:8] in own for one in line), "neither named nor after something that is"
        gone.add(node.number)
        assert closed(forest, gone)
    for node in forest.nodes:
        if node.key[:8] in own and node.key[:8] not in foreign and node.number not in gone:
            staying = [n for n in forest.nodes if n.number not in gone and n.parent == node.number]
            assert staying, "nothing that stays needs it"


@settings(CALM, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=8))
def test_of_several_files_of_a_record_the_latest_counts(files: list[tuple[str, int, bool]]) -> None:
    records = [known(name, mtime, pinned=pinned) for name, mtime, pinned in dict.fromkeys(files)]
    older = doubles(records)
    assert len(set(older)) == len(older) == len(records) - len({one.session for one in records})
    for one in records:
        if one.found not in older:
            rank = (one.last_use_ns, one.pinned)
            assert rank == max((o.last_use_ns, o.pinned) for o in records if o.session == one.session)


def known(name: str, mtime: int, *, pinned: bool = False, ttl_s: int | None = None) -> Known:
    key = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return Known(record_file(name, mtime, pinned), b"", name, "b", 1, 1, pinned, ttl_s, (key,), None, ())


def test_what_to_keep_by_age_and_time_to_live() -> None:
    second = 10**9
    records = [
        known("expired", 10 * second, ttl_s=5),
        known("just not", 15 * second, ttl_s=5),
        known("pinned", 10 * second, ttl_s=5, pinned=True),
        known("old", 12 * second),
        known("new", 19 * second),
    ]
    keep = what_to_keep(records, 20 * second)
    assert list(keep.expired) == [records[0].found]
    assert keep.old == []
    assert keep.pinned == {records[2].keys[0]}
    assert keep.named == {one.keys[0] for one in records[1:]}
    keep = what_to_keep(records, 20 * second, before_ns=16 * second)
    assert list(keep.old) == [records[1].found, records[3].found]
    assert keep.named == {records[2].keys[0], records[4].keys[0]}


@settings(CALM, max_examples=60)
@given(forests(damage=False), st.integers(1, 9))
def test_parts_and_sums_lose_no_file(forest: Forest, parts: int) -> None:
    files = forest.files()
    held = [found for number in range(1, parts + 1) for found in files if Part(number, parts).holds(found)]
    assert sorted(found.path for found in held) == sorted(found.path for found in files)
    totals = sums(files)
    assert sum(total.files for total in totals) == len(files)
    assert sum(total.n_bytes for total in totals) == 4096 * len(files)
    assert all(total.tag == TAG for total in totals)
