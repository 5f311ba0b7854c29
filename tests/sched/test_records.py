"""Records go last: when they are written, what they say, and what becomes of them."""

from __future__ import annotations

import pytest
from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.persist import toward_disk
from kvalet.sched.records import MAX_FAILURES, MAX_RECORDS
from kvalet.sched.session import MAX_BRANCHES
from schedworld import World, config
from talk import after, crowd, drain, open_session, records, report, restart, words


def test_a_record_is_sent_when_the_last_piece_of_its_branch_is_durable_and_not_before() -> None:
    world = World(config(n_pages=25, ram_slots=2))
    first = world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)  # 35 tokens have KV: four chunks and a tail of 3
    crowd(world, 4)
    world.settle()
    (record,) = records(world, "a")
    assert record.ids == after(first)
    assert (record.boundary, record.kv_len) == (30, 35)
    assert (len(record.chunk_keys), record.tail_key is not None) == (4, True)
    order = [type(c).__name__ + str(getattr(c, "meta", None) and c.meta.tail) for c in world.commands
             if isinstance(c, cmd.WriteChunk | cmd.WriteRecord)]  # fmt: skip
    assert order.index("WriteRecordNone") > order.index("WriteChunkTrue") > order.index("WriteChunkFalse")


def test_while_its_tail_is_only_above_the_disk_a_branch_has_no_record() -> None:
    """The whole chunks go to disk as ancestors of a fork's; the tail of the parent's line is still on the device."""
    world = World(config(n_pages=60, ram_slots=2))
    world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    board = world.core._board
    line = next(iter(open_session(world, "a").lines.values()))
    whole = board.chunks.get(line.keys[-1])
    assert whole is not None
    while toward_disk(board, whole) is not None:
        world.feed(ev.Tick(world.now))
        world.settle()
    assert whole.on_disk
    assert records(world) == []


def test_a_drain_writes_the_record_of_every_named_session_latest_used_first_and_of_no_nameless_one() -> None:
    world = World(config(n_pages=100))
    for number in range(6):
        world.now += 1.0
        world.ask(words(number, 10 + number), f"s{number}" if number != 3 else "", max_tokens=3)
    drain(world)
    assert {r.session for r in records(world)} == {"s0", "s1", "s2", "s4", "s5"}
    assert world.drained == [0]
    world.kill()
    for number in (0, 1, 2, 4, 5):
        state = world.session(f"s{number}")
        assert state is not None
        assert state.saved_tokens == state.tokens > 0


def test_one_record_per_branch_which_grows_under_one_name() -> None:
    world = World(config(n_pages=100))
    client = world.ask(words(1, 11), "a", max_tokens=5, ignore_eos=True)
    restart(world)
    (before,) = records(world)
    for _ in range(3):
        client = world.ask(after(client, 5, 6, 7), "a", max_tokens=5, ignore_eos=True)
        restart(world)
        (now,) = records(world)
        assert now.branch == before.branch
        assert now.ids == after(client)
        assert now.kv_len == len(now.ids) - 1


def test_a_branch_off_is_a_record_of_its_own_that_knows_where_it_left() -> None:
    world = World(config(n_pages=100))
    first = world.ask(words(1, 20), "a", max_tokens=4, ignore_eos=True)
    world.ask((*words(1, 12), 80, 81), "a", max_tokens=4, ignore_eos=True)
    drain(world)
    one, other = sorted(records(world), key=lambda r: r.ids != after(first))
    assert one.parent == ""
    assert (other.parent, other.fork_at) == (one.branch, 12)


def test_two_turns_from_one_branch_leave_two_branches_and_two_records() -> None:
    world = World(config(n_pages=100))
    first = world.ask(words(1, 20), "a", max_tokens=4, ignore_eos=True)
    both = [world.submit(after(first, more), "a", max_tokens=4, ignore_eos=True) for more in (70, 80)]
    world.run_to_end(*both)
    drain(world)
    assert {r.ids for r in records(world)} == {after(world.clients[turn]) for turn in both}
    assert len({r.branch for r in records(world)}) == 2


@pytest.mark.parametrize("reason", ["io", "full", "resources"])
def test_a_record_that_fails_is_tried_again_a_few_times_and_the_one_before_it_stands(reason: str) -> None:
    world = World(config(n_pages=100, checkpoint_idle=True))
    first = world.ask(words(1, 20), "a", max_tokens=4, ignore_eos=True)
    world.settle()
    (before,) = records(world)
    world.ask(after(first, 9), "a", max_tokens=4, ignore_eos=True)
    failed = 0
    while world.advance_but_records():
        if world.job("write_record", reason):
            failed += 1
    assert failed == MAX_FAILURES
    assert records(world) == [before]
    state = world.session("a")
    assert state is not None
    assert (state.refused, state.saved_tokens) == (reason, before.kv_len)
    world.settle()
    world.assert_quiet()
    drain(world)  # a drain tries once more
    (now,) = records(world)
    assert now.kv_len > before.kv_len


def test_a_chunk_that_went_before_its_record_was_written_shortens_the_next_record() -> None:
    world = World(config(n_pages=100, checkpoint_idle=True))
    world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    while not world.jobs("write_record"):
        assert world.advance()
    line = next(iter(open_session(world, "a").lines.values()))
    assert world.store is not None
    assert line.tail is not None
    world.store.evict(line.tail)
    world.job("write_record")
    world.settle()
    (record,) = records(world)
    assert record.kv_len == 32
    assert record.tail_key is None


def test_at_most_a_few_records_are_under_way_at_a_time() -> None:
    world = World(config(n_pages=200, max_sessions=64))
    for number in range(20):
        world.ask(words(number, 9), f"s{number}", max_tokens=1)
    world.feed(ev.BeginDrain(world.now, world.now + 100.0))
    most = 0
    while world.advance_but_records() or world.job("write_record"):
        most = max(most, len(world.jobs("write_record")))
    assert most == MAX_RECORDS
    assert len(records(world)) == 20


def test_a_drain_does_not_wait_beyond_its_deadline_for_a_disk_that_keeps_a_record() -> None:
    world = World(config(n_pages=100))
    world.ask(words(1, 20), "a", max_tokens=4)
    world.feed(ev.BeginDrain(world.now, world.now + 5.0))
    while world.advance_but_records():
        pass
    assert world.drained == [0]
    assert world.now >= 5.0
    assert [c.records_left for c in world.commands if isinstance(c, cmd.Drained)] == [1]


def test_closing_a_session_drops_its_records_read_or_not() -> None:
    world = World(config(n_pages=100))
    world.ask(words(1, 20), "a", max_tokens=4)
    world.ask(words(2, 20), "b", max_tokens=4)
    restart(world)
    world.feed(ev.CloseSession(world.now, "a"))  # never opened in this process
    assert [r.session for r in records(world)] == ["b"]
    state = world.session("b")
    assert state is not None
    assert state.known
    world.feed(ev.CloseSession(world.now, "b"))
    assert records(world) == []
    state = world.session("b")
    assert state is not None
    assert not state.known


def test_a_session_closed_while_its_record_is_written_leaves_none() -> None:
    world = World(config(n_pages=100, checkpoint_idle=True))
    world.ask(words(1, 20), "a", max_tokens=4)
    while not world.jobs("write_record"):
        assert world.advance()
    world.feed(ev.CloseSession(world.now, "a"))
    world.settle()
    assert records(world) == []
    world.assert_quiet()


def test_a_session_that_the_book_forgets_is_read_back_when_it_is_asked_for() -> None:
    world = World(config(n_pages=200, max_sessions=2, ram_slots=0))
    first = world.ask(words(1, 20), "a", max_tokens=4, ignore_eos=True)
    restart(world)
    world.ask(words(2, 20), "b", max_tokens=4)
    grown = world.ask(after(first, 9), "a", max_tokens=4, ignore_eos=True)
    world.ask(words(3, 20), "c", max_tokens=4)
    world.ask(words(2, 20), "b", max_tokens=4)  # "a" is forgotten: its record is brought up to what is durable
    assert world.core._board.sessions.find("", "a") is None
    world.settle()
    (record,) = records(world, "a")
    assert record.ids == after(grown)
    assert record.kv_len < len(record.ids) - 1
    back = world.ask(after(grown, 8), "a", max_tokens=2)
    assert report(back).diverged_at == -1
    assert open_session(world, "a").branches[-1].id == record.branch


def test_a_branch_that_a_session_forgets_takes_its_record_along() -> None:
    world = World(config(n_pages=300, max_sessions=4, checkpoint_idle=True, ram_slots=0))
    for number in range(MAX_BRANCHES + 3):
        world.ask((7, *words(number, 9)), "a", max_tokens=1)
        world.settle()
    kept = {branch.id for branch in open_session(world, "a").branches}
    assert len(kept) == MAX_BRANCHES
    assert {r.branch for r in records(world)} == kept


def test_with_the_device_lost_what_is_in_ram_goes_to_disk_with_its_record() -> None:
    world = World(config(n_pages=25, ram_slots=40))
    world.ask(words(1, 20), "a", max_tokens=4, ignore_eos=True)
    crowd(world, 9, 24)
    world.fail_device()
    drain(world)
    assert [r.kv_len for r in records(world, "a")] == [23]
