"""What goes to disk, in which order, how often it is tried, and what is left behind."""

from __future__ import annotations

import pytest
from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.chunks import Chunk
from kvalet.sched.persist import EVICTION, MAX_RETRY_S, MAX_WRITES, MAX_WRITES_PER_USE, RETRY_S, toward_disk
from kvalet.sched.policy import rank_chunk
from schedworld import World, config


def words(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 31 + i * 7) % 90 + 1 for i in range(length))


def writes(world: World) -> list[cmd.WriteChunk]:
    return [command for command in world.commands if isinstance(command, cmd.WriteChunk)]


def drain(world: World, seconds: float = 1000.0) -> None:
    world.feed(ev.BeginDrain(world.now, world.now + seconds))


def outside_time(world: World) -> None:
    """Everything but the clock runs until it is quiet."""
    while world.step() or world.copy(True) or world.copy(False) or world.job():
        pass


def counters(world: World) -> dict[str, object]:
    return world.core.statistics().counters


def test_a_drain_writes_the_most_recently_used_session_first_and_parents_before_children() -> None:
    world = World(config(n_pages=60, ram_slots=0))
    for i in range(3):
        world.now += 1.0
        world.ask(words(i, 24), f"s{i}", max_tokens=1)
    world.settle()
    drain(world)
    world.settle()
    asked = [(w.meta.ids, w.meta.first_token) for w in writes(world)]
    assert asked == [(words(i, 24)[at : at + 8], at) for i in (2, 1, 0) for at in (0, 8, 16)]
    assert world.drained == [0]


def test_a_shared_head_is_written_once() -> None:
    world = World(config(n_pages=60, ram_slots=0))
    head = words(9, 16)
    for i in range(3):
        world.ask(head + words(i, 8), f"s{i}", max_tokens=1)
    drain(world)
    world.settle()
    assert len(writes(world)) == len({w.meta.key for w in writes(world)}) == 2 + 3
    assert counters(world)["written_chunks"] == 5


def test_no_more_writes_are_under_way_than_the_bound() -> None:
    world = World(config(n_pages=25, ram_slots=8, staging_slots=8))
    assert world.store is not None
    world.store.writable = False
    for i in range(20):
        world.ask(words(i, 8), f"s{i}", max_tokens=1)
    world.settle()
    assert world.core.statistics().ram.dirty == 8
    world.store.writable = True
    drain(world)
    most = 0
    while not world.drained:
        most = max(most, len(world.jobs("write")))
        assert world.copy(False) or world.job("write") or world.tick()
    assert most == MAX_WRITES
    assert world.drained == [0]


def test_a_child_is_asked_for_only_when_its_parent_is_durable() -> None:
    world = World(config(n_pages=60, ram_slots=0, staging_slots=8))
    world.ask(words(1, 32), "a", max_tokens=1)
    drain(world)
    world.settle()
    seen = [w.meta.key for w in writes(world)]
    assert [w.meta.parent for w in writes(world)] == [world.config.identity, *seen[:-1]]
    assert all(w.klass == EVICTION for w in writes(world))  # behind the reads of turns, before any checkpoint


def test_after_a_failed_write_the_pause_doubles_up_to_its_bound_and_a_success_ends_it() -> None:
    world = World(config(n_pages=60, ram_slots=0))
    world.ask(words(1, 8), "a", max_tokens=1)
    drain(world, 1e6)
    expected = [RETRY_S * 2**n for n in range(5)] + [MAX_RETRY_S] * 3
    pauses = []
    for _ in expected:
        while world.copy(False):
            pass
        at = world.now
        assert world.job("write", "io")
        while not (world.jobs("write") or world.copies(inward=False)):
            assert world.tick()
        pauses.append(world.now - at)
    assert pauses == expected
    assert counters(world)["write_failures"] == {"io": len(expected)}  # and is still not given up
    world.settle()
    assert world.core._board.write_failures == 0
    assert world.drained == [0]


@pytest.mark.parametrize(("reason", "blamed"), [("io", True), ("full", True), ("cancelled", False), ("ancestor", False)])
def test_only_the_disks_own_fault_makes_it_pause(reason: str, blamed: bool) -> None:
    world = World(config(n_pages=60, ram_slots=0))
    world.ask(words(1, 8), "a", max_tokens=1)
    drain(world)
    while world.copy(False):
        pass
    world.job("write", reason)
    assert (world.core._board.write_retry_at > world.now) is blamed
    assert world.core._board.write_failures == blamed
    world.settle()
    assert world.drained == [0]


def test_a_name_that_something_strange_has_is_not_tried_again_in_this_use() -> None:
    """P29: a directory stands where a chunk should go. It costs that chunk (and what comes after it) and nobody waits."""
    world = World(config(n_pages=60, ram_slots=0))
    world.ask(words(1, 24), "a", max_tokens=1)
    drain(world)
    while world.copy(False):
        pass
    assert world.job("write", "blocked")
    assert world.core._board.write_failures == 0
    world.settle()
    assert world.drained == [3]
    assert len(writes(world)) == 1


def test_a_drain_that_cannot_write_says_how_many_chunks_it_leaves_behind_at_its_deadline() -> None:
    world = World(config(n_pages=60, ram_slots=0))
    assert world.store is not None
    world.ask(words(1, 24), "a", max_tokens=1)
    world.store.full = True
    drain(world, 20.0)
    while not world.drained:
        assert world.advance()
    assert world.drained == [3]
    assert world.now == 20.0
    world.settle()
    assert len(world.store.entries) == 0
    world.assert_quiet()


def test_a_drain_without_a_disk_is_over_at_once_and_counts_what_is_lost() -> None:
    world = World(config(n_pages=60, ram_slots=4), disk=False)
    world.ask(words(1, 24), "a", max_tokens=1)
    drain(world)
    outside_time(world)
    assert world.drained == [3]
    assert world.now == 0.0


def test_a_second_drain_can_only_come_nearer_and_drained_is_said_once() -> None:
    world = World(config(n_pages=60))
    turn = world.submit(words(1, 10), max_tokens=200, ignore_eos=True)
    drain(world, 10.0)
    drain(world, 50.0)
    assert world.core._board.drain_deadline == 10.0
    drain(world, 3.0)
    assert world.core._board.drain_deadline == 3.0
    world.step()
    world.tick()
    assert world.now == 3.0
    assert world.clients[turn].ended is not None
    world.tick(1.0)
    world.feed(ev.Tick(world.now))
    assert len(world.drained) == 1


def in_ram(world: World) -> list[Chunk]:
    return [chunk for chunk in world.core._board.chunks if chunk.slot is not None]


def test_ram_below_its_low_watermark_is_written_before_it_is_full_least_valuable_first() -> None:
    world = World(config(n_pages=25, ram_slots=8, ram_low_watermark=0.5, ram_high_watermark=0.75))
    for i in range(7):
        world.now += 1.0
        world.ask(words(i, 24), f"s{i}", max_tokens=1)
    world.settle()
    stats = world.core.statistics()
    assert stats.ram.free + stats.ram.clean >= 4
    assert counters(world)["dropped_chunks"] == counters(world)["ram_dropped_chunks"] == 0
    clean = [rank_chunk(c) for c in in_ram(world) if c.on_disk]
    dirty = [rank_chunk(c) for c in in_ram(world) if not c.on_disk and c.node is None]
    assert clean
    assert not dirty or min(clean) < max(dirty)


def test_a_disk_that_evicts_what_it_is_given_gets_a_chunk_a_bounded_number_of_times_per_use() -> None:
    world = World(config(n_pages=60, ram_slots=8))
    world.ask(words(1, 8), "a", max_tokens=1)
    world.settle()
    board = world.core._board
    chunk = board.chunks.link(next(iter(board.index.leaves)), world.now)
    began = 0
    for _ in range(MAX_WRITES_PER_USE + 2):
        began += toward_disk(board, chunk) is not None
        world.feed(ev.Tick(world.now))
        outside_time(world)
    assert began == 1  # the disk has it: nothing to do
    assert world.store is not None
    for _ in range(MAX_WRITES_PER_USE + 2):
        world.store.entries.pop(chunk.key, None)
        world.feed(ev.DiskGone(world.now, (chunk.key,)))
        began += toward_disk(board, chunk) is not None
        world.feed(ev.Tick(world.now))
        outside_time(world)
    assert began == MAX_WRITES_PER_USE
    chunk.last_use += 1.0  # a turn uses it again: it has become worth another try
    assert toward_disk(board, chunk) is not None


def test_evicting_what_ram_or_disk_cover_copies_nothing() -> None:
    world = World(config(n_pages=25, ram_slots=0))
    world.ask(words(1, 24), "a", max_tokens=1)
    drain(world)
    world.settle()
    copies = world.log["CopyOut"]
    board = world.core._board
    world.core._board.drain_deadline = None  # the same process goes on: only a test can ask for that
    world.ask(words(2, 80), "b", max_tokens=1)
    assert board.counters.evicted_clean_pages >= 2
    assert world.log["CopyOut"] == copies
    assert counters(world)["dropped_chunks"] == 0
    world.settle()
    world.assert_quiet()
