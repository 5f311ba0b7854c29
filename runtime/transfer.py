"""Copies between pool pages and slab slots on the CPU: one thread per direction, each first in, first out.

The copies are plain memory copies and release the interpreter lock, so they run beside the step. The scheduler decides when a
page or slot may be copied (never before the step that writes it is complete); this file only moves bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.plan import PageId, SlotId
from numpy.typing import NDArray

QUEUE_LIMIT = 65_536
"""Copies waiting in one direction. Each leases a page, so a scheduler that counts right stays below the pool's size."""

CLOSED = "the copier is closed"

_log = logging.getLogger(__name__)

Done = Callable[[str | None, float], None]
"""``done(error, copy_ms)``: error None, or why the copy failed."""


class PagePool(Protocol):
    """What the copier needs from the pool; ``runtime.kvpool.KVPool`` is it."""

    def page_view(self, page: int) -> memoryview:
        """The bytes of one page, writable, ``page_stride_bytes`` long. Raises IndexError outside the pool."""
        ...


class SlotSource(Protocol):
    """What the copier needs from the slab; ``runtime.slab.Slab`` is it."""

    def payload(self, slot: int) -> memoryview: ...


class CopierBusy(RuntimeError):
    """``QUEUE_LIMIT`` copies are waiting: the copy was not taken and its ``done`` will not be called."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """``places``: page numbers inside the slot, one per pool page. ``n_tokens``: tokens in them, 0: all full."""

    inward: bool
    slot: int
    places: tuple[int, ...]
    pages: tuple[int, ...]
    done: Done
    n_tokens: int = 0


class Copier:
    """``sched.ports.CopierPort`` for a pool in ordinary memory.

    ``done`` is called exactly once per copy that was taken, on the direction's thread; after ``close`` on the caller's, with an
    error. A failed copy may have written a part of its destination. A full queue raises CopierBusy.
    """

    def __init__(self, pool: PagePool, slab: SlotSource, geometry: KVGeometry, *, queue_limit: int = QUEUE_LIMIT) -> None:
        self._pool = pool
        self._slab = slab
        self._geometry = geometry
        self._stride = geometry.page_stride_bytes
        self._chunk_pages = geometry.chunk_pages
        self._out = _Direction("out", self._copy, queue_limit)
        self._in = _Direction("in", self._copy, queue_limit)

    def copy_out(self, pages: Sequence[PageId], slot: SlotId, first_page: int, done: Done, n_tokens: int = 0) -> None:
        """Copy whole pages into the slot's payload, the first one to its page ``first_page``. ``n_tokens``: how many tokens
        they hold, 0 = all that fit; the rest of the last page is zeroed in the slot."""
        places = tuple(range(first_page, first_page + len(pages)))
        self._out.submit(_Copy(False, slot, places, tuple(pages), done, n_tokens))

    def copy_in(self, slot: SlotId, slot_pages: Sequence[int], pages: Sequence[PageId], done: Done) -> None:
        """Copy the slot's pages ``slot_pages`` into the pool's ``pages``, pair by pair (equally many)."""
        self._in.submit(_Copy(True, slot, tuple(slot_pages), tuple(pages), done))

    def close(self) -> None:
        """Finish the copy that runs in each direction, fail those that wait, end the threads. Idempotent."""
        self._out.close()
        self._in.close()

    def _copy(self, copy: _Copy) -> None:
        """Move the bytes. Raises IndexError or ValueError for a page or place that does not exist; nothing is written then."""
        if len(copy.places) != len(copy.pages):
            raise ValueError(f"{len(copy.places)} pages of the slot for {len(copy.pages)} pages of the pool")
        payload = np.frombuffer(self._slab.payload(copy.slot), dtype=np.uint8)
        pairs = [(self._part(payload, place), self._page(page)) for place, page in zip(copy.places, copy.pages, strict=True)]
        for in_slot, in_pool in pairs:
            if copy.inward:
                np.copyto(in_pool, in_slot)
            else:
                np.copyto(in_slot, in_pool)
        if copy.n_tokens and pairs:
            zero_unused(pairs[-1][0], self._geometry, copy.n_tokens)

    def _part(self, payload: NDArray[np.uint8], place: int) -> NDArray[np.uint8]:
        if not 0 <= place < self._chunk_pages:
            raise IndexError(f"page {place} is outside a slot of {self._chunk_pages} pages")
        return payload[place * self._stride : (place + 1) * self._stride]

    def _page(self, page: int) -> NDArray[np.uint8]:
        if page < 0:
            raise IndexError(f"page {page} is outside the pool")
        view = np.frombuffer(self._pool.page_view(page), dtype=np.uint8)
        if view.size != self._stride:
            raise ValueError(f"page {page} of the pool has {view.size} bytes, not {self._stride}")
        return view


def zero_unused(page: NDArray[np.uint8], geometry: KVGeometry, n_tokens: int) -> None:
    """Zero the token places of a table's last page, ``page`` uint8 [page_stride_bytes], that its ``n_tokens`` tokens do not
    fill: what stood there before belongs to others and must not reach a slot or a file (docs/store-format.md)."""
    used = n_tokens % geometry.page_tokens
    if used:
        by_token = page[: geometry.page_bytes].reshape(geometry.n_layers * 2, geometry.page_tokens, -1)
        by_token[:, used:] = 0


class _Direction:
    """One queue and its thread."""

    def __init__(self, name: str, copy: Callable[[_Copy], None], limit: int) -> None:
        self._copy = copy
        self._limit = limit
        self._waiting: deque[_Copy] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvalet-copy-{name}", daemon=True)
        self._thread.start()

    def submit(self, copy: _Copy) -> None:
        with self._changed:
            if not self._closed:
                if len(self._waiting) >= self._limit:
                    raise CopierBusy(f"{self._limit} copies are waiting")
                self._waiting.append(copy)
                self._changed.notify()
                return
        _report(copy, CLOSED, 0.0)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # a done callback may close the copier
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                copy, closed = self._waiting.popleft(), self._closed
            if closed:
                _report(copy, CLOSED, 0.0)
                continue
            started = time.perf_counter()
            error: str | None = None
            try:
                self._copy(copy)
            except Exception as failure:  # noqa: BLE001 - the thread's border: whatever went wrong, the copy must end
                error = f"{type(failure).__name__}: {failure}"
            _report(copy, error, (time.perf_counter() - started) * 1e3)


def _report(copy: _Copy, error: str | None, copy_ms: float) -> None:
    try:
        copy.done(error, copy_ms)
    except Exception:  # noqa: BLE001 - the thread's border
        # The callback is the scheduler's: its fault must not end the thread, or every later copy would hang.
        _log.exception("a copy's done callback failed")
