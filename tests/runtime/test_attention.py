"""Paged attention: the plain reference against dense attention, and the contiguous copies against the plain reference.

P26: page tables for every length around page borders, every unused slot NaN, pages recycled from another request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from kvalet.runtime.arena import CAPACITY_STEP, Arena, capacity_for
from kvalet.runtime.attn_arena import ArenaAttention
from kvalet.runtime.attn_torch import PlainAttention, causal_mask
from kvalet.runtime.batch import Segment, make_batch
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.kvpool import KVPool
from torch import Tensor

P = 16
LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 3, 8
GEOMETRY = KVGeometry(LAYERS, KV_HEADS, DIM, "fp32")


class OneRow:
    """One row's K, V and Q of all positions, and where its pages are."""

    def __init__(self, row: int, n: int, pages: Sequence[int], seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.row, self.n, self.pages = row, n, tuple(pages)
        self.kv = torch.randn(LAYERS, 2, n, KV_HEADS, DIM, generator=g)
        self.q = torch.randn(LAYERS, n, KV_HEADS * GROUP, DIM, generator=g)

    def dense(self, layer: int, begin: int, end: int) -> Tensor:
        """The definition, float64, one head at a time: [end - begin, heads * dim]."""
        out = torch.zeros(end - begin, KV_HEADS * GROUP, DIM, dtype=torch.float64)
        for i, position in enumerate(range(begin, end)):
            for head in range(KV_HEADS * GROUP):
                k, v = self.kv[layer, :, : position + 1, head // GROUP].double()
                weights = torch.softmax(k @ self.q[layer, position, head].double() / math.sqrt(DIM), 0)
                out[i, head] = weights @ v
        return out.flatten(1)


def feed(
    pool: KVPool, arena: Arena | None, parts: Sequence[tuple[OneRow, int, int, bool]], pad_to: int = 0
) -> list[list[Tensor]]:
    """One call over (sequence, begin, end, decode); returns per part, per layer the attention's result, and commits the KV."""
    segments = [Segment(s.row, b, (0,) * (e - b), s.pages, d, True) for s, b, e, d in parts]
    copies = [None] * len(parts)
    order = list(range(len(parts)))
    if arena is not None:
        decodes = [i for i, (_, b, e, d) in enumerate(parts) if d and e - b == 1]
        ready = arena.ready(pool, [(parts[i][0].row, parts[i][1], parts[i][0].pages) for i in decodes])
        for i, copy in zip(decodes, ready, strict=True):
            copies[i] = copy
        arena.check()
        order.sort(key=lambda i: (1 << 30, 0) if copies[i] is None else (copies[i].sheet.first_block, copies[i].slot))
    batch = make_batch([segments[i] for i in order], P, pad_to)
    new_kv = torch.full((LAYERS, 2, batch.n, KV_HEADS, DIM), math.nan)
    attention = (
        PlainAttention(pool, batch, new_kv)
        if arena is None
        else ArenaAttention(pool, batch, new_kv, [copies[i] for i in order], GROUP, arena.transposed)
    )
    results: dict[int, list[Tensor]] = {i: [] for i in order}
    for layer in range(LAYERS):
        chosen = [parts[i] for i in order]
        q = torch.cat([s.q[layer, b:e] for s, b, e, _ in chosen] + [torch.zeros(batch.padding, KV_HEADS * GROUP, DIM)])
        k, v = (
            torch.cat([s.kv[layer, half, b:e] for s, b, e, _ in chosen] + [torch.zeros(batch.padding, KV_HEADS, DIM)])
            for half in (0, 1)
        )
        out = attention(layer, q, k, v)
        for i, span in zip(order, batch.spans, strict=True):
            results[i].append(out[span.begin : span.end].clone())
    attention.commit()
    return [results[i] for i in range(len(parts))]


@pytest.mark.parametrize("arena_tokens", [None, 0, 4 * CAPACITY_STEP])
def test_every_length_over_page_borders(arena_tokens: int | None) -> None:
    """P26: lengths 1..4P+1, then decodes over two page borders, on pages that another request left full."""
    pool = KVPool(GEOMETRY, 16)
    arena = None if arena_tokens is None else Arena(GEOMETRY, arena_tokens)
    for length in range(1, 4 * P + 2):
        pool.poison(range(16))
        old = OneRow(1000 + length, 6 * P, (9, 4, 11, 2, 7, 13), 5)
        feed(pool, arena, [(old, 0, 6 * P, False)])
        for page in old.pages[::2]:
            pool.poison([page])
        now = OneRow(length, length + 2 * P + 1, (7, 9, 2, 13, 4, 11, 3, 1), length)
        pages = -(-length // P)
        assert GEOMETRY.pages_for(length) == pages
        assert 1 <= length - (pages - 1) * P <= P
        pool.poison(now.pages[pages:])
        check(feed(pool, arena, [(now, 0, length, False)]), [(now, 0, length)])
        for position in range(length, now.n):
            check(feed(pool, arena, [(now, position, position + 1, True)]), [(now, position, position + 1)])
        assert torch.equal(pool.gather(now.pages, now.n), now.kv)


def check(found: list[list[Tensor]], wanted: Sequence[tuple[OneRow, int, int]]) -> None:
    for layers, (sequence, begin, end) in zip(found, wanted, strict=True):
        for layer, out in enumerate(layers):
            assert torch.isfinite(out).all()
            torch.testing.assert_close(out.double(), sequence.dense(layer, begin, end), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("transposed", [True, False])
def test_copies_equal_pages_for_random_batches(transposed: bool, seed: int) -> None:
    """Rows of many lengths come, pause, go and grow over capacities, in an arena too small for all of them; keys lie as one
    or the other processor likes them."""
    print(f"seed {seed}")
    g = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=g))

    fast_pool, plain_pool = KVPool(GEOMETRY, 400), KVPool(GEOMETRY, 400)
    for pool in (fast_pool, plain_pool):
        pool.poison(range(400))
    arena = Arena(GEOMETRY, (3 + below(6)) * CAPACITY_STEP, transposed)
    rows: dict[int, tuple[OneRow, int]] = {}
    for step in range(30):
        if len(rows) < 7 and below(2):
            length = (1 + below(40), 505 + below(9), 1020 + below(6))[below(3)]
            free = [
                p for p in torch.randperm(399, generator=g).add(1).tolist() if all(p not in s.pages for s, _ in rows.values())
            ]
            new = OneRow(step + 1, length + 40, free[: GEOMETRY.pages_for(length + 40)], 100 * seed + step)
            for pool in (fast_pool, plain_pool):
                pool.write(new.kv[:, :, :length], torch.tensor([new.pages[i // P] * P + i % P for i in range(length)]))
            rows[new.row] = (new, length)
        chosen = [row for row in rows if below(4)]
        if not chosen:
            continue
        parts = []
        for row in chosen:
            sequence, length = rows[row]
            parts.append((sequence, length, length + (1 if below(5) else 2), bool(below(8))))
        fast, plain = feed(fast_pool, arena, parts, 20 if below(2) else 0), feed(plain_pool, None, parts)
        for a, b in zip(fast, plain, strict=True):
            torch.testing.assert_close(torch.cat(a), torch.cat(b), atol=2e-6, rtol=2e-5)
        for sequence, _, end, _ in parts:
            rows[sequence.row] = (sequence, end)
            if end + 2 > sequence.n or not below(12):
                arena.release(sequence.row)
                del rows[sequence.row]
        arena.check()
    assert arena.fills > 5


def test_the_arena_makes_room_by_idle_rows_and_never_grows() -> None:
    pool = KVPool(GEOMETRY, 8)
    arena = Arena(GEOMETRY, 2 * CAPACITY_STEP)
    before = arena.nbytes
    first = arena.ready(pool, [(1, 0, (1,)), (2, 0, (2,)), (3, 0, (3,))])
    assert [copy is not None for copy in first] == [True, True, False]
    assert arena.lengths([1, 2, 3]) == {1: 0, 2: 0}
    assert arena.ready(pool, [(2, 0, (2,))])[0] is first[1]
    assert arena.ready(pool, [(3, 0, (3,))])[0] is not None
    assert arena.lengths([1, 2, 3]) == {2: 0, 3: 0}, "the row that ran longest ago went"
    (wide,) = arena.ready(pool, [(4, CAPACITY_STEP, tuple([1] * 32))])
    assert wide is not None
    assert wide.sheet.capacity == 2 * CAPACITY_STEP
    assert arena.ready(pool, [(5, 2 * CAPACITY_STEP, tuple([1] * 64))]) == [None]
    arena.check()
    assert arena.nbytes == before
    for row in (2, 3, 4, 5):
        arena.release(row)
    assert arena.lengths(range(9)) == {}


def test_a_copy_behind_its_row_is_filled_again() -> None:
    pool = KVPool(GEOMETRY, 8)
    row = OneRow(1, 40, (3, 1, 5), 1)
    pool.write(row.kv, torch.tensor([row.pages[i // P] * P + i % P for i in range(40)]))
    arena = Arena(GEOMETRY, CAPACITY_STEP)
    arena.ready(pool, [(1, 20, row.pages)])
    arena.ready(pool, [(1, 20, row.pages)])
    assert arena.fills == 1
    (copy,) = arena.ready(pool, [(1, 39, row.pages)])
    assert arena.fills == 2
    assert copy is not None
    torch.testing.assert_close(copy.sheet.values[:, copy.slot, :, :39].transpose(1, 2), row.kv[:, 1, :39])
    torch.testing.assert_close(copy.sheet.keys[:, copy.slot, :, :, :39].permute(0, 3, 1, 2), row.kv[:, 0, :39])
    assert not copy.sheet.values[:, copy.slot, :, 39:].any()


def test_capacity_and_masks() -> None:
    assert [capacity_for(n) for n in (1, 512, 513, 1025)] == [512, 512, 1024, 1536]
    mask = causal_mask(2, 3, torch.float32)
    assert mask is not None
    assert (mask == 0).tolist() == [[True, True, True, False, False], [True] * 4 + [False], [True] * 5]
    assert causal_mask(0, 3, torch.float32) is None
    assert causal_mask(9, 1, torch.float32) is None
