"""``rm``: which files belong to one session and to nobody else. Pure.

A record names chunks; chunks name nobody. So a file goes if a record of the session names it and no other record does, or if
it goes on where such a file ends with the same tokens (a chunk written after the last record, an older tail). What another
record names stays, and so does whatever something that stays goes on from: a fork without a record, for example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvalet.store import layout
from kvalet.store.ids import ids_le
from kvalet.store.inspect_file import Facts, Verdict
from kvalet.store.inspect_gc import Cause, Removal, in_order
from kvalet.store.inspect_records import Known, Stored
from kvalet.store.inspect_tree import DEPTH
from kvalet.store.inspect_walk import Found

IdsOf = Callable[[Found], bytes]
"""Token ids of a chunk or tail, u32 little-endian; b"" if it cannot be read (any more)."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """``removals`` in the order in which to make them. ``shared``: files that another record names too; ``followed``: files
    that stay because something that stays goes on from them."""

    removals: Sequence[Removal]
    shared: int
    followed: int


def plan_removal(
    records: Iterable[Found], own: Sequence[Stored], others: Iterable[Known], verdicts: Sequence[Verdict], ids_of: IdsOf
) -> SessionPlan:
    """``records``: all record files of the session, readable or not; ``own``: the readable ones; ``others``: everybody
    else's. ``verdicts``: of every chunk, tail and state file."""
    facts = {v.found: v.facts for v in verdicts if v.facts is not None}
    foreign = {key for one in others for key in one.keys}
    by_key = {found.file.index_key[:8]: found for found in facts}
    after: dict[bytes, list[Found]] = defaultdict(list)
    for found, known in facts.items():
        after[known.parent].append(found)
    chosen: set[Found] = set()
    shared: set[Found] = set()
    for one in own:
        named = [by_key[key[:8]] for key in one.record.keys if key[:8] in by_key]
        shared.update(found for found in named if found.file.index_key[:8] in foreign)
        chosen.update(found for found in named if found.file.index_key[:8] not in foreign)
        chosen.update(_going_on(one, after, facts, foreign, ids_of))
    kept = _needed(chosen, after, facts)
    causes = dict.fromkeys((*(chosen - kept), *records), Cause.SESSION)
    return SessionPlan(in_order(causes, facts), len(shared), len(kept))


def _going_on(
    one: Stored,
    after: Mapping[bytes, Sequence[Found]],
    facts: Mapping[Found, Facts],
    foreign: set[bytes],
    ids_of: IdsOf,
) -> Iterable[Found]:
    """Files that no record names and that follow a chunk of this record with the record's own tokens, as far as both go."""
    ids = ids_le(one.record.ids)
    n_tokens = {known.key: known.n_tokens for found, known in facts.items() if found.file.folder == layout.CHUNKS}
    ends: dict[bytes, int] = {}
    length = 0
    for key in one.record.chunk_keys:
        if key not in n_tokens:
            break
        length += 4 * n_tokens[key]
        ends[key] = length
    if one.record.tail_key is not None:
        ends[one.record.tail_key] = len(ids)  # nothing but a running state follows a tail
    open_ = [(child, end) for key, end in ends.items() for child in after.get(key, ())]
    seen: set[Found] = set()
    while open_:
        child, start = open_.pop()
        known = facts[child]
        if child in seen or child.file.index_key[:8] in foreign or known.key in ends:
            continue
        if not ids_of(child).startswith(ids[start : start + 4 * known.n_tokens]):
            continue
        seen.add(child)
        yield child
        if child.file.folder == layout.CHUNKS:
            open_ += [(grandchild, start + 4 * known.n_tokens) for grandchild in after.get(known.key, ())]


def _needed(chosen: set[Found], after: Mapping[bytes, Sequence[Found]], facts: Mapping[Found, Facts]) -> set[Found]:
    """Of ``chosen``, what must stay because a file that stays follows it: deepest first, so that it reaches the top."""
    kept: set[Found] = set()
    for found in sorted(chosen, key=lambda f: (facts[f].ordinal, DEPTH[f.file.folder]), reverse=True):
        if any(child not in chosen or child in kept for child in after.get(facts[found].key, ())):
            kept.add(found)
    return kept
