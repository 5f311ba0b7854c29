"""Who leaves the device, together with whom, where to, and who may not leave."""

from __future__ import annotations

from collections import Counter

import pytest
from kvalet.runtime.plan import SamplingParams
from kvalet.sched import commands as cmd
from kvalet.sched.board import Board
from kvalet.sched.prefix import Node
from kvalet.sched.session import Session, Turn
from kvalet.sched.spill import MAX_COPY_FAILURES, Unit, coming_free, pick_victim, unit_of
from kvalet.sched.turns import TurnId, TurnSpec
from schedworld import SECRET, NoDisk, World, config


def words(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 29 + i * 7) % 90 + 1 for i in range(length))


def board_of(**changes: object) -> Board:
    return Board(config(**changes), NoDisk())


def line(board: Board, ids: tuple[int, ...], now: float = 1.0, after: Node | None = None) -> Node:
    """Cached pages of ``ids``, owned by the index only. Returns the leaf."""
    node = after or board.index.root(SECRET)
    for at in range(0, len(ids), 4):
        page = board.ledger.take()
        assert page is not None
        node = board.index.insert(node, ids[at : at + 4], (), page, now)
        board.ledger.disown(page)
    board.index.touch(node, now)
    return node


def victim(board: Board) -> Unit:
    unit = pick_victim(board)
    assert unit is not None
    return unit


def counters(world: World) -> dict[str, int]:
    return world.core.statistics().counters


def only_steps(world: World) -> None:
    while world.step():
        pass


def copies_out(world: World) -> list[cmd.CopyOut]:
    return [command for command in world.commands if isinstance(command, cmd.CopyOut)]


# units and victims


def test_a_unit_is_a_whole_chunk_back_to_its_start() -> None:
    board = board_of()
    leaf = line(board, words(1, 14))  # a whole chunk, and a tail of 6 in two pages
    unit = victim(board)
    assert unit.leaf is leaf
    assert unit.ids == words(1, 14)[8:]
    assert [node.end for node in unit.nodes] == [14, 12]
    assert unit.pages == tuple(node.page for node in reversed(unit.nodes))


def test_pages_that_somebody_else_uses_are_copied_but_stay() -> None:
    """Two lines part inside a chunk: what both begin with leaves with the last of them."""
    board = board_of()
    one = line(board, words(1, 8))
    assert one.parent is not None
    line(board, words(2, 4), now=2.0, after=one.parent)
    unit = victim(board)
    assert unit.leaf is one
    assert unit.nodes == (one,)
    assert unit.ids == words(1, 8)
    assert len(unit.pages) == 2


def test_a_page_on_which_somebody_stands_stops_the_unit() -> None:
    board = board_of()
    leaf = line(board, words(1, 8))
    assert leaf.parent is not None
    board.index.pin(leaf.parent)
    assert unit_of(board, leaf).nodes == (leaf,)
    board.index.pin(leaf)
    assert pick_victim(board) is None


def leaving(board: Board) -> list[tuple[int, int]]:
    """All that is cached leaves: (first id, tokens up to its end) of each victim in turn."""
    order = []
    while board.index.leaves:
        unit = victim(board)
        order.append((unit.ids[0], unit.leaf.end))
        for node in unit.nodes:
            board.remove_node(node)
    return order


def test_the_least_recently_used_line_goes_first_and_of_equals_the_deepest() -> None:
    board = board_of()
    old, deep, shallow = words(1, 8), words(2, 16), words(3, 8)
    line(board, shallow, 5.0)
    line(board, deep, 5.0)
    line(board, old, 1.0)
    first_two = leaving(board)[:2]
    assert first_two == [(old[0], 8), (deep[8], 16)]
    assert board.ledger.free == board.ledger.total


def test_what_a_queued_turn_wants_goes_only_when_there_is_nothing_else() -> None:
    board = board_of()
    wanted, later = words(1, 8), words(2, 8)
    spec = TurnSpec(TurnId(1), wanted, SamplingParams(), SECRET)
    line(board, wanted, 1.0).want(Turn(spec, Session("", ""), spec.params, 0.0, list(wanted)))
    line(board, later, 9.0)
    assert leaving(board) == [(later[0], 8), (wanted[0], 8)]


def test_nothing_idle_means_no_victim() -> None:
    assert pick_victim(board_of()) is None


# where to


def crowd(world: World, sessions: int, length: int = 24) -> None:
    for i in range(sessions):
        world.now += 1.0
        world.ask(words(i, length), f"s{i}", max_tokens=1)


def test_pages_of_a_spill_are_free_only_when_its_copy_is_done() -> None:
    world = World(config(n_pages=25, ram_slots=8), disk=False)
    crowd(world, 3)
    turn = world.submit(words(9, 60), "big", max_tokens=1)
    only_steps(world)
    assert world.clients[turn].ended is None
    board = world.core._board
    (first, *_) = copies_out(world)
    assert all(board.ledger.claims(page)[1] > 0 for page in first.pages)
    assert coming_free(board) > 0
    free = board.ledger.free
    world.copy(False)
    assert board.ledger.free > free or board.turns[turn].state.value != "queued"
    world.run_to_end(turn)
    world.settle()
    assert counters(world)["spilled_chunks"] == len(copies_out(world))
    assert counters(world)["dropped_chunks"] == 0


def test_a_copy_out_says_how_many_tokens_its_pages_hold() -> None:
    """What is beyond them is old KV of others and must not leave the device."""
    world = World(config(n_pages=25, ram_slots=8), disk=False)
    crowd(world, 3, length=14)
    world.ask(words(9, 70), "big", max_tokens=1)
    assert copies_out(world)
    for copy in copies_out(world):
        assert 4 * len(copy.pages) - 4 < copy.n_tokens <= 4 * len(copy.pages)
    assert {copy.n_tokens for copy in copies_out(world)} == {6, 8}


def test_a_chunk_whose_copies_fail_again_and_again_is_given_up() -> None:
    world = World(config(n_pages=25, ram_slots=8), disk=False)
    crowd(world, 3)
    turn = world.submit(words(9, 60), "big", max_tokens=1)
    for _ in range(200):
        if world.clients[turn].ended:
            break
        assert world.step() or world.copy(False, "torn") or world.tick()
    assert world.clients[turn].ended is not None
    assert counters(world)["copy_failures"] >= MAX_COPY_FAILURES
    assert max(Counter(copy.pages for copy in copies_out(world)).values()) == MAX_COPY_FAILURES
    assert counters(world)["spilled_chunks"] == 0
    assert 1 <= counters(world)["dropped_chunks"] <= counters(world)["copy_failures"] // MAX_COPY_FAILURES
    world.settle()
    world.assert_quiet()


def test_without_ram_and_disk_the_victims_kv_is_dropped_at_once_and_counted() -> None:
    world = World(config(n_pages=25, ram_slots=0, staging_slots=0), disk=False)
    crowd(world, 3)
    held = world.core.statistics().pages.held
    world.ask(words(9, 60), "big", max_tokens=1)
    stats = world.core.statistics()
    assert world.now == 3.0  # nobody waited
    assert counters(world)["dropped_pages"] == held + 15 - stats.pages.held
    assert counters(world)["dropped_chunks"] * 2 == counters(world)["dropped_pages"]
    assert copies_out(world) == []


@pytest.mark.parametrize("slots", [2, 4])
def test_ram_that_cannot_drain_keeps_what_was_used_last(slots: int) -> None:
    world = World(config(n_pages=25, ram_slots=slots, staging_slots=0), disk=False)
    crowd(world, 9, length=8)
    world.now += 1.0
    world.ask(words(20, 88), "big", max_tokens=1)
    world.settle()
    kept = [chunk.last_use for chunk in world.core._board.chunks if chunk.slot is not None]
    assert len(kept) == slots
    assert min(kept) > 9 - slots  # sessions were used at 1 .. 9, the big one at 10
    assert counters(world)["ram_dropped_chunks"] >= 1
    world.assert_quiet()


def test_a_turn_that_comes_back_in_mid_spill_keeps_its_pages_and_the_copy_counts_as_a_clean_one() -> None:
    world = World(config(n_pages=25, ram_slots=8), disk=False)
    crowd(world, 3)
    big = world.submit(words(9, 60), "big", max_tokens=1)
    assert world.copies(inward=False)
    pages = copies_out(world)[0].pages
    world.cancel(big)
    back = world.submit((*words(0, 24), 5), "s0", max_tokens=1)
    assert set(pages) <= set(world.core._board.turns[back].table)
    assert counters(world)["cancelled_spills"] >= 1
    world.run_to_end(back)
    world.settle()
    ended = world.clients[back].ended
    assert ended is not None
    assert (ended.report.resident_tokens, ended.report.ram_tokens) == (24, 0)
    world.assert_quiet()
