"""The check in slices finds within one round what the whole check finds, and nothing where there is nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvalet.sched import patrol
from kvalet.sched.core import Core
from kvalet.sched.ranking import RamClass
from kvalet.sched.story import CoreDefect
from schedsim import walk
from schedworld import World, config


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A machine at rest with something everywhere: pages, chunks on the device, in RAM and on disk, sessions."""
    monkeypatch.setattr(patrol, "SLICE", 3)
    made = World(config(n_pages=40, ram_slots=6))
    for i in range(6):
        made.ask(tuple(range(10 * i + 1, 10 * i + 31)), f"s{i}")
    made.settle()
    board = made.core._board
    assert board.index.n_nodes > 20
    assert board.chunks.book.n_filled > 1
    return made


def rounds(core: Core, n: int) -> int:
    """Steps that ``n`` whole rounds take."""
    steps = 0
    for _ in range(n):
        steps += 1
        while not core.check_some():
            steps += 1
            assert steps < 10_000
    return steps


def test_a_round_is_many_short_steps_and_finds_nothing(world: World) -> None:
    board = world.core._board
    things = (
        board.config.n_pages + len(board.chunks) + board.config.ram_slots + board.config.staging_slots + len(board.sessions)
    )
    assert things // 4 - 1 <= rounds(world.core, 1) <= things // 3 + 2


def test_a_round_in_which_something_happened_is_not_the_last(world: World) -> None:
    rounds(world.core, 1)
    world.core.check_some()
    world.ask((1, 2, 3), "new")
    world.settle()
    steps = 0
    while not world.core.check_some():
        steps += 1
    assert steps > rounds(world.core, 1), "the round that had begun before must not count"


def in_use(board: Any) -> int:
    return next(iter(board.index.by_page))


def a_leaf(board: Any) -> Any:
    return next(iter(board.index.leaves))


def in_ram(board: Any) -> Any:
    return next(chunk for chunk in board.chunks if chunk.slot is not None)


def linked(board: Any) -> Any:
    return next(chunk for chunk in board.chunks if chunk.node is not None)


DEFECTS: dict[str, Callable[[Any], object]] = {
    "an owner too many": lambda b: b.ledger._owners.__setitem__(in_use(b), 2),
    "a lease of nobody": lambda b: b.ledger._leases.__setitem__(in_use(b), 1),
    "a page is lost": lambda b: b.ledger._free.pop(),
    "a page is free twice": lambda b: b.ledger._free.append(b.ledger._free[0]),
    "a page in use is free": lambda b: b.ledger._free.append(in_use(b)),
    "a pin of nobody": lambda b: setattr(a_leaf(b), "pins", 1),
    "a leaf is unknown": lambda b: b.index.leaves.pop(a_leaf(b)),
    "an end is wrong": lambda b: setattr(a_leaf(b), "end", a_leaf(b).end + 1),
    "a parent does not know": lambda b: a_leaf(b).parent.children.pop(a_leaf(b).key),
    "nodes are miscounted": lambda b: setattr(b.index, "n_nodes", b.index.n_nodes - 1),
    "idle nodes are miscounted": lambda b: setattr(b.index, "n_idle", b.index.n_idle - 1),
    "another slot": lambda b: setattr(in_ram(b), "slot", b.config.ram_slots - 1 - in_ram(b).slot),
    "a slot is held by nobody": lambda b: b.chunks.book.hold(in_ram(b).slot),
    "a slot is lost": lambda b: b.staging.take(),
    "classes are miscounted": lambda b: b.chunks.in_ram.counts.__setitem__(RamClass.ONLY, 99),
    "clean and is not": lambda b: setattr(in_ram(b), "on_disk", not in_ram(b).on_disk),
    "a chunk lost its node": lambda b: setattr(linked(b), "node", None),
    "restoring pages": lambda b: setattr(b, "restoring_pages", 1),
    "copies that are not out": lambda b: setattr(b, "copies_in", 1),
    "a session is closed": lambda b: setattr(next(iter(b.sessions)), "closed", True),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_within_a_round(world: World, name: str) -> None:
    steps = rounds(world.core, 1)
    DEFECTS[name](world.core._board)
    with pytest.raises(CoreDefect):
        world.core.check()
    with pytest.raises(CoreDefect):
        [world.core.check_some() for _ in range(steps + 1)]


def test_in_the_middle_of_everything_it_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Core.check
    steps = 0

    def both(self: Core) -> None:
        nonlocal steps
        real(self)
        self.check_some()
        steps += 1

    monkeypatch.setattr(Core, "check", both)
    monkeypatch.setattr(patrol, "SLICE", 7)
    for seed in range(12):
        walk(seed, 300)
    assert steps > 2000
