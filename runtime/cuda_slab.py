"""The slab registered with CUDA, piece by piece, while the engine serves already.

A piece is a run of whole slots (no copy may cross two registrations). Its pages are populated by several threads, then it is
registered, so that DMA reads and writes it in place. Slots are given out from the lowest on, so the first pieces are ready long
before the last is asked for; whoever needs a slot of a piece that is not ready waits for that piece, and for no other.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from kvalet.runtime.errors import EngineError
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.slab import Slab
from torch import Tensor

PIECE_BYTES = 1 << 30
_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
"""Called with (bytes ready, bytes in all), on the thread that makes them so."""


class HostMemory(Protocol):
    """Registers host memory with a device; statuses are CUDA's, 0 = done."""

    def register(self, address: int, length: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CudaHostMemory:
    def register(self, address: int, length: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, length, 0))

    def unregister(self, address: int) -> int:
        return int(torch.cuda.cudart().cudaHostUnregister(address))


class RegisteredSlab:
    """The first piece is ready when this is made, the others follow on a thread of its own.

    A later piece that cannot be populated or registered is used as it is: copies of it are slower and the log says so
    (``unregistered_bytes``).
    """

    def __init__(
        self,
        slab: Slab,
        memory: HostMemory,
        *,
        threads: int = 4,
        piece_bytes: int = PIECE_BYTES,
        progress: Progress | None = None,
    ) -> None:
        """``slab``: not populated yet. Raises EngineError if the driver refuses the first piece, SlabError if there is no
        memory for it."""
        self.slab, self._memory, self._threads, self._progress = slab, memory, threads, progress
        whole = (ctypes.c_uint8 * slab.n_bytes).from_address(slab.address)
        self._tensor = torch.frombuffer(whole, dtype=torch.uint8)
        self._spans = piece_spans(slab.n_slots, slab.slot_bytes, piece_bytes)
        self._slots_per_piece = self._spans[0][1] // slab.slot_bytes
        self._ready = [threading.Event() for _ in self._spans]
        self._registered: list[int] = []
        self._closing = False
        self.unregistered_bytes = 0
        code = self._prepare(0)
        if code:
            raise EngineError(
                f"registering {self._spans[0][1]} bytes of the slab with CUDA failed (error {code}): check `ulimit -l`"
            )
        self._thread = threading.Thread(target=self._rest, name="kvalet-slab", daemon=True)
        self._thread.start()

    @property
    def ready_bytes(self) -> int:
        """Bytes of the pieces that are ready; they become ready in order."""
        return sum(length for (_, length), ready in zip(self._spans, self._ready, strict=True) if ready.is_set())

    def payload(self, slot: int, geometry: KVGeometry) -> Tensor:
        """The slot's chunk as [chunk_pages, page_stride_bytes] uint8. Waits for its piece."""
        self._ready[slot // self._slots_per_piece].wait()
        begin = (slot + 1) * self.slab.slot_bytes - geometry.chunk_bytes
        return self._tensor[begin : begin + geometry.chunk_bytes].view(geometry.chunk_pages, geometry.page_stride_bytes)

    def close(self) -> None:
        """Unregister; a piece in the making is finished first, the rest is not begun. Only after the copier is closed.
        Idempotent."""
        self._closing = True
        self._thread.join()
        while self._registered:
            self._memory.unregister(self._registered.pop())

    def _prepare(self, number: int) -> int:
        """Populate and register one piece; CUDA's status."""
        start, length = self._spans[number]
        self.slab.populate(start, length, self._threads)
        code = self._memory.register(self.slab.address + start, length)
        if code == 0:
            self._registered.append(self.slab.address + start)
            self._done(number)
        return code

    def _done(self, number: int) -> None:
        self._ready[number].set()
        if self._progress is not None:
            self._progress(self.ready_bytes, self.slab.n_bytes)

    def _rest(self) -> None:
        for number in range(1, len(self._spans)):
            if self._closing:
                return
            try:
                code = self._prepare(number)
                why = f"CUDA error {code}" if code else ""
            except (OSError, RuntimeError) as error:  # no memory, or a driver that is gone: slower, not wrong
                why = str(error)
            if why:
                self.unregistered_bytes += self._spans[number][1]
                _log.error("a piece of the slab could not be registered, its copies will be slow: %s", why)
                self._done(number)


def piece_spans(n_slots: int, slot_bytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """(start, length) in bytes of pieces of whole slots, each of at most ``piece_bytes`` and at least one slot."""
    length = max(1, piece_bytes // slot_bytes) * slot_bytes
    total = n_slots * slot_bytes
    return [(start, min(length, total - start)) for start in range(0, total, length)]
