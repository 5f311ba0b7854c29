"""The page ledger: who has a claim on each page of the pool.

Each page but the scratch page 0 is in exactly one of: free, held (one or more owners, leased or not), leased only; the
three sum to ``n_pages - 1``. Owners are the page index (once per entry) and turns (once per turn); leases belong to
steps in flight and to transfers. A page returns to the free list in the moment it loses its last owner and lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvalet.runtime.plan import PageId


class LedgerError(RuntimeError):
    """A claim was given up that did not exist, or one was laid on a free page: a defect of the caller."""


@dataclass(frozen=True, slots=True)
class PageStatistics:
    """Pages by condition; ``free + held + leased_only == total``."""

    total: int
    free: int
    held: int
    leased_only: int


class PageLedger:
    """Bound: ``n_pages`` is fixed; ``take`` answers None when nothing is free and changes nothing."""

    def __init__(self, n_pages: int) -> None:
        self.total = n_pages - 1
        self._owners = [0] * n_pages
        self._leases = [0] * n_pages
        self._free = [PageId(page) for page in range(n_pages - 1, 0, -1)]
        self._held = 0

    def __repr__(self) -> str:
        return f"PageLedger({self.statistics()})"

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self._held

    @property
    def leased_only(self) -> int:
        return self.total - len(self._free) - self._held

    def take(self) -> PageId | None:
        """A free page, owned once by the caller. The last one freed is the first one given, which makes reuse early."""
        if not self._free:
            return None
        page = self._free.pop()
        self._owners[page] = 1
        self._held += 1
        return page

    def own(self, page: PageId) -> None:
        """One more owner of a page that somebody owns or leases."""
        self._demand_claimed(page)
        if self._owners[page] == 0:
            self._held += 1
        self._owners[page] += 1

    def disown(self, page: PageId) -> None:
        if self._owners[page] < 1:
            raise LedgerError(f"page {page} has no owner to lose")
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self._held -= 1
            self._free_if_unclaimed(page)

    def lease(self, page: PageId) -> None:
        """One more lease on a page that somebody owns or leases."""
        self._demand_claimed(page)
        self._leases[page] += 1

    def unlease(self, page: PageId) -> None:
        if self._leases[page] < 1:
            raise LedgerError(f"page {page} has no lease to lose")
        self._leases[page] -= 1
        self._free_if_unclaimed(page)

    # for many pages at once; each does what the one above does page by page

    def take_all(self, n: int) -> list[PageId]:
        """``n`` free pages, which there must be, in ascending order: neighbours are copied in one piece."""
        if n > len(self._free):
            raise LedgerError(f"{n} pages are taken and {len(self._free)} are free")
        pages = self._free[len(self._free) - n :]
        del self._free[len(self._free) - n :]
        for page in pages:
            self._owners[page] = 1
        self._held += n
        return sorted(pages)

    def own_all(self, pages: Iterable[PageId]) -> None:
        owners, leases = self._owners, self._leases
        for page in pages:
            if not owners[page]:
                if not leases[page]:
                    self._demand_claimed(page)
                self._held += 1
            owners[page] += 1

    def disown_all(self, pages: Iterable[PageId]) -> None:
        owners, leases, free = self._owners, self._leases, self._free
        for page in pages:
            n = owners[page] - 1
            if n < 0:
                raise LedgerError(f"page {page} has no owner to lose")
            owners[page] = n
            if not n:
                self._held -= 1
                if not leases[page]:
                    free.append(page)

    def lease_all(self, pages: Iterable[PageId]) -> None:
        owners, leases = self._owners, self._leases
        for page in pages:
            if not owners[page] and not leases[page]:
                self._demand_claimed(page)
            leases[page] += 1

    def unlease_all(self, pages: Iterable[PageId]) -> None:
        owners, leases, free = self._owners, self._leases, self._free
        for page in pages:
            n = leases[page] - 1
            if n < 0:
                raise LedgerError(f"page {page} has no lease to lose")
            leases[page] = n
            if not n and not owners[page]:
                free.append(page)

    def lend_all(self, pages: Iterable[PageId]) -> None:
        """``lease`` and then ``disown``: the claim passes from an owner to a transfer."""
        owners, leases = self._owners, self._leases
        for page in pages:
            n = owners[page] - 1
            if n < 0:
                raise LedgerError(f"page {page} has no owner to lose")
            owners[page] = n
            self._held -= not n
            leases[page] += 1

    def claims(self, page: PageId) -> tuple[int, int]:
        """(owners, leases)."""
        return self._owners[page], self._leases[page]

    def statistics(self) -> PageStatistics:
        return PageStatistics(self.total, self.free, self._held, self.leased_only)

    def check(self, owners: list[int], leases: list[int]) -> None:
        """Conservation, and the claims equal those counted from outside (both lists indexed by page). Raises LedgerError."""
        free = set(self._free)
        if len(free) != len(self._free) or 0 in free:
            raise LedgerError("a page is free twice, or the scratch page is free")
        if owners != self._owners or leases != self._leases:
            wrong = [
                (page, owners[page], self._owners[page], leases[page], self._leases[page])
                for page in range(self.total + 1)
                if owners[page] != self._owners[page] or leases[page] != self._leases[page]
            ]
            raise LedgerError(f"claims differ, (page, owners counted, booked, leases counted, booked): {wrong}")
        held = 0
        for page in range(1, self.total + 1):
            held += owners[page] > 0
            if (page in free) != (owners[page] == 0 and leases[page] == 0):
                raise LedgerError(f"page {page} free={page in free} with {owners[page]} owners and {leases[page]} leases")
        if held != self._held:
            raise LedgerError(f"{held} pages are held, {self._held} booked")

    def _demand_claimed(self, page: PageId) -> None:
        if self._owners[page] == 0 and self._leases[page] == 0:
            raise LedgerError(f"page {page} is free: nobody can lay a claim on it but through take")

    def _free_if_unclaimed(self, page: PageId) -> None:
        if self._owners[page] == 0 and self._leases[page] == 0:
            self._free.append(page)
