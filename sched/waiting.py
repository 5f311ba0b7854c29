"""Restores that are reserved and wait for their turn: for a slot to read into, or for the link to the device.

The oldest asker goes first, and of one turn the first chunk: a turn that comes back gets the link to itself until it is
served, instead of sharing it with those behind it, who would not be faster for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvalet.sched.events import TransferId
from kvalet.sched.transfer_record import Transfer

SLACK = 64
Entry = tuple[tuple[int, int], TransferId, Transfer]


def order_of(transfer: Transfer) -> tuple[int, int]:
    """That of its oldest asker."""
    return min(asker.order for asker in transfer.askers)


class WaitingRestores:
    """A heap whose entries are checked when they come up. Bound: it is made anew when stale entries outnumber live ones.

    Every member has an asker; ``note`` when it gets one more (one that leaves needs no word).
    """

    def __init__(self) -> None:
        self._members: dict[TransferId, Transfer] = {}
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._members.values())

    def __contains__(self, transfer: Transfer) -> bool:
        return transfer.id in self._members

    def add(self, transfer: Transfer) -> None:
        self._members[transfer.id] = transfer
        self._push(transfer)

    def note(self, transfer: Transfer) -> None:
        """Somebody has attached to it."""
        if transfer.id in self._members:
            self._push(transfer)

    def discard(self, transfer: Transfer) -> None:
        self._members.pop(transfer.id, None)

    def first(self) -> Transfer | None:
        """The member of the oldest asker; it stays."""
        heap = self._heap
        while heap:
            order, number, transfer = heap[0]
            if number not in self._members:
                heapq.heappop(heap)
            elif (now := order_of(transfer)) != order:
                heapq.heapreplace(heap, (now, number, transfer))  # the oldest asker has left
            else:
                return transfer
        return None

    def _push(self, transfer: Transfer) -> None:
        heapq.heappush(self._heap, (order_of(transfer), transfer.id, transfer))
        if len(self._heap) > 2 * len(self._members) + SLACK:
            self._heap = [(order_of(t), t.id, t) for t in self._members.values()]
            heapq.heapify(self._heap)
