"""The arena: contiguous copies of the KV of running rows, for decoding. Allocated once, never grown.

The pages stay the truth; a copy may be dropped at any time. Per sheet, rows of one capacity are side by side: keys
[layer, row, kv_head, head_dim, capacity], values [layer, row, kv_head, capacity, head_dim], so that the decodes of all
rows of a sheet are one batched product. How keys lie in memory depends on the processor (``keys_lie_transposed``); their shape
does not. A row's capacity is its own length rounded up to ``CAPACITY_STEP``: nothing of a row's bits may depend on its
neighbours.

At the bound: rows that ran longest ago lose their copies; where even that makes no room, the row gets none and is attended to
straight from its pages, slower, with the same arithmetic.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from kvalet.runtime.geometry import KVGeometry, round_up
from kvalet.runtime.kvpool import TORCH_DTYPES, KVPool
from torch import Tensor

CAPACITY_STEP = 512
"""Tokens; also the unit in which the arena is cut."""

SHEET_TOKENS = 16 * CAPACITY_STEP
"""Tokens of a sheet while there is plenty of room."""


def keys_lie_transposed() -> bool:
    """Whether position is the last axis of keys in memory too. With AMX that is the fast order (batch 16: 9 ms instead of 11 a
    step); without it the product takes twice as long so (16 rows of 512 tokens through 30 layers: 20 ms instead of 10). A
    property of the processor, not a measurement: it may decide bits."""
    return torch.cpu._is_amx_tile_supported()


def keys_like(flat: Tensor, shape: tuple[int, ...], transposed: bool) -> Tensor:
    """``flat`` as keys of ``shape`` [..., head_dim, capacity], lying as said."""
    if transposed:
        return flat.view(shape)
    return flat.view(*shape[:-2], shape[-1], shape[-2]).transpose(-2, -1)


def capacity_for(n_tokens: int) -> int:
    """Capacity of a row that attends to ``n_tokens`` tokens, its newest included."""
    return round_up(n_tokens, CAPACITY_STEP)


@dataclass(slots=True)
class Sheet:
    """Rows of one capacity side by side. ``rows``: the row in each slot, None: free. ``keys`` and ``values``: see above."""

    first_block: int
    n_blocks: int
    capacity: int
    keys: Tensor
    values: Tensor
    rows: list[int | None]
    key_layers: list[Tensor] = field(init=False)
    value_layers: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.key_layers = list(self.keys.unbind(0))
        self.value_layers = list(self.values.unbind(0))


@dataclass(slots=True)
class Copy:
    """Where a row's copy is; ``length`` tokens of it are valid. ``used``: the arena's count of calls when it was last used."""

    sheet: Sheet
    slot: int
    length: int
    used: int


class Arena:
    """All sheets. Not thread-safe: the engine thread's."""

    def __init__(self, geometry: KVGeometry, n_tokens: int, transposed: bool | None = None) -> None:
        """Room for ``n_tokens`` tokens (rounded down to whole blocks; 0: for none). Memory is taken as it is first used.
        ``transposed``: how keys lie; None: as the processor likes it."""
        self._geometry = geometry
        self.transposed = keys_lie_transposed() if transposed is None else transposed
        self._dtype = TORCH_DTYPES[geometry.kv_dtype]
        self._block_elements = CAPACITY_STEP * geometry.token_bytes // self._dtype.itemsize
        self.n_blocks = n_tokens // CAPACITY_STEP
        self._sheets: list[Sheet] = []
        self._copies: dict[int, Copy] = {}
        self._calls = 0
        self.fills = 0
        if self.n_blocks:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._flat = torch.frombuffer(self._map, dtype=self._dtype)

    @property
    def nbytes(self) -> int:
        return self.n_blocks * CAPACITY_STEP * self._geometry.token_bytes

    def ready(self, pool: KVPool, wanted: Sequence[tuple[int, int, Sequence[int]]]) -> list[Copy | None]:
        """Copies of the rows of one call: ``wanted`` holds (row, tokens that have KV, page table). Missing ones are made and
        filled from the pages; None where there is no room. The copies of this call never displace each other."""
        self._calls += 1
        copies = []
        for row, length, _ in wanted:
            copy = self._copies.get(row)
            if copy is not None and (copy.length < length or copy.sheet.capacity != capacity_for(length + 1)):
                self.release(row)
                copy = None
            if copy is not None:
                copy.used = self._calls
        for row, length, pages in wanted:
            copy = self._copies.get(row)
            if copy is None:
                copy = self._place(row, capacity_for(length + 1), len(wanted))
                if copy is not None:
                    self._fill(pool, copy, length, pages)
            copies.append(copy)
        return copies

    def release(self, row: int) -> None:
        """Drop the row's copy, if it has one."""
        copy = self._copies.pop(row, None)
        if copy is not None:
            copy.sheet.rows[copy.slot] = None
            if not any(owner is not None for owner in copy.sheet.rows):
                self._sheets.remove(copy.sheet)

    def _place(self, row: int, capacity: int, n_rows: int) -> Copy | None:
        """A free slot of the capacity, in an old sheet or a new one, for which idle copies make room."""
        while True:
            for sheet in self._sheets:
                if sheet.capacity == capacity and None in sheet.rows:
                    return self._take(row, sheet)
            made = self._new_sheet(capacity, n_rows)
            if made is not None:
                return self._take(row, made)
            idle = [(copy.used, owner) for owner, copy in self._copies.items() if copy.used < self._calls]
            if not idle:
                return None
            self.release(min(idle)[1])

    def _take(self, row: int, sheet: Sheet) -> Copy:
        slot = sheet.rows.index(None)
        sheet.rows[slot] = row
        self._copies[row] = Copy(sheet, slot, 0, self._calls)
        return self._copies[row]

    def _new_sheet(self, capacity: int, n_rows: int) -> Sheet | None:
        """A sheet for as many rows as room allows: generous while half the arena is free, then as many as this call has."""
        per_row = capacity // CAPACITY_STEP
        free = self.n_blocks - sum(sheet.n_blocks for sheet in self._sheets)
        rows = max(1, SHEET_TOKENS // capacity)
        if free * 2 < self.n_blocks:
            rows = min(rows, n_rows)
        while rows:
            first = self._gap(rows * per_row)
            if first is not None:
                sheet = self._cut(first, rows, capacity)
                self._sheets.append(sheet)
                return sheet
            rows //= 2
        return None

    def _gap(self, n_blocks: int) -> int | None:
        """The first run of free blocks that is long enough."""
        at = 0
        for sheet in sorted(self._sheets, key=lambda sheet: sheet.first_block):
            if sheet.first_block - at >= n_blocks:
                return at
            at = sheet.first_block + sheet.n_blocks
        return at if self.n_blocks - at >= n_blocks else None

    def _cut(self, first: int, rows: int, capacity: int) -> Sheet:
        geometry = self._geometry
        n_blocks = rows * capacity // CAPACITY_STEP
        part = self._flat[first * self._block_elements : (first + n_blocks) * self._block_elements]
        keys, values = part.view(2, -1)
        shape = (geometry.n_layers, rows, geometry.n_kv_heads)
        return Sheet(
            first_block=first,
            n_blocks=n_blocks,
            capacity=capacity,
            keys=keys_like(keys, (*shape, geometry.head_dim, capacity), self.transposed),
            values=values.view(*shape, capacity, geometry.head_dim),
            rows=[None] * rows,
        )

    def _fill(self, pool: KVPool, copy: Copy, length: int, pages: Sequence[int]) -> None:
        """Copy the pages in. What lies beyond ``length`` becomes zero: masking it would not hide an earlier row's NaN."""
        keys, values = copy.sheet.keys[:, copy.slot], copy.sheet.values[:, copy.slot]
        pool.read(pages, length, 0, keys[..., :length].permute(0, 3, 1, 2))
        pool.read(pages, length, 1, values[:, :, :length].transpose(1, 2))
        keys[..., length:] = 0
        values[:, :, length:] = 0
        copy.length = length
        self.fills += 1

    def check(self) -> None:
        """Raise AssertionError unless sheets are disjoint and every copy sits in its slot."""
        taken = sorted((sheet.first_block, sheet.first_block + sheet.n_blocks) for sheet in self._sheets)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken)), taken
        assert not taken or taken[-1][1] <= self.n_blocks
        owners = {row: (sheet, slot) for sheet in self._sheets for slot, row in enumerate(sheet.rows) if row is not None}
        assert owners.keys() == self._copies.keys()
        for row, copy in self._copies.items():
            assert owners[row][0] is copy.sheet, row
            assert owners[row][1] == copy.slot, row

    def lengths(self, rows: Iterable[int]) -> dict[int, int]:
        """Valid tokens of the rows that have copies."""
        return {row: self._copies[row].length for row in rows if row in self._copies}
