"""The device pool of KV pages on the CPU: one anonymous mapping, allocated once, never grown.

``[page, layer, 2, token, kv_head, head_dim]``, pages ``page_stride_bytes`` apart and 4096-aligned, so that a page is one run of
bytes for the copier and for direct I/O. Page 0 is scratch and owned by nobody. Who owns which page is the scheduler's book.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence

import torch
from kvalet.runtime.errors import EngineError
from kvalet.runtime.geometry import KVGeometry
from torch import Tensor

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON_BYTE = 0xFF
"""A page filled with it reads as NaN in every float dtype."""


class KVPool:
    """``n_pages`` pages. ``pages``: the tensor of the docstring above (padding left out of the view).

    Not thread-safe by itself: pages have one writer at a time, which the scheduler's leases ensure."""

    def __init__(self, geometry: KVGeometry, n_pages: int) -> None:
        """Raises EngineError if there is no address space. Memory is taken from the system as pages are first written."""
        if n_pages < 2:
            raise ValueError("a pool needs at least 2 pages: page 0 is scratch")
        self.geometry = geometry
        self.n_pages = n_pages
        self._stride = geometry.page_stride_bytes
        try:
            self._map = mmap.mmap(-1, n_pages * self._stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(f"no address space for a pool of {n_pages} pages, {n_pages * self._stride} bytes") from error
        self._view = memoryview(self._map)
        dtype = TORCH_DTYPES[geometry.kv_dtype]
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8).view(n_pages, self._stride)
        flat = torch.frombuffer(self._map, dtype=dtype)
        shape = (n_pages, geometry.n_layers, 2, geometry.page_tokens, geometry.n_kv_heads, geometry.head_dim)
        strides = [self._stride // dtype.itemsize, 0, 0, 0, 0, 1]
        for axis in range(4, 0, -1):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
        self.pages = flat.as_strided(shape, strides)

    @property
    def nbytes(self) -> int:
        return self.n_pages * self._stride

    def page_view(self, page: int) -> memoryview:
        """The bytes of one page, padding included, writable, 4096-aligned. Raises IndexError outside the pool."""
        if not 0 <= page < self.n_pages:
            raise IndexError(f"page {page} is outside the pool of {self.n_pages}")
        return self._view[page * self._stride : (page + 1) * self._stride]

    def copy_page(self, source: int, destination: int) -> None:
        """Copy a whole page on the device. Raises IndexError outside the pool."""
        for page in (source, destination):
            if not 0 <= page < self.n_pages:
                raise IndexError(f"page {page} is outside the pool of {self.n_pages}")
        self._bytes[destination].copy_(self._bytes[source])

    def gather(self, pages: Sequence[int], n_tokens: int) -> Tensor:
        """Copy of the KV of the first ``n_tokens`` tokens of a page table: [layer, 2, n_tokens, kv_head, head_dim]."""
        geometry = self.geometry
        shape = (geometry.n_layers, 2, n_tokens, geometry.n_kv_heads, geometry.head_dim)
        out = torch.empty(shape, dtype=self.pages.dtype)
        for half in (0, 1):
            self.read(pages, n_tokens, half, out[:, half])
        return out

    def read(self, pages: Sequence[int], n_tokens: int, half: int, out: Tensor) -> None:
        """Copy keys (``half`` 0) or values (1) of the first ``n_tokens`` tokens of a page table to ``out`` [layer, n_tokens,
        kv_head, head_dim], of any strides.

        Only the table's first ceil(n_tokens / page_tokens) pages are read, and of the last one only what is filled. Runs of
        neighbouring pages are copied at once.
        """
        tokens = self.geometry.page_tokens
        whole, rest = divmod(n_tokens, tokens)
        for first, count, at in page_runs(pages[:whole]):
            part = out[:, at * tokens : (at + count) * tokens]
            part = part.view(part.shape[0], count, tokens, *part.shape[2:])
            part.copy_(self.pages[first : first + count, :, half].transpose(0, 1))
        if rest:
            out[:, whole * tokens :].copy_(self.pages[pages[whole], :, half, :rest])

    def read_layer(self, table: Tensor, layer: int, out: Tensor) -> None:
        """Copy one layer of whole pages ``table`` (int64 [pages]) to ``out`` [2, pages * page_tokens, kv_head, head_dim]."""
        found = self.pages[:, layer].index_select(0, table)
        out.view(2, table.shape[0], -1, *out.shape[2:]).copy_(found.transpose(0, 1))

    def write(self, kv: Tensor, places: Tensor) -> None:
        """Write the KV of ``n`` tokens, ``kv`` [layer, 2, n, kv_head, head_dim], to the places int64 [n]
        (page * page_tokens + offset). Places must differ, but for those in page 0."""
        tokens = self.geometry.page_tokens
        self.pages[places // tokens, :, :, places % tokens] = kv.permute(2, 0, 1, 3, 4)

    def digest(self, pages: Sequence[int], n_tokens: int) -> str:
        """Hex digest of the exact KV bytes of a page table's first ``n_tokens`` tokens, wherever the pages lie."""
        gathered = self.gather(pages, n_tokens)
        return hashlib.blake2b(gathered.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN: what tests do to free pages, so that reading one cannot go unseen."""
        for page in pages:
            self._bytes[page].fill_(POISON_BYTE)


def page_runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring pages of a table: (first page, how many, index in the table)."""
    runs: list[tuple[int, int, int]] = []
    for index, page in enumerate(pages):
        if runs and runs[-1][0] + runs[-1][1] == page:
            first, count, at = runs[-1]
            runs[-1] = (first, count + 1, at)
        else:
            runs.append((page, 1, index))
    return runs
