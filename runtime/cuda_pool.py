"""The device pool on CUDA, and copies between it and the slab on the copy engines.

The pool is one allocation; a page is one contiguous run of bytes, so that spill and restore are plain DMA. Each direction has
its own stream and one thread, which issues copies first in, first out, keeps at most ``in_flight_bytes`` of them queued on the
device (a copy engine is first in, first out too: a longer queue would delay the step's own small inputs) and waits in blocking
events.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from kvalet.runtime.cuda_slab import RegisteredSlab
from kvalet.runtime.device_ops import DeviceEvent, DeviceOps
from kvalet.runtime.errors import DeviceLostText, EngineError
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.kvpool import POISON_BYTE, TORCH_DTYPES, page_runs
from kvalet.runtime.transfer import zero_unused
from torch import Tensor

IN_FLIGHT_BYTES = 16 << 20
Done = Callable[[str | None, float], None]


class CudaPool:
    """``pages``: [page, layer, 2, token, kv_head, head_dim]; ``bytes``: [page, page_stride_bytes] of the same memory."""

    def __init__(self, geometry: KVGeometry, n_pages: int, device: torch.device) -> None:
        """Raises EngineError with the numbers when the device has not so much memory free."""
        self.geometry, self.n_pages = geometry, n_pages
        stride = geometry.page_stride_bytes
        try:
            self.bytes = torch.zeros(n_pages, stride, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(device)[0]
            raise EngineError(
                f"a pool of {n_pages} pages needs {n_pages * stride} bytes; the device has {free} free"
            ) from error
        dtype = TORCH_DTYPES[geometry.kv_dtype]
        shape = (n_pages, geometry.n_layers, 2, geometry.page_tokens, geometry.n_kv_heads, geometry.head_dim)
        payload = self.bytes[:, : geometry.page_bytes].view(dtype)
        self.pages = payload.view(n_pages, *shape[1:]) if stride == geometry.page_bytes else payload.unflatten(1, shape[1:])

    def copy_page(self, source: int, destination: int) -> None:
        self.bytes[destination].copy_(self.bytes[source])

    def digest(self, pages: Sequence[int], n_tokens: int) -> str:
        """Hex digest of the exact KV bytes of a page table's first ``n_tokens`` tokens. Waits for the device: for tests."""
        tokens = self.geometry.page_tokens
        picked = self.pages[self._index(pages[: -(-n_tokens // tokens)])]
        flat = picked.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :n_tokens].contiguous()
        return hashlib.blake2b(flat.view(torch.uint8).cpu().numpy().tobytes(), digest_size=16).hexdigest()

    def poison(self, pages: Sequence[int]) -> None:
        self.bytes[self._index(pages)] = POISON_BYTE

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(list(pages), dtype=torch.int64, device=self.bytes.device)  # of none, torch would guess float


@dataclass(frozen=True, slots=True)
class _Copy:
    """``runs``: (first pool page, first slot page, how many). ``last``: the slot page in which ``n_tokens`` tokens end (0: all
    pages are full)."""

    slot: int
    runs: tuple[tuple[int, int, int], ...]
    done: Done
    last: int = 0
    n_tokens: int = 0


def copy_error(failure: Exception, *, waited: bool = False) -> str:
    """Why the copy failed. What the runtime of the device raises, and whatever comes out of waiting for an event, means that
    the device is lost: CUDA's errors stay. Anything else (a page or slot that does not exist) is of this copy alone."""
    text = f"{type(failure).__name__}: {failure}"
    return DeviceLostText(text) if waited or isinstance(failure, torch.AcceleratorError) else text


def copy_runs(pages: Sequence[int], slot_pages: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Pairs merged where both sides are neighbours: (first pool page, first slot page, how many)."""
    runs = []
    for first, count, at in page_runs(pages):
        part = slot_pages[at : at + count]
        runs += [(first + inner, start, n) for start, n, inner in page_runs(part)]
    return tuple(runs)


class CudaCopier:
    """``sched.ports.CopierPort`` on CUDA. ``done`` is called once per copy, on the direction's thread."""

    def __init__(self, pool: CudaPool, slab: RegisteredSlab, ops: DeviceOps, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._out = _Direction("out", pool, slab, ops, False, in_flight_bytes)
        self._in = _Direction("in", pool, slab, ops, True, in_flight_bytes)

    def copy_out(self, pages: Sequence[int], slot: int, first_page: int, done: Done, n_tokens: int = 0) -> None:
        """As ``transfer.Copier.copy_out``; the zeroing is done in the slot when the copy has arrived."""
        places = range(first_page, first_page + len(pages))
        self._out.submit(_Copy(slot, copy_runs(pages, places), done, places[-1] if pages else 0, n_tokens))

    def copy_in(self, slot: int, slot_pages: Sequence[int], pages: Sequence[int], done: Done) -> None:
        self._in.submit(_Copy(slot, copy_runs(pages, slot_pages), done))

    def close(self) -> None:
        """Issued copies finish, waiting ones fail. Idempotent."""
        self._out.close()
        self._in.close()


class _Direction:
    """One stream, one queue, one thread. The queue is bounded by the scheduler: each copy leases pages of the pool."""

    def __init__(
        self, name: str, pool: CudaPool, slab: RegisteredSlab, ops: DeviceOps, inward: bool, in_flight_bytes: int
    ) -> None:
        self._pool, self._slab, self._ops, self._inward, self._limit = pool, slab, ops, inward, in_flight_bytes
        self._waiting: deque[_Copy] = deque()
        self._issued: deque[tuple[_Copy, int, DeviceEvent, float]] = deque()
        self._issued_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvalet-copy-{name}", daemon=True)
        self._thread.start()

    def submit(self, copy: _Copy) -> None:
        with self._changed:
            if not self._closed:
                self._waiting.append(copy)
                self._changed.notify()
                return
        copy.done("the copier is closed", 0.0)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._ops.copy_stream():
            while (copy := self._next()) is not None or self._issued:
                if copy is None or self._closed:
                    if copy is not None:
                        copy.done("the copier is closed", 0.0)
                    if self._issued:
                        self._finish_oldest()
                    continue
                try:
                    self._issue(copy)
                except (RuntimeError, IndexError) as failure:  # a copy that cannot be queued fails; the direction lives
                    copy.done(copy_error(failure), 0.0)
                while self._issued_bytes > self._limit:
                    self._finish_oldest()

    def _next(self) -> _Copy | None:
        """The next copy; None when there is none and something issued is to be waited for, or when all is over."""
        with self._changed:
            while not self._waiting and not self._closed and not self._issued:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _issue(self, copy: _Copy) -> None:
        started = time.perf_counter()
        payload = self._slab.payload(copy.slot, self._pool.geometry)
        moved = 0
        for page, place, count in copy.runs:
            on_device, on_host = self._pool.bytes[page : page + count], payload[place : place + count]
            if self._inward:
                on_device.copy_(on_host, non_blocking=True)
            else:
                on_host.copy_(on_device, non_blocking=True)
            moved += on_host.nbytes
        event = self._ops.event(blocking=True)
        event.record()
        self._issued.append((copy, moved, event, started))
        self._issued_bytes += moved

    def _finish_oldest(self) -> None:
        copy, moved, event, started = self._issued.popleft()
        self._issued_bytes -= moved
        error: str | None = None
        try:
            event.synchronize()
        except RuntimeError as failure:
            error = copy_error(failure, waited=True)
        if error is None and copy.n_tokens:
            geometry = self._pool.geometry
            zero_unused(self._slab.payload(copy.slot, geometry)[copy.last].numpy(), geometry, copy.n_tokens)
        copy.done(error, (time.perf_counter() - started) * 1e3)
