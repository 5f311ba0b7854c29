"""Which stored files can be reached from the start of a conversation, and which tails no longer serve anything. Pure.

A session walks forward from token 0, so a chunk is of use only while all before it are there (docs/store.md: the disk is
closed under ancestors). After damage, or a deletion from outside, descendants stay and are not reachable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvalet.store.inspect_file import GONE, Facts, Verdict
from kvalet.store.inspect_walk import Found
from kvalet.store.layout import CHUNKS, STATES, TAILS

MISSING = "missing"
BAD = "bad"
"""Why a good file cannot be reached: an ancestor is not there, or is refused."""

DEPTH = {CHUNKS: 0, TAILS: 1, STATES: 2}
"""Of files of one ordinal, a parent's comes before its child's: running states follow chunks and tails, and nothing follows
them."""
UNSURE = frozenset({"", GONE, "io", "resources"})
"""Says nothing about a file's descendants: it may be good."""

StillMissing = Callable[[Found, bytes], bool]
"""(a file, its parent's key) -> is the parent really not there, and the file still is? A running server may have written the
one or evicted the other since the names were listed."""


def unreachable(
    files: Sequence[Found],
    verdicts: Iterable[Verdict],
    still_missing: StillMissing = lambda found, parent: True,
) -> dict[Found, str]:
    """Good files that cannot be reached -> MISSING or BAD. ``files``: all names; ``verdicts``: of those that were looked at:
    a file that was not looked at is taken to be good and reachable. Ends for any headers: parents come before children by
    ordinal, and a parent of another ordinal than one less is none."""
    parents = {found.file.index_key[:8]: found for found in files if found.file.folder in (CHUNKS, TAILS)}
    causes: dict[bytes, str] = {}
    good: list[tuple[Found, Facts]] = []
    for verdict in verdicts:
        if verdict.facts is not None and not verdict.reason:
            good.append((verdict.found, verdict.facts))
        elif verdict.reason not in UNSURE and verdict.found.file.folder in (CHUNKS, TAILS):
            causes[verdict.found.file.index_key[:8]] = BAD
    good.sort(key=lambda item: (item[1].ordinal, DEPTH[item[0].file.folder], item[0].file.name))
    lost: dict[Found, str] = {}
    for found, facts in good:
        cause = _cause(found, facts, parents, causes, still_missing)
        if cause:
            lost[found] = cause
            if found.file.folder in (CHUNKS, TAILS):
                causes[found.file.index_key[:8]] = cause
    return lost


def _cause(
    found: Found, facts: Facts, parents: dict[bytes, Found], causes: dict[bytes, str], still_missing: StillMissing
) -> str:
    if facts.parent == facts.identity:
        return ""
    parent = parents.get(facts.parent[:8])
    is_next = parent is not None and (parent.file.ordinal == facts.ordinal - 1 or found.file.folder == STATES)
    if not is_next:
        return MISSING if still_missing(found, facts.parent) else ""
    return causes.get(facts.parent[:8], "")


def dead_tails(verdicts: Sequence[Verdict]) -> list[Found]:
    """Tails whose tokens a chunk or a longer tail after the same parent begins with: no session can want them. Needs the ids
    of everything that follows a tail's parent. A tail that a running state follows is not dead.

    Tails at token 0 are left out: their parent is the same for all tenants, and whose they are is in no header."""
    after: dict[bytes, list[tuple[Found, Facts]]] = defaultdict(list)
    followed: set[bytes] = set()
    for verdict in verdicts:
        facts = verdict.facts
        if facts is not None:
            followed.add(facts.parent)
        if facts is not None and facts.ids and not verdict.reason and facts.parent != facts.identity:
            after[facts.parent].append((verdict.found, facts))
    dead = []
    for siblings in after.values():
        longest = sorted(siblings, key=lambda item: len(item[1].ids), reverse=True)
        for number, (found, facts) in enumerate(longest):
            if (
                found.file.folder == TAILS
                and facts.key not in followed
                and any(_covers(other, facts) for _, other in longest[:number])
            ):
                dead.append(found)
    return dead


def _covers(other: Facts, tail: Facts) -> bool:
    return len(other.ids) > len(tail.ids) and other.ids.startswith(tail.ids)


def parents_of_tails(files: Iterable[Found]) -> frozenset[bytes]:
    return frozenset(found.file.parent for found in files if found.file.folder == TAILS and found.file.parent is not None)
