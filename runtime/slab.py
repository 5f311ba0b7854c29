"""The slab: one anonymous mapping that holds every RAM slot and staging slot. No torch.

Sized once and never grown. Slot ``i`` is ``geometry.slot_bytes`` bytes at ``i * slot_bytes``: a header block of 4096 bytes,
which the store fills, and one chunk's payload. Every slot and every payload begins at a multiple of 4096 in memory, as direct
I/O and DMA ask for.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from kvalet.runtime.geometry import BLOCK_BYTES, KVGeometry

POPULATE_PIECE_BYTES = 64 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14; Python has no name for it yet
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Progress = Callable[[int, int], None]
"""Called with (bytes populated so far, bytes in all), on the thread that makes the slab."""


class SlabError(RuntimeError):
    """The slab could not be made as large as asked; the message says how large that was."""


class Slab:
    """``n_slots`` slots in one mapping, all of it populated, so that no later copy waits for the kernel or finds no memory.

    Views are memoryviews into the mapping: they copy nothing and are valid until ``close``.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        n_slots: int,
        *,
        threads: int = 4,
        progress: Progress | None = None,
        populate: bool = True,
    ) -> None:
        """Map and populate (``populate`` False: the caller does, piece by piece). Raises ValueError for ``n_slots`` < 1 (a tier
        of no slots has no slab), SlabError if the system does not give the memory. A control group's limit is enforced
        by the kernel while populating: by killing the process."""
        if n_slots < 1:
            raise ValueError(f"a slab needs at least 1 slot, not {n_slots}")
        self.n_slots = n_slots
        self.slot_bytes = geometry.slot_bytes
        self.n_bytes = n_slots * geometry.slot_bytes
        try:
            self._map = mmap.mmap(-1, self.n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise SlabError(f"no address space for a slab of {n_slots} slots, {self.n_bytes} bytes: {error}") from error
        for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
            _advise(self._map, advice)
        try:
            if populate:
                self.populate(0, self.n_bytes, threads, progress)
        except SlabError:
            self._map.close()
            raise
        self._view = memoryview(self._map)

    def populate(self, start: int, length: int, threads: int, progress: Progress | None = None) -> None:
        """Take memory for [start, start + length) from the system. SlabError if it has none."""
        try:
            _populate(_address(self._map) + start, length, threads, progress)
        except OSError as error:
            raise SlabError(f"no memory for a slab of {self.n_slots} slots, {self.n_bytes} bytes: {error}") from error

    def view(self, slot: int) -> memoryview:
        """The whole slot, writable: header block and payload. Raises IndexError outside 0..n_slots-1."""
        if not 0 <= slot < self.n_slots:
            raise IndexError(f"slot {slot} is outside the slab of {self.n_slots}")
        return self._view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def payload(self, slot: int) -> memoryview:
        """The chunk's bytes in the slot, writable, without the header block."""
        return self.view(slot)[BLOCK_BYTES:]

    @property
    def address(self) -> int:
        """Where the mapping begins, for registering it with a device."""
        return _address(self._map)

    def close(self) -> None:
        """Give the memory back. Raises BufferError, and changes nothing, while a view is still held. Idempotent."""
        if self._map.closed:
            return
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            self._view = memoryview(self._map)
            raise


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _advise(mapping: mmap.mmap, name: str) -> None:
    """Advice that may be refused (kernels without it): the slab works without."""
    advice = getattr(mmap, name, None)
    if advice is not None:
        try:
            mapping.madvise(advice)
        except OSError:
            pass


def _populate(base: int, total: int, threads: int, progress: Progress | None) -> None:
    """Touch every page, piece by piece on several threads (one thread zeroes about 2 GB/s)."""
    done = 0
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="kvalet-slab") as pool:
        pieces = {
            pool.submit(_populate_piece, base + start, min(POPULATE_PIECE_BYTES, total - start)): start
            for start in range(0, total, POPULATE_PIECE_BYTES)
        }
        for piece in as_completed(pieces):
            piece.result()
            done += min(POPULATE_PIECE_BYTES, total - pieces[piece])
            if progress is not None:
                progress(done, total)


def _populate_piece(address: int, length: int) -> None:
    """Populate one piece; the kernel call does it without the interpreter lock. Where it is unknown, pages are written to."""
    if _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != 22:  # EINVAL: a kernel before 5.14
        raise OSError(code, "populating memory failed")
    touch_pages(address, length)


def touch_pages(address: int, length: int) -> None:
    """Write a zero into each page of fresh memory: what populating means, by hand."""
    for offset in range(0, length, mmap.PAGESIZE):
        ctypes.memset(address + offset, 0, 1)
