"""Pinned sessions: never lost while the disk takes writes, still spillable, and pinned after a restart."""

from __future__ import annotations

import pytest
from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.persist import CHECKPOINT
from kvalet.sched.records import MAX_FAILURES
from kvalet.sched.session_state import SessionState
from schedworld import World, config
from talk import after, crowd, drain, open_session, records, report, words


def state(world: World, name: str = "a") -> SessionState:
    found = world.session(name)
    assert found is not None
    return found


def pinned(world: World, name: str = "a", length: int = 30) -> object:
    client = world.ask(words(1, length), name, max_tokens=6, ignore_eos=True)
    world.session(name, True)
    world.settle()
    return client


def test_pinning_writes_the_chain_at_the_lowest_class_and_again_after_each_turn() -> None:
    world = World(config(n_pages=100))
    client = world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    world.settle()
    assert records(world) == []
    answer = world.session("a", True)
    assert answer is not None
    assert (answer.pinned, answer.tokens, answer.saved_tokens) == (True, 35, 0)  # at once: what is safe comes later
    world.settle()
    assert (state(world).saved_tokens, state(world).refused) == (35, "")
    (record,) = records(world)
    assert record.pinned
    for _ in range(2):
        client = world.ask(after(client, 5, 6, 7), "a", max_tokens=6, ignore_eos=True)
        world.settle()
        assert state(world).saved_tokens == state(world).tokens == len(after(client)) - 1
        (record,) = records(world)
        assert record.kv_len == len(after(client)) - 1
    writes = [c for c in world.commands if isinstance(c, cmd.WriteChunk)]
    assert writes
    assert all(c.klass == CHECKPOINT for c in writes)
    world.assert_quiet()


def test_a_session_can_be_pinned_before_its_first_turn() -> None:
    world = World(config(n_pages=100))
    answer = world.session("a", True)
    assert answer == SessionState(known=True, pinned=True)
    world.ask(words(1, 20), "a", max_tokens=3, ignore_eos=True)
    world.settle()
    assert state(world).saved_tokens == 22


def test_pinning_twice_and_letting_go_twice_are_once() -> None:
    world = World(config(n_pages=100))
    pinned(world)
    n = world.log["WriteRecord"]
    world.session("a", True)
    world.settle()
    assert world.log["WriteRecord"] == n
    for _ in range(2):
        world.session("a", False)
        world.settle()
    assert world.log["WriteRecord"] == n + 1
    (record,) = records(world)
    assert not record.pinned
    assert not world.core._board.lines.pinned
    world.assert_quiet()


@pytest.mark.parametrize("wishes", [(False, True), (False, True, False), (False, True, False, True)])
def test_of_wishes_in_quick_succession_the_last_one_counts_on_disk_too(wishes: tuple[bool, ...]) -> None:
    """Each comes while the record of the one before is under way."""
    world = World(config(n_pages=100))
    pinned(world)
    for wish in wishes:
        world.session("a", wish)
    world.settle()
    (record,) = records(world)
    assert record.pinned is wishes[-1]
    world.assert_quiet()
    world.kill()
    assert state(world).pinned is wishes[-1]


def test_a_pin_that_is_taken_back_while_its_record_is_under_way() -> None:
    world = World(config(n_pages=100))
    world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    world.settle()
    world.session("a", True)
    while not world.log["WriteRecord"]:
        assert world.advance()
    world.session("a", False)
    world.settle()
    (record,) = records(world)
    assert not record.pinned
    world.assert_quiet()


def test_a_pin_outlives_the_process() -> None:
    world = World(config(n_pages=100))
    pinned(world)
    world.kill()
    assert state(world) == SessionState(known=True, pinned=True, branches=1, tokens=35, saved_tokens=35)
    (record,) = records(world)
    back = world.ask((*record.ids, 5, 6), "a", max_tokens=4, ignore_eos=True)
    world.settle()
    assert report(back).computed_tokens == 3
    assert state(world).saved_tokens == 41  # checkpointed again, as a pinned one
    world.kill()
    world.session("a", False)
    world.settle()
    world.kill()
    assert not state(world).pinned


def test_a_pinned_chain_is_not_evicted_from_a_disk_that_is_full_of_others() -> None:
    world = World(config(n_pages=25, ram_slots=2), capacity=20)
    pinned(world)
    (record,) = records(world)
    crowd(world, 12)
    world.settle()
    assert world.store is not None
    assert len(world.store.entries) == 20
    assert set(record.keys) <= set(world.store.entries)
    world.kill()
    crowd(world, 12, first=70)
    world.settle()
    assert set(record.keys) <= set(world.store.entries)
    back = world.ask((*record.ids, 5), "a", max_tokens=2)
    assert report(back).computed_tokens == 2


def test_between_its_chunks_and_its_record_no_piece_of_it_is_evicted() -> None:
    """The record is slow; meanwhile others fill the disk over and over."""
    world = World(config(n_pages=25, ram_slots=2), capacity=10)
    world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    world.ask_session("a", True)
    while not world.jobs("write_record"):
        assert world.advance_but_records()
    (line,) = open_session(world, "a").lines.values()
    for number in range(8):
        turn = world.submit(words(60 + number, 24), f"n{number}", max_tokens=1)
        while world.clients[turn].ended is None:
            assert world.advance_but_records()
    assert world.store is not None
    assert len(world.store.entries) == 10
    assert set(line.pieces) <= set(world.store.entries)
    world.settle()
    assert state(world).saved_tokens == 35
    world.assert_quiet()


@pytest.mark.parametrize("refusal", ["read_only", "full"])
def test_ram_never_drops_the_last_copy_of_a_pinned_chunk_while_others_can_go(refusal: str) -> None:
    world = World(config(n_pages=25, ram_slots=6, pin_wait_s=1e6))
    assert world.store is not None
    world.store.writable, world.store.full = refusal != "read_only", refusal == "full"
    client = world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    world.ask_session("a", True)
    world.now += 1.0
    crowd(world, 14)
    counters = world.core.statistics().counters
    assert counters["lost_pinned_chunks"] == 0
    assert counters["dropped_chunks"] + counters["ram_dropped_chunks"] > 0
    back = world.ask(after(client, 5), "a", max_tokens=2)
    assert report(back).computed_tokens == 2


def test_what_the_disk_refuses_is_counted_and_told_and_tried_again_when_it_takes_something() -> None:
    world = World(config(n_pages=100))
    assert world.store is not None
    world.store.full = True
    pinned(world)
    counters = world.core.statistics().counters
    assert counters["checkpoint_refusals"] == {"full": MAX_FAILURES}
    assert (state(world).saved_tokens, state(world).refused) == (0, "full")
    world.store.full = False
    world.now += 1000.0
    world.session("b", True)
    world.ask(words(2, 9), "b", max_tokens=1)
    world.settle()
    assert (state(world).saved_tokens, state(world).refused) == (35, "")
    assert world.core.statistics().counters["lost_pinned_chunks"] == 0
    world.assert_quiet()


def test_turns_come_first_where_nothing_but_pinned_kv_is_left_and_the_disk_takes_none_for_long() -> None:
    world = World(config(n_pages=12, ram_slots=0, pin_wait_s=10.0))
    assert world.store is not None
    world.store.writable = False
    world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    world.ask_session("a", True)
    began = world.now
    turn = world.submit(words(2, 20), "b", max_tokens=2)
    world.tick(5.0)
    while not world.wakes or min(world.wakes) < began + 9.9:
        assert world.advance()
    assert world.clients[turn].ended is None
    assert world.core.statistics().counters["lost_pinned_chunks"] == 0
    world.run_to_end(turn)
    assert world.now >= began + 10.0
    assert world.core.statistics().counters["lost_pinned_chunks"] > 0
    assert state(world).saved_tokens == 0


def test_a_pinned_chunk_that_the_disk_lost_is_written_again_from_what_is_above() -> None:
    world = World(config(n_pages=100))
    pinned(world)
    (record,) = records(world)
    assert world.store is not None
    world.damaged.add(record.chunk_keys[1])
    world.store.evict(record.chunk_keys[1])
    world.pour()
    world.settle()
    assert set(record.keys) <= set(world.store.entries)
    assert state(world).saved_tokens == 35


def test_a_turn_that_goes_on_supersedes_the_checkpoint_before_it_and_its_old_tail_leaves_the_device() -> None:
    world = World(config(n_pages=100))
    client = world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    world.ask_session("a", True)
    while not world.jobs("write"):
        assert world.advance()
    turn = world.submit(after(client, 5, 6), "a", max_tokens=6, ignore_eos=True)
    while world.clients[turn].ended is None:
        assert world.step() or world.job("write") or world.advance()
    world.settle()
    (line,) = open_session(world, "a").lines.values()
    assert line.saved_tokens == line.branch.kv_len == 43
    partial = [node for node in world.core._board.index.nodes() if len(node.ids) < 4]
    assert [node.end for node in partial] == [43]
    world.assert_quiet()


def test_closing_a_pinned_session_lets_its_chunks_go() -> None:
    world = World(config(n_pages=100), capacity=12)
    pinned(world)
    world.feed(ev.CloseSession(world.now, "a"))
    assert records(world) == []
    for number in range(6):
        world.ask(words(60 + number, 20), f"n{number}", max_tokens=1)
    drain(world)
    assert world.store is not None
    assert len(world.store.entries) == 12  # full of the others: nothing is held for the closed one
    world.assert_quiet()


def test_a_fork_of_a_pinned_session_is_not_pinned() -> None:
    world = World(config(n_pages=100))
    pinned(world)
    world.feed(ev.ForkSession(world.now, "a", "kid"))
    assert not state(world, "kid").pinned
    assert state(world, "kid").tokens == 35
