"""Who is worth least, without looking at everybody: heaps of ranks that are checked when they are read.

An entry is pushed whenever an item's rank or condition changes; older entries of the same item are recognised as stale when
they come up, and thrown away. So asking for the least costs a few steps instead of a pass over all leaves or slots. Bound:
a heap is rebuilt from its live items when stale entries outnumber them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

from kvalet.sched.policy import Rank, rank_chunk

if TYPE_CHECKING:
    from kvalet.sched.chunks import Chunk

T = TypeVar("T")
SLACK = 64


class Ranking(Generic[T]):
    """``rank_of(item)``: its rank now, or None if it is no longer a candidate."""

    def __init__(self, rank_of: Callable[[T], Rank | None], items: Callable[[], Iterable[T]]) -> None:
        self._rank_of = rank_of
        self._items = items
        self._heap: list[tuple[Rank, int, T]] = []
        self._pushed = 0
        self._live = 0

    def push(self, item: T) -> None:
        """``item`` has a new rank, or has become a candidate."""
        rank = self._rank_of(item)
        if rank is None:
            return
        self._pushed += 1
        heapq.heappush(self._heap, (rank, self._pushed, item))
        if len(self._heap) > 2 * self._live + SLACK:
            self._rebuild()

    def least(self, fit: Callable[[T], bool]) -> T | None:
        """The candidate of least rank that ``fit`` accepts now. Those it does not accept keep their place."""
        aside: list[tuple[Rank, int, T]] = []
        found: T | None = None
        for entry in self._valid():
            aside.append(entry)
            if fit(entry[2]):
                found = entry[2]
                break
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def _valid(self) -> Iterator[tuple[Rank, int, T]]:
        seen: set[int] = set()
        while self._heap:
            entry = heapq.heappop(self._heap)
            if id(entry[2]) not in seen and self._rank_of(entry[2]) == entry[0]:
                seen.add(id(entry[2]))
                yield entry

    def _rebuild(self) -> None:
        live = [(rank, item) for item in self._items() if (rank := self._rank_of(item)) is not None]
        self._live = len(live)
        self._heap = [(rank, number, item) for number, (rank, item) in enumerate(live)]
        self._pushed = len(live)
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
    """The chunks in RAM, by class and rank. ``note`` after every change of a chunk's copies or use."""

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

    def unwritten(self) -> list[Chunk]:
        """Chunks in RAM that the disk lacks."""
        return [chunk for chunk, kind in self._class.items() if kind is not RamClass.CLEAN]

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
