"""One restore, several askers: who attaches, who leaves, who gets the pages of one that fails, and what is copied at all."""

from __future__ import annotations

import pytest
from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.transfer_record import Transfer
from kvalet.sched.turns import TurnId, TurnReport
from schedworld import World, config

N_KEPT = 33
"""Tokens whose KV the session of ``parked`` leaves behind: four chunks of 8 and a tail of one."""


def words(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 31 + i * 7) % 90 + 1 for i in range(length))


def parked(world: World) -> tuple[int, ...]:
    """A session whose chain is on disk only. Returns its history."""
    client = world.ask(words(0, 30), "s0", max_tokens=4, ignore_eos=True)
    world.feed(ev.BeginDrain(world.now, world.now + 1000.0))
    world.settle()
    world.kill()
    return client.spec.prompt + tuple(client.ids)


def report(world: World, turn: TurnId) -> TurnReport:
    ended = world.clients[turn].ended
    assert ended is not None
    return ended.report


def restores(world: World, turn: TurnId) -> list[Transfer]:
    return list(world.core._board.turns[turn].restores)


def state(world: World, turn: TurnId) -> str:
    return world.core._board.turns[turn].state.value


def sent(world: World, kind: type[cmd.Command]) -> list[cmd.Command]:
    return [command for command in world.commands if type(command) is kind]


def finish(world: World, *turns: TurnId) -> None:
    world.run_to_end(*turns)
    world.settle()
    world.assert_quiet()


def test_a_second_asker_attaches_and_takes_no_pages_for_what_is_on_its_way() -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    one = world.submit((*ids, 1), "a", max_tokens=2)
    free = world.core.statistics().pages.free
    reads = len(world.jobs("read"))
    two = world.submit((*ids, 1, 2, 3), "b", max_tokens=2)
    assert [t.id for t in restores(world, two)] == [t.id for t in restores(world, one)]
    assert len(world.jobs("read")) == reads == 5
    assert free - world.core.statistics().pages.free <= 3  # its own: the page that the tail ends in, its rest, one of growth
    finish(world, one, two)
    assert report(world, one).disk_tokens == report(world, two).disk_tokens == N_KEPT
    assert world.core.statistics().counters["restored_chunks_disk"] == 5


def test_the_first_asker_leaves_and_the_second_still_gets_everything() -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    one = world.submit((*ids, 1), "a", max_tokens=2)
    two = world.submit((*ids, 2), "b", max_tokens=2)
    world.cancel(one)
    assert world.log["CancelTransfer"] == 0
    assert all(len(t.askers) == 1 and t.live for t in restores(world, two))
    finish(world, two)
    assert report(world, two).disk_tokens == N_KEPT
    assert report(world, two).lost == {}


def test_the_last_asker_takes_the_restore_down_and_every_pin_goes() -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    assert world.store is not None
    turns = [world.submit((*ids, i), f"t{i}", max_tokens=2) for i in (1, 2)]
    assert sum(world.store.pins.values()) == 5  # one per chunk, however many ask
    world.cancel(turns[0])
    assert sum(world.store.pins.values()) == 5
    world.cancel(turns[1])
    assert sum(world.store.pins.values()) == 0
    assert world.log["CancelTransfer"] == 5
    world.settle()
    world.assert_quiet()
    assert world.core.statistics().pages.free == 59


@pytest.mark.parametrize("reason", ["payload", "io", "missing"])
def test_a_failed_restore_hands_its_pages_to_its_oldest_asker(reason: str) -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    one, two = (world.submit((*ids, i), f"t{i}", max_tokens=2) for i in (1, 2))
    first = restores(world, one)[0]
    pages = set(first.pages)
    world.job("read", reason)
    assert state(world, one) == "prefilling"  # goes on at once, from token 0
    assert pages <= set(world.core._board.turns[one].table) | set(world.core._board.turns[one].spare)
    assert report_lost(world, one) == {reason: 9 * 4}  # in whole pages
    assert report_lost(world, two) == {}
    assert world.core.statistics().counters["read_failures"][reason] == 1
    finish(world, one, two)
    assert report(world, one).computed_tokens == len(ids) + 1
    assert report(world, one).preemptions == report(world, two).preemptions == 0  # going back to the queue is not one


def report_lost(world: World, turn: TurnId) -> dict[str, int]:
    return world.core._board.turns[turn].lost


def test_a_copy_into_the_device_that_fails_is_recomputed_and_counted_as_lost() -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    turn = world.submit((*ids, 1), "a", max_tokens=2)
    pages = set(restores(world, turn)[0].pages)
    world.job("read")
    world.copy(True, "the link is down")
    asker = world.core._board.turns[turn]
    assert pages <= set(asker.table) | set(asker.spare)  # the copy is over: its pages can be used at once
    finish(world, turn)
    got = report(world, turn)
    assert got.disk_tokens == 0
    assert got.computed_tokens == got.prompt_tokens
    assert got.lost["copy"] > 0


def test_reads_are_sent_in_order_from_token_0_and_of_the_oldest_asker_first() -> None:
    world = World(config(n_pages=60, staging_slots=1, ram_slots=0))
    ids = parked(world)
    one = world.submit((*ids, 1), "a", max_tokens=2)
    for _ in range(5):
        assert len(world.jobs("read")) == 1  # one slot, one read
        world.job("read")
        world.copy(True)
    metas = [command.meta.first_token for command in sent(world, cmd.ReadChunk) if isinstance(command, cmd.ReadChunk)]
    assert metas == [0, 8, 16, 24, 32]
    finish(world, one)


def test_chunks_that_arrive_in_any_order_join_from_the_first_on() -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    turn = world.submit((*ids, 1), "a", max_tokens=2)
    n_nodes = []
    for index in (3, 2, 1, 0):  # the jobs still waiting are 4, 3, 2, 1, then the tail
        world.job("read", index=index)
        world.copy(True)
        n_nodes.append(world.core._board.index.n_nodes)
    assert n_nodes == [0, 0, 0, 8]
    assert state(world, turn) == "restoring"  # the tail is out
    finish(world, turn)
    assert report(world, turn).disk_tokens == N_KEPT


def test_where_the_device_ends_inside_a_chunk_only_the_missing_pages_are_copied() -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    holder = world.submit((*ids[:13], 90), "h", max_tokens=40, ignore_eos=True)  # a stranger at 13: three pages are shared
    while state(world, holder) != "decoding":
        assert world.advance()
    copies = len(sent(world, cmd.CopyIn))
    turn = world.submit((*ids, 1), "a", max_tokens=2)
    world.job("read")
    copy = sent(world, cmd.CopyIn)[copies]
    assert isinstance(copy, cmd.CopyIn)
    assert copy.slot_pages == (1,)
    assert len(copy.pages) == 1
    world.run_to_end(turn)
    assert (report(world, turn).resident_tokens, report(world, turn).disk_tokens) == (12, N_KEPT - 12)
    finish(world, holder)


def test_a_wholly_cached_prompt_copies_its_last_page_and_feeds_one_token() -> None:
    world = World(config(n_pages=60), disk=False)
    prompt = words(3, 16)
    world.ask(prompt, "a", max_tokens=4, ignore_eos=True)
    world.settle()
    before = world.engine.launched_steps
    turn = world.submit(prompt, "b", max_tokens=1)
    (plan,) = world.plans
    ((source, target),) = plan.page_copies
    assert source != target
    assert [(row.start, row.n, row.sample) for row in plan.rows] == [(15, 1, True)]
    assert plan.opens[0].pages[3] == target
    world.run_to_end(turn)
    assert world.engine.launched_steps == before + 1
    assert (report(world, turn).resident_tokens, report(world, turn).computed_tokens) == (15, 1)
    world.settle()
    world.assert_quiet()


def test_a_tail_that_is_longer_than_what_is_asked_is_used_up_to_there() -> None:
    """The stored tail goes on past the prompt's last token, which must be fed: all before it is used."""
    world = World(config(n_pages=60, staging_slots=6))
    client = world.ask(words(0, 21), "s0", max_tokens=3, ignore_eos=True)  # KV of 23 tokens: the tail holds 16 .. 22
    world.feed(ev.BeginDrain(world.now, world.now + 1000.0))
    world.settle()
    world.kill()
    back = world.ask(client.spec.prompt[:20], "s0", max_tokens=2)
    assert back.ended is not None
    assert back.ended.report.disk_tokens == 19
    assert back.ended.report.computed_tokens == 1
    world.settle()
    world.assert_quiet()


def test_a_bad_tail_costs_the_tail_only() -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    assert world.store is not None
    tail = next(key for key, entry in world.store.entries.items() if entry.meta.tail)
    world.store.corrupt(tail)
    back = world.ask((*ids, 1), "s0", max_tokens=2)
    assert back.ended is not None
    assert back.ended.report.disk_tokens == 32
    assert back.ended.report.lost == {"payload": 4}  # its page
    assert not world.store.has(tail)
    world.settle()
    world.assert_quiet()


def test_the_chain_on_disk_is_touched_parents_first_and_once_per_turn() -> None:
    world = World(config(n_pages=60, staging_slots=6))
    ids = parked(world)
    assert world.store is not None
    place = {key: entry.meta.first_token for key, entry in world.store.entries.items()}
    world.ask((*ids, 1), "s0", max_tokens=2)  # from disk
    world.ask((*ids, 1), "s0", max_tokens=2)  # from the device, whose longer page stands for the tail
    touches = [c.keys for c in sent(world, cmd.TouchDisk) if isinstance(c, cmd.TouchDisk)]
    assert [[place[key] for key in keys] for keys in touches] == [[0, 8, 16, 24, 32], [0, 8, 16, 24]]


def test_the_tiers_of_a_report_add_up_to_the_prompt_and_bytes_name_their_tier() -> None:
    world = World(config(n_pages=60, staging_slots=6, page_bytes=32))
    ids = parked(world)
    holder = world.ask(ids[:9], "h", max_tokens=1)
    turn = world.submit((*ids, 1), "a", max_tokens=2)
    world.now += 2.0
    while world.job("read"):
        pass
    world.now += 1.0
    while world.copy(True):
        pass
    world.now += 0.5
    world.run_to_end(turn)
    got = report(world, turn)
    assert holder.ended is not None
    assert got.resident_tokens == 8
    assert got.resident_tokens + got.ram_tokens + got.disk_tokens + got.computed_tokens == got.prompt_tokens == len(ids) + 1
    assert got.cached_tokens == N_KEPT
    assert (got.bytes_from_ram > 0, got.bytes_from_disk > 0) == (got.ram_tokens > 0, True)
    assert got.restore_ms == pytest.approx(3000.0)
    assert got.ttft_ms == pytest.approx(3500.0)
    assert got.prefill_ms == pytest.approx(500.0)
    assert got.read_ms == pytest.approx(1.0 * 4)  # the fake's 1 ms each, summed though they overlap
