"""Who is worth least, without looking at everybody: heaps of ranks that are checked when they are read.

An entry is pushed when an item's rank falls or it becomes a candidate; stale entries are recognised when they come up. So
asking for the least costs a few steps instead of a pass over all leaves or slots. Bound: a heap is rebuilt from its live
items when stale entries outnumber them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from kvalet.sched.policy import Rank, rank_chunk

if TYPE_CHECKING:
    from kvalet.sched.chunks import Chunk

T = TypeVar("T")
SLACK = 64


class Ranking(Generic[T]):
    """``rank_of(item)``: its rank now, or None if it is no longer a candidate. ``items``: all that may be one (or more).

    An item has one entry that counts, of a rank it has had, and ranks may grow in silence: an entry that comes up below its
    item's rank is put back at the right place. So using something costs nothing here. Where a rank falls, or an item becomes a
    candidate, ``push`` says so.
    """

    def __init__(self, rank_of: Callable[[T], Rank | None], items: Callable[[], Collection[T]]) -> None:
        self._rank_of = rank_of
        self._items = items
        self._heap: list[tuple[Rank, int, T]] = []
        self._at: dict[T, Rank] = {}
        """The rank of the entry that counts."""
        self._pushed = 0

    def push(self, item: T) -> None:
        """``item`` has a lower rank than before, or has become a candidate."""
        rank = self._rank_of(item)
        if rank is None:
            return
        at = self._at.get(item)
        if at is None or rank < at:
            self._put(item, rank)
            if len(self._heap) > 2 * len(self._items()) + SLACK:
                self._rebuild()

    def least(self, fit: Callable[[T], bool]) -> T | None:
        """The candidate of least rank that ``fit`` accepts now. Those it does not accept keep their place."""
        found = self.smallest(1, fit)
        return found[0] if found else None

    def smallest(self, n: int, fit: Callable[[T], bool]) -> list[T]:
        """The ``n`` candidates of least rank that ``fit`` accepts now, least first; fewer if there are no more."""
        found: list[T] = []
        aside: list[tuple[Rank, int, T]] = []
        while self._heap and len(found) < n:
            entry = self._heap[0]
            rank, _, item = entry
            if self._at.get(item) != rank:
                heapq.heappop(self._heap)
                continue
            now = self._rank_of(item)
            if now == rank:
                aside.append(heapq.heappop(self._heap))
                if fit(item):
                    found.append(item)
            elif now is None:
                heapq.heappop(self._heap)
                del self._at[item]
            else:
                heapq.heappop(self._heap)
                self._put(item, now)
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def _put(self, item: T, rank: Rank) -> None:
        self._at[item] = rank
        self._pushed += 1
        heapq.heappush(self._heap, (rank, self._pushed, item))

    def _rebuild(self) -> None:
        self._at = {item: rank for item in self._items() if (rank := self._rank_of(item)) is not None}
        self._heap = [(rank, number, item) for number, (item, rank) in enumerate(self._at.items())]
        self._pushed = len(self._heap)
        heapq.heapify(self._heap)


class RamClass(StrEnum):
    """What losing a chunk's RAM copy would mean."""

    CLEAN = "clean"
    """The disk has it."""
    SHADOWED = "shadowed"
    """Only the device has it as well."""
    ONLY = "only"
    """It would be lost."""


class RamOrder:
    """The chunks in RAM, by class and rank. ``note`` after every change of a chunk's copies, and where its use is set back."""

    def __init__(self) -> None:
        self._class: dict[Chunk, RamClass] = {}
        self.counts = dict.fromkeys(RamClass, 0)
        self._rankings = {kind: Ranking(self._rank_in(kind), lambda: self._class) for kind in RamClass}

    def _rank_in(self, kind: RamClass) -> Callable[[Chunk], Rank | None]:
        return lambda chunk: rank_chunk(chunk) if self._class.get(chunk) is kind else None

    @property
    def reclaimable(self) -> int:
        """Slots whose loss would lose nothing."""
        return self.counts[RamClass.CLEAN] + self.counts[RamClass.SHADOWED]

    def unwritten(self, n: int) -> list[Chunk]:
        """The ``n`` least of the chunks in RAM that the disk lacks and that no transfer takes anywhere."""
        parts = [self._rankings[kind].smallest(n, lambda c: c.outgoing is None) for kind in (RamClass.SHADOWED, RamClass.ONLY)]
        return list(islice(heapq.merge(*parts, key=rank_chunk), n))

    def note(self, chunk: Chunk) -> None:
        kind = None
        if chunk.slot is not None:
            kind = RamClass.CLEAN if chunk.on_disk else RamClass.SHADOWED if chunk.node is not None else RamClass.ONLY
        old = self._class.get(chunk)
        if old is not kind:
            if old is not None:
                self.counts[old] -= 1
                del self._class[chunk]
            if kind is not None:
                self.counts[kind] += 1
                self._class[chunk] = kind
        if kind is not None:
            self._rankings[kind].push(chunk)

    def least(self, kinds: Iterable[RamClass], fit: Callable[[Chunk], bool]) -> Chunk | None:
        """The least chunk of the first of ``kinds`` that has one which fits."""
        for kind in kinds:
            chunk = self._rankings[kind].least(fit)
            if chunk is not None:
                return chunk
        return None

    def class_of(self, chunk: Chunk) -> RamClass | None:
        return self._class.get(chunk)
