"""The ledgers by themselves: pages, RAM slots, page index, chunk map."""

from __future__ import annotations

import random

import pytest
from kvalet.runtime.plan import PageId
from kvalet.sched.board import Board
from kvalet.sched.pages import LedgerError, PageLedger
from kvalet.sched.prefix import PageIndex, common_prefix
from kvalet.store.fake import FakeStore
from kvalet.store.ids import ChunkKey, chunk_key
from kvalet.store.ram import RamBook, RamBookError
from schedworld import IDENTITY, SECRET, NoDisk, config

# pages


def test_a_page_is_free_held_or_leased_only() -> None:
    ledger = PageLedger(4)
    page = ledger.take()
    assert page is not None
    ledger.lease(page)
    assert (ledger.statistics().free, ledger.statistics().held, ledger.leased_only) == (2, 1, 0)
    ledger.disown(page)
    assert (ledger.statistics().held, ledger.leased_only) == (0, 1)
    ledger.unlease(page)
    assert ledger.free == 3


def test_the_scratch_page_is_never_given_out() -> None:
    ledger = PageLedger(4)
    given = [ledger.take() for _ in range(3)]
    assert 0 not in given
    assert ledger.take() is None
    assert ledger.free == 0


@pytest.mark.parametrize("act", ["own", "lease", "disown", "unlease"])
def test_claims_on_free_pages_are_refused(act: str) -> None:
    ledger = PageLedger(3)
    with pytest.raises(LedgerError):
        getattr(ledger, act)(PageId(1))


def test_the_ledger_equals_a_plain_twin() -> None:
    rng = random.Random(5)
    ledger = PageLedger(9)
    owners, leases = [0] * 9, [0] * 9
    for _ in range(3000):
        page = PageId(rng.randint(1, 8))
        act = rng.randrange(5)
        claimed = owners[page] or leases[page]
        if act == 0 and (taken := ledger.take()) is not None:
            assert not owners[taken]
            assert not leases[taken]
            owners[taken] = 1
        elif act == 1 and claimed:
            ledger.own(page)
            owners[page] += 1
        elif act == 2 and claimed:
            ledger.lease(page)
            leases[page] += 1
        elif act == 3 and owners[page]:
            ledger.disown(page)
            owners[page] -= 1
        elif act == 4 and leases[page]:
            ledger.unlease(page)
            leases[page] -= 1
        ledger.check(owners, leases)
        stats = ledger.statistics()
        assert stats.free + stats.held + stats.leased_only == stats.total


def test_check_names_the_page_that_differs() -> None:
    ledger = PageLedger(3)
    page = ledger.take()
    assert page is not None
    with pytest.raises(LedgerError, match=f"{page}, 0, 1"):
        ledger.check([0, 0, 0], [0, 0, 0])


# RAM slots

KEY, OTHER = ChunkKey(b"k" * 32), ChunkKey(b"o" * 32)


def test_a_slot_goes_from_free_to_taken_to_filled_and_back() -> None:
    book = RamBook(2, first=5)
    slot = book.take()
    assert slot is not None
    assert slot in book
    assert book.statistics().taken == 1
    book.fill(slot, KEY, clean=False)
    assert book.slot_of(KEY) == slot
    book.release(slot)
    assert book.statistics().dirty == 1
    book.mark(slot, clean=True)
    assert book.is_clean(slot)
    assert book.statistics().clean == 1
    book.drop(slot)
    assert book.free == 2
    book.check()


def test_a_dropped_slot_is_free_after_its_last_holder() -> None:
    book = RamBook(1)
    slot = book.take()
    assert slot is not None
    book.fill(slot, KEY, clean=True)
    book.release(slot)
    book.hold(slot)
    book.hold(slot)
    book.drop(slot)
    assert book.free == 0
    book.release(slot)
    assert book.free == 0
    book.release(slot)
    assert book.free == 1
    assert book.take() is not None
    assert book.take() is None


def test_misuse_of_the_book_raises_and_changes_nothing() -> None:
    book = RamBook(2)
    slot = book.take()
    assert slot is not None
    book.fill(slot, KEY, clean=False)
    other = book.take()
    assert other is not None
    before = book.statistics()
    for act in (
        lambda: book.fill(slot, OTHER, clean=False),  # two keys in one slot
        lambda: book.fill(other, KEY, clean=False),  # one key in two slots
        lambda: book.hold(other),  # no bytes to hold
        lambda: book.drop(other),
        lambda: book.mark(other, clean=True),
        lambda: book.release(7),
    ):
        with pytest.raises(RamBookError):
            act()
    assert book.statistics() == before
    book.release(slot)
    with pytest.raises(RamBookError):
        book.release(slot)
    book.check()


def test_the_book_conserves_slots_under_random_use() -> None:
    rng = random.Random(3)
    book = RamBook(4)
    held: list[int] = []
    for i in range(3000):
        act = rng.randrange(4)
        if act == 0 and (slot := book.take()) is not None:
            held.append(slot)
            if rng.random() < 0.7:
                book.fill(slot, ChunkKey(i.to_bytes(32, "little")), clean=rng.random() < 0.5)
        elif act == 1 and held:
            book.release(held.pop(rng.randrange(len(held))))
        elif act == 2 and (filled := list(book.filled())):
            slot = rng.choice(filled)[1]
            book.hold(slot)
            held.append(slot)
        elif act == 3 and (filled := list(book.filled())):
            book.drop(rng.choice(filled)[1])
        book.check()
        stats = book.statistics()
        assert stats.free + stats.taken + stats.clean + stats.dirty == stats.n_slots


# page index


def index_of(n_pages: int = 20) -> tuple[PageIndex, PageLedger]:
    ledger = PageLedger(n_pages)
    return PageIndex(ledger, 4), ledger


def page(ledger: PageLedger) -> PageId:
    taken = ledger.take()
    assert taken is not None
    return taken


def test_a_key_that_is_indexed_keeps_its_first_page() -> None:
    index, ledger = index_of()
    root = index.root(SECRET)
    first, second = page(ledger), page(ledger)
    node = index.insert(root, (1, 2, 3, 4), (), first, 0.0)
    assert index.insert(root, (1, 2, 3, 4), (), second, 1.0) is node
    assert ledger.claims(first) == (2, 0)
    assert ledger.claims(second) == (1, 0)  # stays private


def test_the_walk_ends_at_the_first_page_that_differs_and_the_partial_goes_on() -> None:
    index, ledger = index_of()
    root = index.root(SECRET)
    one = index.insert(root, (1, 2, 3, 4), (), page(ledger), 0.0)
    index.insert(one, (5, 6, 7, 8), (), page(ledger), 0.0)
    index.insert(one, (5, 6), (), page(ledger), 0.0)
    ids = (1, 2, 3, 4, 5, 6, 7, 9, 9)
    assert index.walk(root, ids, 8) == [one]
    best = index.best_partial(one, ids, 8)
    assert best is not None
    assert best[1] == 3
    assert index.best_partial(one, ids, 6) is not None
    assert index.best_partial(one, (1, 2, 3, 4, 9), 5) is None


def test_the_same_ids_by_other_calls_are_another_page() -> None:
    index, ledger = index_of()
    root = index.root(SECRET)
    one = index.insert(root, (1, 2, 3, 4), (7, 7, 7, 7), page(ledger), 0.0)
    two = index.insert(root, (1, 2, 3, 4), (7, 7, -1, -1), page(ledger), 0.0)
    assert one is not two
    assert index.walk(root, (1, 2, 3, 4), 4, (7, 7, -1, -1)) == [two]
    best = index.best_partial(root, (1, 2, 3, 4), 4, (7, 7, 7, -1))
    assert best == (one, 3)


def test_only_idle_leaves_leave() -> None:
    index, ledger = index_of()
    root = index.root(SECRET)
    one = index.insert(root, (1, 2, 3, 4), (), page(ledger), 0.0)
    two = index.insert(one, (5, 6, 7, 8), (), page(ledger), 0.0)
    index.pin(two)
    assert index.n_idle == 0
    for node in (one, two):
        with pytest.raises(RuntimeError):
            index.remove(node)
    index.unpin(two)
    assert index.n_idle == 2
    index.remove(two)
    index.remove(one)
    assert not index.roots  # nothing stands on the tree any more
    assert index.n_nodes == 0


def test_a_longer_page_takes_the_place_of_a_partial_one_it_begins_with() -> None:
    index, ledger = index_of()
    root = index.root(SECRET)
    partial = page(ledger)
    index.insert(root, (1, 2), (), partial, 0.0)
    ledger.disown(partial)
    index.insert(root, (1, 2, 3), (), page(ledger), 0.0)
    assert ledger.claims(partial) == (0, 0)
    assert index.n_nodes == 1


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [((), (), 0), ((1,), (), 0), ((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3), (1, 2, 4), 2), ((1, 2), (1, 2, 3), 2), ((9,), (8,), 0)],
)
def test_common_prefix(left: tuple[int, ...], right: tuple[int, ...], shared: int) -> None:
    assert common_prefix(left, right) == common_prefix(right, left) == shared


def test_common_prefix_equals_a_plain_loop() -> None:
    rng = random.Random(1)
    for _ in range(300):
        left = tuple(rng.randint(0, 1) for _ in range(rng.randint(0, 40)))
        right = left[: rng.randint(0, 40)] + tuple(rng.randint(0, 1) for _ in range(rng.randint(0, 9)))
        plain = 0
        while plain < min(len(left), len(right)) and left[plain] == right[plain]:
            plain += 1
        assert common_prefix(left, right) == plain


# chunk map


def test_keys_chain_from_the_identity_and_name_the_tenant() -> None:
    chunks = Board(config(), NoDisk()).chunks
    first = chunks.key_after(SECRET, None, (1, 2))
    assert first == chunk_key(SECRET, IDENTITY, (1, 2))
    assert chunks.key_after(SECRET, first, (1, 2)) != first
    assert chunks.key_after(b"x" * 32, None, (1, 2)) != first


def test_what_only_the_disk_holds_is_not_in_the_map() -> None:
    store = FakeStore()
    board = Board(config(), store)
    root = board.index.root(SECRET)
    chunk = board.chunks.ensure(root, None, tuple(range(8)), 0.0)
    child = board.chunks.ensure(root, chunk, tuple(range(8, 16)), 0.0)
    slot = board.take_ram_slot()
    assert slot is not None
    board.chunks.fill(child, slot)
    board.chunks.book.release(slot)
    chunk.on_disk = child.on_disk = True
    board.chunks.settle(chunk)
    assert board.chunks.get(chunk.key) is chunk  # a child in RAM descends from it
    board.chunks.drop_slot(child)
    assert len(board.chunks) == 0
    assert board.chunks.lost_chunks == 0


def test_losing_a_chunk_drops_dirty_descendants_however_deep() -> None:
    board = Board(config(ram_slots=8), NoDisk())
    root = board.index.root(SECRET)
    parent = None
    chain = []
    for i in range(6):
        parent = board.chunks.ensure(root, parent, tuple(range(i * 8, i * 8 + 8)), 0.0)
        slot = board.take_ram_slot()
        assert slot is not None
        board.chunks.fill(parent, slot)
        board.chunks.book.release(slot)
        chain.append(parent)
    board.chunks.drop_slot(chain[2])
    assert [chunk.slot is not None for chunk in chain] == [True, True, False, False, False, False]
    assert len(board.chunks) == 2
    assert board.chunks.lost_chunks == 4
    board.chunks.book.check()


def test_disk_loss_makes_a_clean_slot_dirty() -> None:
    board = Board(config(), NoDisk())
    chunk = board.chunks.ensure(board.index.root(SECRET), None, tuple(range(8)), 0.0)
    slot = board.take_ram_slot()
    assert slot is not None
    chunk.on_disk = True
    board.chunks.fill(chunk, slot)
    assert board.chunks.book.is_clean(slot)
    board.chunks.set_on_disk(chunk, False)
    assert not board.chunks.book.is_clean(slot)


def test_a_chunk_that_outlived_its_parent_on_disk_goes_with_its_own_file() -> None:
    board = Board(config(), NoDisk())
    root = board.index.root(SECRET)
    parent = board.chunks.ensure(root, None, tuple(range(8)), 0.0)
    child = board.chunks.ensure(root, parent, tuple(range(8, 16)), 0.0)
    parent.on_disk = child.on_disk = True
    slot = board.take_ram_slot()
    assert slot is not None
    board.chunks.fill(child, slot)
    board.chunks.book.release(slot)
    board.chunks.set_on_disk(parent, False)  # lost; the child is on disk still and keeps its slot
    assert child.slot is not None
    board.chunks.set_on_disk(child, False)
    assert child.slot is None
    assert len(board.chunks) == 0
    assert board.chunks.book.free == 4
