"""The arena's book of copies: who gets one, who loses one, where they lie. What is computed from them: test_attention."""

from __future__ import annotations

import random

import pytest
import torch
from kvalet.runtime.arena import CAPACITY_STEP, SHEET_TOKENS, Arena, Copy, capacity_for
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.kvpool import KVPool

GEOMETRY = KVGeometry(2, 2, 4, "fp32")
STEP = CAPACITY_STEP
PAGE = 16


def filled_pool(n_pages: int = 80) -> KVPool:
    pool = KVPool(GEOMETRY, n_pages)
    pool.pages.copy_(torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(2)))
    return pool


def table(pool: KVPool, n_tokens: int, first: int = 1) -> tuple[int, ...]:
    """Pages that cover ``n_tokens`` and the next token, backwards."""
    return tuple(range(first, first + n_tokens // PAGE + 1))[::-1]


def ready(arena: Arena, pool: KVPool, **lengths: int) -> dict[str, Copy | None]:
    """One call; rows are named r1, r2, ..."""
    wanted = [(int(name[1:]), length, table(pool, length)) for name, length in lengths.items()]
    copies = arena.ready(pool, wanted)
    arena.check()
    return dict(zip(lengths, copies, strict=True))


def assert_holds(copy: Copy | None, pool: KVPool, length: int) -> None:
    """The copy is the pages' KV, in the promised shape, and zero beyond."""
    assert copy is not None
    assert copy.length == length
    expected = pool.gather(table(pool, length), length)
    keys, values = copy.sheet.keys[:, copy.slot], copy.sheet.values[:, copy.slot]
    assert torch.equal(keys[..., :length], expected[:, 0].permute(0, 2, 3, 1))
    assert torch.equal(values[:, :, :length], expected[:, 1].transpose(1, 2))
    assert not keys[..., length:].any()
    assert not values[:, :, length:].any()


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, STEP - 1, STEP, STEP + 1])
def test_a_copy_is_the_pages_and_zero_beyond(length: int, transposed: bool) -> None:
    """Also where an earlier row left NaN behind; a row of STEP tokens has no room for its next token in STEP."""
    pool = filled_pool()
    arena = Arena(GEOMETRY, 2 * STEP, transposed)
    for row in (1, 2):
        (old,) = arena.ready(pool, [(row, 0, (1,))])
        assert old is not None
        old.sheet.keys.fill_(torch.nan)
        old.sheet.values.fill_(torch.nan)
        arena.release(row)
    copy = ready(arena, pool, r3=length)["r3"]
    assert_holds(copy, pool, length)
    assert copy is not None
    assert copy.sheet.capacity == capacity_for(length + 1) == (STEP if length < STEP else 2 * STEP)


def test_rows_of_one_capacity_share_a_sheet_and_others_have_their_own() -> None:
    pool = filled_pool()
    arena = Arena(GEOMETRY, 64 * STEP)
    copies = ready(arena, pool, r1=5, r2=40, r3=STEP, r4=STEP - 1, r5=STEP + 7)
    narrow = [copies[name] for name in ("r1", "r2", "r4")]
    wide = [copies[name] for name in ("r3", "r5")]
    assert len({id(copy.sheet) for copy in narrow if copy}) == 1
    assert len({id(copy.sheet) for copy in wide if copy}) == 1
    assert [copy.slot for copy in narrow if copy] == [0, 1, 2]
    sheet = narrow[0].sheet  # type: ignore[union-attr]
    assert sheet.keys.shape == (2, SHEET_TOKENS // STEP, 2, 4, STEP)
    assert sheet.values.shape == (2, SHEET_TOKENS // STEP, 2, STEP, 4)
    assert sheet.key_layers[1].data_ptr() == sheet.keys[1].data_ptr(), "views made once, of the same memory"
    for name, length in {"r1": 5, "r2": 40, "r3": STEP, "r4": STEP - 1, "r5": STEP + 7}.items():
        assert_holds(copies[name], pool, length)


def test_a_copy_is_kept_while_it_is_not_behind() -> None:
    """What attention appends is counted in ``length``; a copy that is ahead (a step replayed) serves as well."""
    pool = filled_pool()
    arena = Arena(GEOMETRY, STEP)
    copy = ready(arena, pool, r1=30)["r1"]
    assert copy is not None
    copy.length = 31
    assert ready(arena, pool, r1=31)["r1"] is copy
    assert ready(arena, pool, r1=25)["r1"] is copy
    assert arena.fills == 1
    assert_holds(ready(arena, pool, r1=32)["r1"], pool, 32)
    assert arena.fills == 2


def test_a_row_that_outgrows_its_capacity_moves() -> None:
    pool = filled_pool()
    arena = Arena(GEOMETRY, 3 * STEP)
    copy = ready(arena, pool, r1=STEP - 1)["r1"]
    assert copy is not None
    assert copy.sheet.capacity == STEP
    copy.length = STEP
    assert_holds(ready(arena, pool, r1=STEP)["r1"], pool, STEP)
    assert arena.fills == 2
    assert arena.lengths([1]) == {1: STEP}


def test_copies_of_one_call_never_displace_each_other() -> None:
    pool = filled_pool()
    arena = Arena(GEOMETRY, 3 * STEP)
    ready(arena, pool, r1=1, r2=1, r3=1)
    copies = ready(arena, pool, r4=1, r2=1, r5=1, r3=1, r6=1)
    assert {name for name, copy in copies.items() if copy is None} == {"r5", "r6"}, "only r1 was idle"
    assert arena.lengths(range(9)) == {2: 1, 3: 1, 4: 1}


def test_the_row_that_ran_longest_ago_goes_first() -> None:
    pool = filled_pool()
    arena = Arena(GEOMETRY, 4 * STEP)
    ready(arena, pool, r1=1, r2=1, r3=1, r4=1)
    for name in ("r3", "r1", "r4", "r2"):
        ready(arena, pool, **{name: 1})
    gone = []
    for new in (5, 6, 7, 8):
        before = arena.lengths(range(9)).keys()
        ready(arena, pool, **{f"r{new}": 1})
        gone += sorted(before - arena.lengths(range(9)).keys())
    assert gone == [3, 1, 4, 2]


@pytest.mark.parametrize("n_tokens", [0, STEP - 1])
def test_an_arena_of_less_than_a_block_has_no_copies(n_tokens: int) -> None:
    pool = filled_pool()
    arena = Arena(GEOMETRY, n_tokens)
    assert (arena.n_blocks, arena.nbytes) == (0, 0)
    assert ready(arena, pool, r1=3, r2=0) == {"r1": None, "r2": None}
    arena.release(1)
    assert arena.fills == 0


def test_room_is_whole_blocks() -> None:
    assert Arena(GEOMETRY, 3 * STEP + STEP - 1).nbytes == 3 * STEP * GEOMETRY.token_bytes


def test_releasing_the_last_row_of_a_sheet_frees_its_room() -> None:
    pool = filled_pool(140)
    arena = Arena(GEOMETRY, 4 * STEP)
    ready(arena, pool, r1=1, r2=1, r3=1, r4=1)
    arena.release(99)
    for row in (1, 2, 3):
        arena.release(row)
    assert arena.lengths(range(9)) == {4: 1}
    arena.release(4)
    copy = ready(arena, pool, r5=3 * STEP)["r5"]
    assert copy is not None, "one row may take the whole arena again"
    assert copy.sheet.capacity == 4 * STEP


def test_sheets_never_overlap_whatever_comes_and_goes() -> None:
    """Random calls in a small arena: every copy holds its own row's KV, however others came, grew and went."""
    seed = 31
    rng = random.Random(seed)
    pool = filled_pool(200)
    arena = Arena(GEOMETRY, 7 * STEP)
    lengths: dict[int, int] = {}
    served = 0
    for call in range(250):
        for row in rng.sample(range(1, 9), rng.randrange(1, 5)):
            lengths.setdefault(row, rng.choice((1, 30, STEP - 2, STEP + 3, 2 * STEP + 1)))
        chosen = rng.sample(sorted(lengths), rng.randrange(1, 1 + min(5, len(lengths))))
        copies = ready(arena, pool, **{f"r{row}": lengths[row] for row in chosen})
        for row in chosen:
            copy = copies[f"r{row}"]
            if copy is not None:
                served += 1
                assert_holds(copy, pool, lengths[row])
            if rng.random() < 0.2:
                arena.release(row)
                del lengths[row]
        arena.check()
        held = arena.lengths(range(9))
        assert all(held[row] == lengths.get(row, held[row]) for row in held), (seed, call)
    assert served > 300
    assert arena.fills < served, "some were kept"
