"""Checkpoints of idle sessions: at the lowest class, a few at a time, never in anybody's way."""

from __future__ import annotations

import pytest
from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.checkpoint import MAX_CHECKPOINTS
from kvalet.sched.persist import CHECKPOINT, EVICTION
from kvalet.sched.records import BUDGET_PAUSE_S, MAX_FAILURES
from schedworld import World, config
from talk import after, crowd, drain, records, report, restart, words


def idle(**changes: object) -> World:
    return World(config(**({"n_pages": 100, "checkpoint_idle": True} | changes)))


def writes(world: World) -> list[cmd.WriteChunk]:
    return [c for c in world.commands if isinstance(c, cmd.WriteChunk)]


@pytest.mark.parametrize("lag", [0, 1])
def test_after_a_turn_everything_is_on_disk_although_nobody_needs_room(lag: int) -> None:
    world = idle(lag=lag)
    client = world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    world.settle()
    assert all(c.klass == CHECKPOINT for c in writes(world))
    assert [r.kv_len for r in records(world)] == [35]
    world.kill()  # SIGKILL: no drain
    back = world.ask(after(client, 5, 6), "a", max_tokens=2)
    assert (report(back).disk_tokens, report(back).computed_tokens) == (35, 3)


def test_without_it_a_kill_loses_what_no_eviction_wrote() -> None:
    world = idle(checkpoint_idle=False)
    client = world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    world.settle()
    assert writes(world) == []
    world.kill()
    back = world.ask(after(client, 5, 6), "a", max_tokens=2)
    assert report(back).computed_tokens == 38


def test_nameless_sessions_are_checkpointed_too_without_a_record() -> None:
    world = idle()
    client = world.ask(words(1, 30), max_tokens=6, ignore_eos=True)
    world.settle()
    assert records(world) == []
    world.kill()
    back = world.ask(after(client, 5), max_tokens=2)
    assert report(back).disk_tokens == 35


def test_a_few_writes_are_under_way_at_a_time() -> None:
    world = idle(n_pages=200, ram_slots=0, staging_slots=6)
    for number in range(8):
        world.ask(words(number, 20), f"s{number}", max_tokens=1)
    most = 0
    while world.step() or world.copy(False) or world.copy(True):
        most = max(most, len(world.jobs("write")) + len(world.copies(False)))
    while world.job("write"):
        world.copy(False)
        most = max(most, len(world.jobs("write")) + len(world.copies(False)))
    assert 1 <= most <= MAX_CHECKPOINTS


def test_none_is_started_while_a_read_waits_for_a_slot_or_an_eviction_writes() -> None:
    world = idle(n_pages=60, ram_slots=0, staging_slots=2)
    client = world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    restart(world)
    world.ask(words(2, 30), "b", max_tokens=2)
    world.submit(after(client, 5), "a", max_tokens=2)
    while not world.core._board.waiting_reads:
        assert world.job("write") or world.job("read_record") or world.copy(False)
    before = len(writes(world))
    world.feed(ev.Tick(world.now))
    assert world.core._board.waiting_reads
    assert len(writes(world)) == before
    world.settle()
    assert all(r.kv_len == len(r.ids) - 1 for r in records(world))


def test_evictions_are_of_a_higher_class_than_checkpoints() -> None:
    world = World(config(n_pages=25, ram_slots=2))
    crowd(world, 6)
    world.settle()
    assert {c.klass for c in writes(world)} == {EVICTION}


def test_a_day_without_budget_pauses_checkpoints_and_no_eviction() -> None:
    world = idle(n_pages=40, ram_slots=3)
    world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    while not world.jobs("write"):
        assert world.advance()
    began = world.now
    assert world.job("write", "budget")
    board = world.core._board
    assert board.lines.checkpoint_retry_at == began + BUDGET_PAUSE_S
    assert board.write_retry_at <= world.now  # evictions may write at once
    assert world.core.statistics().counters["checkpoint_refusals"] == {"budget": 1}
    n = len(writes(world))
    world.tick(BUDGET_PAUSE_S / 2)
    assert len(writes(world)) == n
    world.settle()
    assert [r.kv_len for r in records(world)] == [35]


@pytest.mark.parametrize("reason", ["io", "full", "budget"])
def test_a_disk_that_takes_nothing_is_asked_a_bounded_number_of_times(reason: str) -> None:
    world = idle()
    world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    refused = 0
    for _ in range(1000):
        if world.job("write", reason):
            refused += 1
        elif not world.advance():
            break
    assert refused == MAX_FAILURES
    world.assert_quiet()


def test_a_branch_that_a_turn_goes_on_from_is_checkpointed_after_all_when_the_turn_leaves_nothing() -> None:
    world = idle()
    client = world.ask(words(1, 30), "a", max_tokens=6, ignore_eos=True)
    turn = world.submit(after(client, *words(3, 30)), "a", max_tokens=6)
    world.feed(ev.Tick(world.now))
    assert not world.core._board.lines.checkpoints
    world.cancel(turn)
    world.settle()
    assert [r.kv_len for r in records(world)] == [35]


def test_a_drain_takes_over_where_checkpoints_were_under_way() -> None:
    world = idle()
    for number in range(5):
        world.ask(words(number, 25), f"s{number}", max_tokens=2)
    drain(world)
    assert world.drained == [0]
    assert len(records(world)) == 5
    world.assert_quiet()
