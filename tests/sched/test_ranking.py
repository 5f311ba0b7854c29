"""The heaps answer as a pass over everybody would."""

from __future__ import annotations

import random

import pytest
from kvalet.sched import persist, spill
from kvalet.sched.board import Board
from kvalet.sched.chunks import Chunk
from kvalet.sched.policy import rank_chunk, rank_pages
from kvalet.sched.ranking import SLACK, RamClass, RamOrder, Ranking
from schedsim import walk


def test_the_least_item_that_fits() -> None:
    ranks = {"a": (3.0, 0), "b": (1.0, 0), "c": (2.0, 0)}
    ranking: Ranking[str] = Ranking(ranks.get, lambda: ranks)
    for item in ranks:
        ranking.push(item)
    assert ranking.least(lambda item: True) == "b"
    assert ranking.least(lambda item: item != "b") == "c"
    ranks["a"] = (0.0, 0)
    ranking.push("a")
    assert ranking.least(lambda item: True) == "a"
    del ranks["a"]
    assert ranking.least(lambda item: True) == "b"
    assert ranking.least(lambda item: False) is None
    assert ranking.least(lambda item: True) == "b"  # those set aside kept their place


def test_a_ranking_equals_a_plain_minimum_and_stays_bounded() -> None:
    rng = random.Random(2)
    ranks: dict[int, tuple[float, int]] = {}
    ranking: Ranking[int] = Ranking(ranks.get, lambda: ranks)
    for _ in range(5000):
        item = rng.randrange(30)
        if rng.random() < 0.3:
            ranks.pop(item, None)
        else:
            ranks[item] = (rng.random(), -item)
            ranking.push(item)
        odd = rng.random() < 0.5
        plain = min((i for i in ranks if i % 2 == odd), key=ranks.__getitem__, default=None)
        assert ranking.least(lambda i, odd=odd: i % 2 == odd) == plain
        assert len(ranking._heap) <= 2 * 30 + SLACK + 1


def test_victims_are_those_a_pass_over_all_leaves_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spill.pick_victim
    asked = 0

    def both(board: Board, *, spare_pinned: bool = False) -> spill.Unit | None:
        nonlocal asked
        asked += 1
        unit = real(board, spare_pinned=spare_pinned)
        leaves = [
            leaf
            for leaf in board.index.leaves
            if not leaf.pins and not (leaf.chunk and leaf.chunk.outgoing) and not board.step_leases(leaf.page)
            if not (spare_pinned and leaf.chunk and leaf.chunk.key in board.lines.pinned)
        ]
        plain = min(leaves, key=lambda leaf: (bool(leaf.wanters), rank_pages(leaf)), default=None)
        assert (unit is None) == (plain is None)
        if unit is not None and plain is not None:
            assert (bool(unit.leaf.wanters), unit.rank) == (bool(plain.wanters), rank_pages(plain))
        return unit

    monkeypatch.setattr(spill, "pick_victim", both)
    for seed in range(12):
        walk(seed, 400)
    assert asked > 100


def test_slots_are_given_up_in_the_order_a_pass_over_all_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RamOrder.least
    asked = 0

    def both(self, kinds, fit):  # type: ignore[no-untyped-def]
        nonlocal asked
        chunk = real(self, kinds, fit)
        for kind in kinds:
            plain = min((c for c, k in self._class.items() if k is kind and fit(c)), key=rank_chunk, default=None)
            if plain is not None:
                asked += 1
                assert chunk is not None
                assert rank_chunk(chunk) == rank_chunk(plain)
                return chunk
        assert chunk is None
        return chunk

    monkeypatch.setattr(RamOrder, "least", both)
    for seed in range(12):
        walk(seed, 400)
    assert asked > 50


def test_what_is_written_next_is_what_a_pass_over_all_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RamOrder.unwritten
    asked = 0

    def both(self: RamOrder, n: int) -> list[Chunk]:
        nonlocal asked
        chunks = real(self, n)
        free = [c for c, kind in self._class.items() if kind is not RamClass.CLEAN and c.outgoing is None]
        assert [rank_chunk(c) for c in chunks] == [rank_chunk(c) for c in sorted(free, key=rank_chunk)[:n]]
        assert len(set(chunks)) == len(chunks)
        asked += bool(chunks)
        return chunks

    monkeypatch.setattr(RamOrder, "unwritten", both)
    for seed in range(20):
        walk(seed, 400)
    assert asked > 50


def test_a_rank_may_grow_in_silence() -> None:
    ranks = {"a": (1.0, 0), "b": (2.0, 0)}
    ranking: Ranking[str] = Ranking(ranks.get, lambda: ranks)
    for item in ranks:
        ranking.push(item)
    ranks["a"] = (3.0, 0)
    assert ranking.smallest(5, lambda item: True) == ["b", "a"]
    assert len(ranking._heap) == 2


def test_the_classes_say_what_a_loss_would_mean() -> None:
    assert [kind.value for kind in RamClass] == ["clean", "shadowed", "only"]
    assert persist.MAX_CANDIDATES > persist.MAX_WRITES
