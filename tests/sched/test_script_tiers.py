"""Named scripts of a page's way out and back."""

from __future__ import annotations

import pytest
from kvalet.sched import events as ev
from kvalet.sched.turns import EndReason
from schedworld import Client, World, config

HEAD = tuple(range(50, 66))


def history(number: int, length: int = 30) -> tuple[int, ...]:
    return tuple((number * 31 + i * 7) % 90 + 1 for i in range(length))


def fill(world: World, sessions: int, length: int = 30, **params: object) -> list[Client]:
    return [world.ask(history(i, length), f"s{i}", max_tokens=4, **params) for i in range(sessions)]


def counters(world: World) -> dict[str, object]:
    return world.core.statistics().counters


def report(client: Client):  # type: ignore[no-untyped-def]
    assert client.ended is not None
    return client.ended.report


def to_disk(world: World, name: str = "s0", prompt: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """A session whose whole chain is on disk only. Returns what it would send next."""
    client = world.ask(prompt or history(0), name, max_tokens=4, ignore_eos=True)
    world.feed(ev.BeginDrain(world.now, world.now + 1000.0))
    world.settle()
    world.kill()
    return client.spec.prompt + tuple(client.ids) + (5, 6, 7)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_parked_session_comes_back_from_ram(lag: int) -> None:
    world = World(config(lag=lag, ram_slots=20), disk=False)
    first = fill(world, 6)[0]
    back = world.ask(first.spec.prompt + tuple(first.ids) + (5,), "s0", max_tokens=4)
    assert report(back).ram_tokens > 0
    assert report(back).computed_tokens <= 2
    world.settle()
    world.assert_quiet()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_session_comes_back_from_disk_after_a_restart(lag: int) -> None:
    world = World(config(lag=lag))
    prompt = to_disk(world)
    back = world.ask(prompt, "s0", max_tokens=4)
    assert report(back).disk_tokens == 33
    assert report(back).computed_tokens == len(prompt) - 33
    assert report(back).bytes_from_disk > 0


def test_a_tail_is_used_up_to_the_first_token_that_differs() -> None:
    world = World(config())
    client = world.ask(history(0, 21), "s0", max_tokens=3, ignore_eos=True)  # tail: tokens 16 .. 23
    world.feed(ev.BeginDrain(world.now, world.now + 1000.0))
    world.settle()
    world.kill()
    back = world.ask((*client.spec.prompt[:19], 95, 96), "s1", max_tokens=3)
    assert world.log["ReadTail"] == 1  # whose ids the reader finds out
    assert report(back).disk_tokens == 19
    world.kill()
    back = world.ask((*client.spec.prompt[:19], 95, 96), "s0", max_tokens=3)
    assert world.log["ReadTail"] == 1  # the session's record says what its tail is
    assert report(back).disk_tokens == 19


def test_disk_is_closed_under_ancestors_and_heads_drain() -> None:
    """RAM full of last chunks whose heads are on the device drains: ancestors go through staging, first chunk first."""
    world = World(config(n_pages=33, ram_slots=3, staging_slots=1))
    for i in range(4):
        world.ask(HEAD + history(i, 20), f"s{i}", max_tokens=4)
    world.settle()
    for i in range(4, 9):
        world.ask(HEAD + history(i, 20), f"s{i}", max_tokens=4)
    assert world.store is not None
    keys = set(world.store.entries)
    assert keys
    assert all(e.meta.ordinal == 0 or e.meta.parent in keys for e in world.store.entries.values())
    assert counters(world)["dropped_chunks"] == 0
    assert "ancestor" not in counters(world)["write_failures"]


def test_the_shared_prefix_is_on_disk_though_it_was_never_evicted() -> None:
    """kill -9 while the shared prefix was never evicted: the restart hits it."""
    world = World(config(n_pages=33, ram_slots=3, staging_slots=1))
    for i in range(8):
        world.ask(HEAD + history(i, 20), f"s{i}", max_tokens=4)
    world.settle()
    world.kill()
    back = world.ask(HEAD + history(0, 20) + (3,), "s0", max_tokens=4)
    assert report(back).disk_tokens >= len(HEAD)


def test_ram_without_a_disk_turns_over() -> None:
    world = World(config(ram_slots=2, staging_slots=0), disk=False)
    fill(world, 12)
    last = fill(world, 1)[0]
    assert counters(world)["ram_dropped_chunks"] > 0
    assert last.ended is not None
    world.settle()
    world.assert_quiet()


def test_two_turns_from_one_unaligned_position_at_once() -> None:
    world = World(config(n_pages=60))
    first = world.ask(history(0, 18), "s0", max_tokens=4, ignore_eos=True)  # KV ends at 21, inside a page
    world.settle()
    known = first.spec.prompt + tuple(first.ids[:3])
    one = world.submit((*known, 1, 2), "s0", max_tokens=6)
    two = world.submit((*known, 3, 4), "s0", max_tokens=6)
    copied = [copy for plan in world.plans for copy in plan.page_copies]
    while world.step():
        copied += [copy for plan in world.plans[-1:] for copy in plan.page_copies if copy not in copied]
    assert len({target for _, target in copied}) == 2  # each has a copy of its own of the one partial page
    assert len({source for source, _ in copied}) == 1
    world.run_to_end(one, two)
    assert report(world.clients[one]).resident_tokens == 21
    assert report(world.clients[two]).resident_tokens == 21


@pytest.mark.parametrize("lag", [0, 1])
def test_eight_forks_of_one_parked_session_with_the_first_cancelled(lag: int) -> None:
    world = World(config(lag=lag, n_pages=80, max_rows=8))
    prompt = to_disk(world)
    for i in range(8):
        world.feed(ev.ForkSession(world.now, "s0", f"f{i}"))
    turns = [world.submit((*prompt, i + 1), f"f{i}", max_tokens=5) for i in range(8)]
    reads = world.log["ReadChunk"] + world.log["ReadTail"]
    world.cancel(turns[0])
    world.run_to_end(*turns)
    ended = [world.clients[turn].ended for turn in turns]
    assert ended[0] is not None
    assert ended[0].reason is EndReason.CANCELLED
    for turn in turns[1:]:
        assert report(world.clients[turn]).disk_tokens + report(world.clients[turn]).resident_tokens >= 32
    assert reads <= 5  # one read of each chunk, by whoever came first; the others attached
    assert world.log["ReadChunk"] <= 5
    world.settle()
    world.assert_quiet()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_restore_that_fails_half_way_is_used_up_to_there(bad: int) -> None:
    world = World(config(n_pages=40, staging_slots=3))
    prompt = to_disk(world)
    turn = world.submit(prompt, "s0", max_tokens=4)
    world.job("read_record")
    for number in range(4):
        world.job("read", "payload" if number == bad else "", 0)
        world.copy(True)
    world.run_to_end(turn)
    got = report(world.clients[turn])
    assert got.disk_tokens == 8 * bad
    assert got.computed_tokens == len(prompt) - 8 * bad
    assert got.lost["payload"] > 0
    assert got.lost.get("evicted", 0) == 0
    world.settle()
    world.assert_quiet()


def test_other_askers_of_a_failed_restore_match_again() -> None:
    world = World(config(n_pages=60))
    prompt = to_disk(world)
    one = world.submit((*prompt, 1), "a", max_tokens=4)
    two = world.submit((*prompt, 2), "b", max_tokens=4)
    assert world.core.statistics().turns["restoring"] == 2
    world.job("read", "io")
    turns = world.core.statistics().turns
    assert turns["prefilling"] >= 1  # the oldest recomputes; the younger was queued, matched and admitted again
    world.run_to_end(one, two)
    world.settle()
    world.assert_quiet()


def test_the_client_goes_during_a_restore_and_the_read_comes_late() -> None:
    world = World(config(n_pages=40))
    prompt = to_disk(world)
    turn = world.submit(prompt, "s0", max_tokens=4)
    world.job("read_record")
    assert world.jobs("read")
    assert world.store is not None
    world.store.cancel = lambda job: None  # type: ignore[method-assign]  # the reads have begun: the wish comes too late
    world.cancel(turn)
    assert world.core.statistics().pages.free == 39
    while world.job("read"):
        pass
    world.assert_quiet()


def test_the_client_goes_during_a_spill() -> None:
    world = World(config(ram_slots=6), disk=False)
    fill(world, 2)
    turn = world.submit(history(9, 40), "s9", max_tokens=4)
    assert world.copies(inward=False)
    world.cancel(turn)
    world.settle()
    world.assert_quiet()
    assert counters(world)["spilled_chunks"] > 0


def test_a_turn_that_returns_in_mid_spill_keeps_its_pages() -> None:
    world = World(config(ram_slots=6, n_pages=25), disk=False)
    first = fill(world, 2)[0]
    big = world.submit(history(9, 44), "s9", max_tokens=2)
    assert world.copies(inward=False)
    world.cancel(big)
    back = world.submit(first.spec.prompt + tuple(first.ids) + (5,), "s0", max_tokens=2)
    world.run_to_end(back)
    assert report(world.clients[back]).resident_tokens > 0
    world.settle()
    world.assert_quiet()


def test_a_dropped_victim_is_counted_after_fifty_milliseconds() -> None:
    """RAM is full, the disk takes writes but does not answer: the victim waits 50 ms, then its KV is given up."""
    world = World(config(ram_slots=1, n_pages=20))
    fill(world, 1, 24)
    turn = world.submit(history(9, 60), "s9", max_tokens=2)
    while world.step() or world.copy(False) or world.copy(True):
        pass
    assert counters(world)["dropped_chunks"] == 0
    assert not world.clients[turn].ended
    world.tick(0.06)
    assert counters(world)["dropped_chunks"] > 0
    while world.step() or world.copy(False) or world.copy(True) or (not world.clients[turn].ended and world.tick()):
        pass
    assert world.clients[turn].ended


def test_a_restore_behind_a_hung_disk_ends_at_its_deadline() -> None:
    world = World(config(n_pages=40))
    prompt = to_disk(world)
    turn = world.submit(prompt, "s0", max_tokens=4)
    while not world.clients[turn].ended:
        assert world.step() or world.copy(True) or world.tick()
    got = report(world.clients[turn])
    assert got.computed_tokens == len(prompt)
    assert got.lost["deadline"] > 0
    assert world.now >= world.config.restore_deadline_s


def test_losing_the_last_copy_drops_what_descends_from_it() -> None:
    world = World(config(ram_slots=8, n_pages=25), disk=False)
    fill(world, 5)
    board = world.core._board
    in_ram = [c for c in board.chunks if c.slot is not None and c.node is None]
    chunk, child = next((c, k) for c in in_ram for k in c.children.values() if k.slot is not None)
    board.chunks.drop_slot(chunk)
    assert child.slot is None
    assert board.chunks.get(child.key) is None
    world.core.check()


def test_every_turn_touches_its_whole_chain_on_disk() -> None:
    world = World(config(n_pages=60))
    prompt = to_disk(world)
    world.ask(prompt, "s0", max_tokens=2)
    before = world.log["TouchDisk"]
    world.ask(prompt, "s0", max_tokens=2)  # served from the device
    touched = [c for c in world.commands if type(c).__name__ == "TouchDisk"]
    assert world.log["TouchDisk"] == before + 1
    assert len(touched[-1].keys) >= 4


def test_two_turns_are_brought_the_same_tail() -> None:
    """Both asked which tail the disk has; whoever is done first must not make the core forget the other's transfer."""
    world = World(config(n_pages=60, staging_slots=3))
    client = world.ask(history(0, 21), "s0", max_tokens=3, ignore_eos=True)
    world.feed(ev.BeginDrain(world.now, world.now + 1000.0))
    world.settle()
    world.kill()
    turns = [world.submit((*client.spec.prompt[:19], 90 + i, 96), f"t{i}", max_tokens=3) for i in range(2)]
    world.run_to_end(*turns)
    assert world.log["ReadTail"] == 2
    assert [report(world.clients[turn]).disk_tokens for turn in turns] == [19, 19]
    world.settle()
    world.assert_quiet()
