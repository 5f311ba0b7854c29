"""What is done for many at once does what is done one by one."""

from __future__ import annotations

import random

import pytest
from kvalet.runtime.plan import PageId
from kvalet.sched import lifecycle, matching, resident
from kvalet.sched.board import Board
from kvalet.sched.pages import LedgerError, PageLedger
from kvalet.sched.prefix import Node, PageIndex, Root
from kvalet.sched.session import Turn
from kvalet.sched.waiting import SLACK, WaitingRestores, order_of
from schedsim import walk

SIZE = 4


def test_pages_at_once_and_one_by_one() -> None:
    rng = random.Random(3)
    many, single = PageLedger(40), PageLedger(40)
    owned: list[PageId] = []
    leased: list[PageId] = []

    def same() -> None:
        assert many._owners == single._owners
        assert many._leases == single._leases
        assert many.statistics() == single.statistics()
        assert set(many._free) == set(single._free)

    for _ in range(400):
        n = rng.randint(1, 6)
        if rng.random() < 0.4 and many.free >= n:
            single._free = list(many._free)  # the same order: pages come back in different ones
            pages = many.take_all(n)
            assert pages == sorted(page for _ in pages if (page := single.take()) is not None)
            owned += pages
        elif owned:
            some = rng.sample(owned, min(n, len(owned)))
            kind = rng.randrange(3)
            if kind == 0:
                many.own_all(some)
                [single.own(p) for p in some]
                many.disown_all(some)
                [single.disown(p) for p in some]
            elif kind == 1:
                many.lend_all(some)
                for page in some:
                    single.lease(page)
                    single.disown(page)
                    owned.remove(page)
                    leased.append(page)
            else:
                many.lease_all(some)
                [single.lease(p) for p in some]
                leased += some
        if leased and rng.random() < 0.5:
            some = [leased.pop(rng.randrange(len(leased))) for _ in range(min(n, len(leased)))]
            many.unlease_all(some)
            [single.unlease(p) for p in some]
        same()


@pytest.mark.parametrize("name", ["own_all", "disown_all", "lease_all", "unlease_all", "lend_all"])
def test_a_claim_on_a_free_page_is_a_defect_at_once_too(name: str) -> None:
    ledger = PageLedger(4)
    with pytest.raises(LedgerError):
        getattr(ledger, name)([PageId(2)])
    with pytest.raises(LedgerError):
        ledger.take_all(4)


class Tree:
    """An index with pages to spare."""

    def __init__(self) -> None:
        self.ledger = PageLedger(400)
        self.index = PageIndex(self.ledger, SIZE)
        self.root = self.index.root(b"s" * 32)

    def picture(self) -> object:
        nodes = sorted((n.ids, n.end, n.page, n in self.index.leaves, len(n.children)) for n in self.index.nodes())
        return nodes, self.index.n_nodes, self.index.n_idle, len(self.index.leaves), self.ledger.statistics()


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_pages_and_pages(seed: int) -> None:
    """The same histories, some beginning alike, some ending inside a page, inserted and removed in both ways."""
    rng = random.Random(seed)
    fast, plain = Tree(), Tree()
    for turn in range(12):
        ids = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 9) * SIZE - (rng.random() < 0.4)))
        n = -(-len(ids) // SIZE)
        pages = fast.ledger.take_all(n)
        assert plain.ledger.take_all(n) == pages
        last = fast.index.insert_run(fast.root, ids, pages, float(turn))
        node: Node = plain.root
        for i, page in enumerate(pages):
            node = plain.index.insert(node, ids[i * SIZE : i * SIZE + SIZE], (), page, float(turn))
        assert (last.ids, last.end, last.page) == (node.ids, node.end, node.page)
        for tree in (fast, plain):
            tree.ledger.disown_all(pages)
        assert fast.picture() == plain.picture()
        if rng.random() < 0.5:
            _remove_one_line(rng, fast, plain)
            assert fast.picture() == plain.picture()


def _remove_one_line(rng: random.Random, fast: Tree, plain: Tree) -> None:
    leaf = rng.choice(sorted(fast.index.leaves, key=lambda n: n.page))
    twin = next(n for n in plain.index.leaves if n.page == leaf.page)
    run = [leaf]
    while run[-1].parent is not None and run[-1].parent.parent is not None and len(run[-1].parent.children) == 1:
        run.append(run[-1].parent)
    run = run[: rng.randint(1, len(run))]
    fast.index.remove_run(run)
    for _ in run:
        parent = twin.parent
        plain.index.remove(twin)
        assert parent is not None
        twin = parent
    assert not any(node.children for node in run)


def test_a_run_that_is_no_line_of_idle_pages_is_refused() -> None:
    tree = Tree()
    pages = tree.ledger.take_all(3)
    last = tree.index.insert_run(tree.root, tuple(range(3 * SIZE)), pages, 0.0)
    assert last.parent is not None
    before = tree.picture()
    for run in ([last.parent], [last.parent, last], [last, last.parent.parent]):
        with pytest.raises(RuntimeError, match="only idle nodes"):
            tree.index.remove_run(run)  # type: ignore[arg-type]
    tree.index.pin(last)
    with pytest.raises(RuntimeError, match="only idle nodes"):
        tree.index.remove_run([last])
    tree.index.unpin(last)
    assert tree.picture() == before


def test_residency_by_chunks_is_residency_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resident.resident_path
    found = 0

    def both(board: Board, root: Root, turn: Turn, limit: int) -> list[Node]:
        nonlocal found
        path = real(board, root, turn, limit)
        assert path == board.index.walk(root, turn.known_ids(), limit, turn.calls)
        found += bool(path)
        return path

    monkeypatch.setattr(matching, "resident_path", both)
    monkeypatch.setattr(lifecycle, "resident_path", both)
    for seed in range(12):
        walk(seed, 400)
    assert found > 100


def test_restores_wait_in_the_order_that_sorting_all_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    real = WaitingRestores.first
    asked = 0

    def both(self: WaitingRestores):  # type: ignore[no-untyped-def]
        nonlocal asked
        first = real(self)
        plain = min(self, key=lambda t: (order_of(t), t.id), default=None)
        assert first is plain
        assert len(self._heap) <= 2 * len(self) + SLACK + 1
        asked += len(self) > 1
        return first

    monkeypatch.setattr(WaitingRestores, "first", both)
    for seed in range(24):
        walk(seed, 400)
    assert asked > 20
