"""The fakes that every scheduler test stands on: arithmetic, end conditions, contract, copies; and the RAM tier's book."""

from __future__ import annotations

import random

import pytest
from kvalet.runtime.fake import POISON, FakeCopier, FakeEngine, FakePool, FakeSlab
from kvalet.runtime.fake_model import FakeModel, FakeWriter, fake_text
from kvalet.runtime.plan import EndedBy, GrammarSpec, PageId, Row, RowId, RowOpen, SamplingParams, SlotId, StepPlan
from kvalet.store.ids import ChunkKey
from kvalet.store.ram import RamBook, RamBookError

PROMPT = (5, 9, 2, 7, 1, 8)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | changes))  # type: ignore[arg-type]


def pages(*numbers: int) -> tuple[PageId, ...]:
    return tuple(PageId(number) for number in numbers)


# the model


def test_the_answer_depends_on_the_seed_and_on_every_token_of_the_prompt() -> None:
    model = FakeModel()
    right, _ = model.continuation(PROMPT, params())
    assert model.continuation(PROMPT, params())[0] == right
    assert model.continuation(PROMPT, params(seed=3))[0] != right
    for at in range(len(PROMPT)):
        changed = (*PROMPT[:at], PROMPT[at] + 1, *PROMPT[at + 1 :])
        assert model.continuation(changed, params())[0] != right, f"token {at}"


def test_an_answer_goes_on_as_a_prompt_of_its_own_beginning_would() -> None:
    model = FakeModel()
    right, _ = model.continuation(PROMPT, params())
    for n in range(1, len(right)):
        assert model.continuation(PROMPT + right[:n], params(max_tokens=12 - n))[0] == right[n:]


def test_a_shape_sensitive_model_has_no_answer_of_its_own() -> None:
    model = FakeModel(shape_sensitive=True)
    with pytest.raises(ValueError, match="shape"):
        model.continuation(PROMPT, params())
    calls = [(False, 0, 8), (False, 0, 4), (False, 4, 8), (True, 7, 1)]
    assert len({model.kv(1, 2, call) for call in calls}) == len(calls)
    assert model.kv(1, 2, (True, 7, 1)) == model.kv(1, 2, (True, 8, 1))  # one decode row is like another
    assert len({FakeModel().kv(1, 2, call) for call in calls}) == 1


# its end conditions


def written(prompt: int, ids: list[int], **changes: object) -> tuple[list[int], str, EndedBy | None, FakeWriter]:
    writer = FakeWriter(FakeModel(), params(**changes), prompt)
    taken: list[int] = []
    text, ended = "", None
    for token in ids:
        new, piece, ended = writer.accept((token,))
        taken.extend(new)
        text += piece
        if ended is not None:
            break
    return taken, text, ended, writer


def test_an_end_token_counts_but_is_neither_sent_nor_reusable() -> None:
    taken, text, ended, writer = written(4, [3, 4, 0, 9], ignore_eos=False)
    assert (taken, text, ended, writer.reusable) == ([3, 4, 0], "3 4 ", EndedBy.STOP, 2)
    taken, _, ended, _ = written(4, [3, 4, 0, 9], ignore_eos=True, max_tokens=4)
    assert (taken, ended) == ([3, 4, 0, 9], EndedBy.LENGTH)


def test_min_tokens_puts_a_stop_token_off() -> None:
    taken, _, ended, _ = written(4, [7, 7, 7, 7], stop_token_ids=(7,), min_tokens=2)
    assert (taken, ended) == ([7, 7, 7], EndedBy.STOP)


def test_text_that_may_become_a_stop_string_waits_and_comes_when_it_does_not() -> None:
    writer = FakeWriter(FakeModel(), params(stop=("3 4",)), 0)
    pieces = [writer.accept((token,))[1] for token in (1, 3, 5, 3)]
    assert pieces == ["1 ", "", "3 5 ", ""]
    _, piece, ended = writer.accept((4,))
    assert (piece, ended) == ("", EndedBy.STOP)
    assert writer.text == "1 3 5 "
    assert writer.reusable == 3  # the ids before the first one that overlaps the stop string


def test_what_is_held_back_is_sent_when_the_turn_ends_without_it() -> None:
    _, text, ended, _ = written(0, [1, 3], stop=("3 4",), max_tokens=2)
    assert (text, ended) == ("1 3 ", EndedBy.LENGTH)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_add_up_to_the_text_before_the_first_stop(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randint(1, 3) for _ in range(12)]
    stop = "".join(fake_text(rng.randint(1, 3)) for _ in range(3))
    _, text, ended, _ = written(0, ids, stop=(stop,))
    whole = "".join(fake_text(token) for token in ids)
    at = whole.find(stop)
    assert text == (whole if at < 0 else whole[:at]), f"seed {seed}"
    assert ended is (EndedBy.LENGTH if at < 0 else EndedBy.STOP), f"seed {seed}"


def test_a_forced_run_stops_at_the_token_that_ends_the_turn_and_a_dead_end_takes_none() -> None:
    model = FakeModel()
    run = params(grammar=GrammarSpec("fake", "run 5"), max_tokens=3)
    assert len(model.continuation(PROMPT, run)[0]) == 3
    first = model.next_ids(b"x", 0, run)
    assert first == tuple((first[0] + i) % 97 for i in range(5))
    dead = params(grammar=GrammarSpec("fake", "dead 2"))
    ids, ended = model.continuation(PROMPT, dead)
    assert (len(ids), ended) == (2, EndedBy.GRAMMAR)


# the engine


def opened(engine: FakeEngine, row: int, table: tuple[PageId, ...], step: int = 0, kv_len: int = 0) -> StepPlan:
    opening = RowOpen(RowId(row), PROMPT, len(PROMPT), kv_len, table, params())
    plan = StepPlan(step, (Row(RowId(row), kv_len, len(PROMPT) - kv_len, False, True),), (opening,))
    engine.finish(engine.launch(plan))
    return plan


def test_a_row_is_opened_once_and_closed_once() -> None:
    engine = FakeEngine(FakePool(5, 4))
    opened(engine, 1, pages(1, 2))
    with pytest.raises(RuntimeError, match="open already"):
        opened(engine, 1, pages(3, 4))
    engine.launch(StepPlan(2, (), closes=(RowId(1),)))
    assert engine.rows == {}
    opened(engine, 1, pages(3, 4), step=3)


def test_a_fresh_page_is_poisoned_and_one_that_holds_kv_is_not() -> None:
    pool = FakePool(6, 4)
    engine = FakeEngine(pool)
    opened(engine, 1, pages(1, 2))
    kept = bytes(pool.page_view(1))
    pool.pages[4][:] = bytes(pool.page_bytes)
    opened(engine, 2, pages(1, 4), step=1, kv_len=4)
    assert bytes(pool.page_view(1)) == kept
    assert bytes(pool.page_view(4))[-8:] == bytes([POISON]) * 8  # of the last offset nothing was written
    assert bytes(pool.page_view(4))[:16] == bytes(pool.page_view(2))[:16]


def test_copies_between_pages_come_before_anything_of_the_step_is_written() -> None:
    pool = FakePool(6, 4)
    engine = FakeEngine(pool)
    opened(engine, 1, pages(1, 2))
    opening = RowOpen(RowId(2), PROMPT, len(PROMPT), 5, pages(1, 3), params())
    row = Row(RowId(2), 5, 1, False, True)
    result = engine.launch(StepPlan(1, (row,), (opening,), page_copies=((PageId(2), PageId(3)),)))
    assert result.rows[0].ids == FakeModel().continuation(PROMPT, params(max_tokens=1))[0]


# the copies


def test_copies_in_keep_their_places_and_leave_the_rest() -> None:
    pool, slab = FakePool(6, 4), FakeSlab(1, 3, 32)
    copier = FakeCopier(pool, slab)
    done: list[tuple[str | None, float]] = []
    for page in (1, 2):
        pool.pages[page][:] = bytes([page]) * 32
    copier.copy_out(pages(1, 2), SlotId(0), 1, lambda error, ms: done.append((error, ms)))
    assert bytes(slab.view(SlotId(0))) == bytes([POISON]) * 32 + bytes([1]) * 32 + bytes([2]) * 32
    copier.copy_in(SlotId(0), (2, 1), pages(4, 5), lambda error, ms: done.append((error, ms)))
    assert (pool.pages[4][0], pool.pages[5][0]) == (2, 1)
    assert done == [(None, 0.5)] * 2


def test_a_copy_in_that_fails_leaves_poison_and_says_why() -> None:
    pool, slab = FakePool(3, 4), FakeSlab(1, 1, 32)
    copier = FakeCopier(pool, slab, hold=True)
    done: list[str | None] = []
    pool.pages[1][:] = bytes(32)
    copier.copy_in(SlotId(0), (0,), pages(1), lambda error, ms: done.append(error))
    copier.pending.popleft().fail("torn")
    assert done == ["torn"]
    assert bytes(pool.page_view(1)) == bytes([POISON]) * 32


# the RAM tier's book


def test_slots_begin_where_the_book_is_told_and_no_other_slot_is_its_own() -> None:
    book = RamBook(2, first=5)
    assert [slot in book for slot in (4, 5, 6, 7)] == [False, True, True, False]
    assert {book.take(), book.take()} == {5, 6}
    assert book.take() is None
    for act in (book.hold, book.release, book.drop, book.key_of, book.holders, book.is_clean):
        with pytest.raises(RamBookError, match="slot 4 is not in this book"):
            act(4)


def test_filled_slots_are_told_oldest_fill_first_and_marks_move_them_between_clean_and_dirty() -> None:
    book = RamBook(3)
    keys = [ChunkKey(bytes([n]) * 32) for n in range(3)]
    slots = [slot for slot in (book.take() for _ in keys) if slot is not None]
    for key, slot in zip(reversed(keys), slots, strict=True):
        book.fill(slot, key, clean=False)
    assert [key for key, _ in book.filled()] == keys[::-1]
    book.mark(slots[0], clean=True)
    stats = book.statistics()
    assert (stats.free, stats.taken, stats.clean, stats.dirty) == (0, 0, 1, 2)
    book.drop(slots[0])
    assert not book.is_clean(slots[0])
    assert book.slot_of(keys[2]) is None
    with pytest.raises(RamBookError, match="no key"):
        book.mark(slots[0], clean=True)
    book.release(slots[0])
    assert book.free == 1
    book.check()


@pytest.mark.parametrize("harm", ["free twice", "names a key", "map names", "free="])
def test_check_finds_a_book_that_contradicts_itself(harm: str) -> None:
    book = RamBook(2)
    slot = book.take()
    assert slot is not None
    book.fill(slot, ChunkKey(b"k" * 32), clean=False)
    book.check()
    if harm == "free twice":
        book._free.append(book._free[0])
    elif harm == "names a key":
        book._by_key.clear()
    elif harm == "map names":
        book._by_key[ChunkKey(b"x" * 32)] = slot
    else:
        book._free.append(slot)
    with pytest.raises(RamBookError, match=harm):
        book.check()
