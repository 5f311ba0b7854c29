"""Named scripts of a turn's way: admission, preemption, cancelling at every stage, slow readers, the end of everything."""

from __future__ import annotations

import pytest
from kvalet.runtime.plan import GrammarSpec
from kvalet.sched import events as ev
from kvalet.sched.turns import EndReason, Refusal
from schedworld import World, config


def words(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 37 + i * 11) % 90 + 1 for i in range(length))


def reason(world: World, turn: int) -> EndReason:
    ended = world.clients[turn].ended  # type: ignore[index]
    assert ended is not None
    return ended.reason


@pytest.mark.parametrize("lag", [0, 1])
def test_two_sessions_room_one_slot_full_disk_eight_growing_decodes_all_finish(lag: int) -> None:
    world = World(config(lag=lag, n_pages=21, ram_slots=1, staging_slots=1, max_rows=8))
    assert world.store is not None
    world.store.full = True
    turns = [world.submit(words(i, 8), f"s{i}", max_tokens=32, ignore_eos=True) for i in range(8)]
    world.run_to_end(*turns)
    assert {reason(world, turn) for turn in turns} == {EndReason.LENGTH}
    reports = [world.clients[turn].ended.report for turn in turns]  # type: ignore[union-attr]
    assert max(r.preemptions for r in reports) <= world.config.max_preemptions + 1
    assert sum(r.recomputed_tokens for r in reports) > 0
    assert reports[0].preemptions == 0  # the oldest is never preempted
    world.settle()
    world.assert_quiet()


def test_pool_of_the_minimum_size() -> None:
    """One page of prompt and one of growth."""
    world = World(config(n_pages=3, ram_slots=0, staging_slots=0), disk=False)
    for length in (1, 3, 4):
        client = world.ask(words(length, length), max_tokens=20, ignore_eos=True)
        assert client.ended is not None
        assert client.ended.reason is EndReason.LENGTH
        assert len(client.ids) == 9 - length  # 8 positions can hold KV, the last token needs none
    world.settle()
    world.assert_quiet()


def test_a_request_that_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    """P34: pool of 64 pages, context 8192; 1,500 tokens are refused; ten short ones are served; 900 + 400 ends by length."""
    world = World(
        config(page_tokens=16, chunk_tokens=64, n_pages=65, context_tokens=8192, step_tokens=272, idle_step_tokens=512)
    )
    big = world.submit(words(1, 1500))
    assert world.clients[big].refusal is Refusal.NEVER_FITS
    short = [world.submit(words(i, 20), max_tokens=5) for i in range(2, 12)]
    world.run_to_end(*short)
    outgrowing = world.ask(words(50, 900), max_tokens=400, ignore_eos=True)
    assert outgrowing.ended is not None
    assert outgrowing.ended.reason is EndReason.LENGTH
    assert len(outgrowing.ids) == 1024 - 900 + 1
    assert outgrowing.ended.report.preemptions == 0


@pytest.mark.parametrize(
    ("length", "refusal"),
    [(0, Refusal.NEVER_FITS), (96, None), (97, Refusal.NEVER_FITS)],
)
def test_what_is_refused_as_never_fitting(length: int, refusal: Refusal | None) -> None:
    world = World(config(n_pages=26, context_tokens=400))
    turn = world.submit(words(1, length))
    assert world.clients[turn].refusal is refusal


def test_the_context_leaves_room_for_one_token() -> None:
    world = World(config(context_tokens=10))
    assert world.clients[world.submit(words(1, 10))].refusal is Refusal.NEVER_FITS
    client = world.ask(words(1, 9), max_tokens=50, ignore_eos=True)
    assert len(client.ids) == 1


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    world = World(config(queue_limit=2, max_rows=1, n_pages=9, ram_slots=0))
    turns = [world.submit(words(i, 20), max_tokens=4) for i in range(5)]
    refused = [turn for turn in turns if world.clients[turn].refusal is Refusal.QUEUE_FULL]
    assert refused == turns[3:]
    refusals = [c for c in world.commands if type(c).__name__ == "Refuse"]
    assert all(r.retry_after_s > 0 for r in refusals)
    world.run_to_end(*turns[:3])


def test_small_ones_pass_a_big_one_a_bounded_number_of_times() -> None:
    """P36: the big one that does not fit now is passed by small ones, and gets in all the same."""
    world = World(config(n_pages=33, max_rows=4, ram_slots=0, staging_slots=0), disk=False)
    holder = world.submit(words(1, 60), max_tokens=30, ignore_eos=True)
    big = world.submit(words(2, 100), max_tokens=4)
    small = [world.submit(words(i, 6), max_tokens=12, ignore_eos=True) for i in range(3, 40)]
    order: list[int] = []
    while len(order) < 39:
        assert world.advance()
        order += [t for t, c in world.clients.items() if c.ended and t not in order]
    ended_before = [t for t in small if order.index(t) < order.index(big)]
    assert 1 <= len(ended_before) <= 8 + world.config.max_rows * 2
    assert holder in order


def test_long_prompts_do_not_stop_a_decode() -> None:
    """P36: while long prompts come in, a running decode gets its token in every step."""
    world = World(config(n_pages=200, context_tokens=1000, step_tokens=16))
    runner = world.submit(words(1, 4), max_tokens=40, ignore_eos=True)
    world.step()
    for i in range(3):
        world.submit(words(10 + i, 150), max_tokens=2)
    for _ in range(30):
        before = len(world.clients[runner].ids)
        world.step()
        assert len(world.clients[runner].ids) == before + 1


def test_p35_scaled_pool_for_two_sessions_eight_agents_slow_spills() -> None:
    """Something is finished or a token is made in every bounded stretch of events; preemptions stay few."""
    world = World(config(n_pages=31, ram_slots=3, max_rows=8))
    histories = {i: words(i, 12) for i in range(8)}
    running = {i: world.submit(histories[i], f"s{i}", max_tokens=6) for i in range(8)}
    rounds = dict.fromkeys(range(8), 0)
    quiet = made = 0
    while running:
        slow = world.n_events % 3 == 0  # copies and writes are late
        assert world.step() or (slow and (world.copy(False) or world.job("write"))) or world.advance()
        total = sum(len(c.ids) for c in world.clients.values())
        quiet = 0 if total > made else quiet + 1
        made = total
        assert quiet < 200, "no token in 200 events"
        for i, turn in list(running.items()):
            client = world.clients[turn]
            if client.ended is None:
                continue
            assert client.ended.report.preemptions <= 6
            rounds[i] += 1
            del running[i]
            if rounds[i] < 6:
                histories[i] = client.spec.prompt + tuple(client.ids) + (i + 1, 2)
                running[i] = world.submit(histories[i], f"s{i}", max_tokens=6)
    world.settle()
    world.assert_quiet()


@pytest.mark.parametrize("length", [3, 4, 5, 8, 32])
@pytest.mark.parametrize("max_tokens", [1, 16])
@pytest.mark.parametrize("where", ["device", "disk"])
def test_p25_the_same_prompt_twice(length: int, max_tokens: int, where: str) -> None:
    """Prompts at page edges: the wholly cached prompt feeds its last token and answers the same."""
    world = World(config(n_pages=60))
    prompt = words(3, length)
    first = world.ask(prompt, "a", max_tokens=max_tokens, ignore_eos=True)
    if where == "disk":
        world.feed(ev.BeginDrain(world.now, world.now + 1000.0))
        world.settle()
        world.kill()
    second = world.ask(prompt, "a", max_tokens=max_tokens, ignore_eos=True)
    assert second.ids == first.ids
    assert second.ended is not None
    # after a restart nothing says whose the longer tails before the first chunk are: they are not asked for
    short_tail = where == "disk" and length < 8
    cached = second.ended.report.cached_tokens
    assert cached == length - 1 or (short_tail and max_tokens > 1)
    third = world.ask(prompt + tuple(first.ids) + (9,), "a", max_tokens=2)
    assert third.ended is not None
    assert third.ended.report.cached_tokens >= length


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_while_its_step_runs(lag: int, steps: int) -> None:
    world = World(config(lag=lag))
    turn = world.submit(words(1, 20), max_tokens=20, ignore_eos=True)
    for _ in range(steps):
        world.step()
    assert world.plans
    world.cancel(turn)
    assert reason(world, turn) is EndReason.CANCELLED
    other = world.submit(words(2, 60), max_tokens=4)
    world.run_to_end(other)
    world.settle()
    world.assert_quiet()


def test_surplus_token_of_an_ended_row_enters_nothing() -> None:
    """lag 1: the row is fed once more after its stop; the offset is its own, and no page key covers it."""
    world = World(config(lag=1))
    client = world.ask(words(1, 6), "a", max_tokens=30)
    assert reason(world, client.spec.turn) in (EndReason.STOP, EndReason.LENGTH)
    world.settle()
    ends = [node.end for node in world.core._board.index.nodes()]
    assert max(ends) <= 6 + len(client.ids) - 1
    world.assert_quiet()


def test_a_slow_reader_is_paused_and_the_first_to_spill() -> None:
    world = World(config(n_pages=25, ram_slots=8), disk=False)
    old = world.ask(words(5, 20), "old", max_tokens=2)
    slow = world.submit(words(1, 20), "slow", max_tokens=30, ignore_eos=True)
    world.step()
    world.step()
    world.block(slow)
    assert world.core.statistics().turns["paused"] == 1
    had = len(world.clients[slow].ids)
    big = world.submit(words(2, 44), "big", max_tokens=4)
    world.run_to_end(big)
    assert len(world.clients[slow].ids) <= had + world.config.lag + 1
    assert world.core.statistics().turns == {"queued": 1, "restoring": 0, "prefilling": 0, "decoding": 0, "paused": 0}
    back = world.ask((*old.spec.prompt, 4), "old", max_tokens=2)
    assert back.ended is not None
    assert back.ended.report.resident_tokens > 0  # older, but its reader reads
    world.unblock(slow)
    world.run_to_end(slow)
    assert reason(world, slow) is EndReason.LENGTH


def test_grammar_dead_end_and_forced_runs() -> None:
    world = World(config(lag=0))
    dead = world.ask(words(1, 9), max_tokens=20, grammar=GrammarSpec("fake", "dead 3"), ignore_eos=True)
    assert reason(world, dead.spec.turn) is EndReason.GRAMMAR
    assert len(dead.ids) == 3
    forced = world.submit(words(1, 9), max_tokens=12, grammar=GrammarSpec("fake", "run 3"), ignore_eos=True)
    sizes = set()
    while world.clients[forced].ended is None:
        sizes |= {row.n for plan in world.plans for row in plan.rows if row.decode}
        assert world.advance()
    assert sizes == {3}
    world.settle()
    world.assert_quiet()


def test_stop_strings_bound_what_may_be_reused() -> None:
    world = World(config())
    plain = world.ask(words(1, 9), max_tokens=8, ignore_eos=True)
    stop = f"{plain.ids[4]} {plain.ids[5]}"
    client = world.ask(words(1, 9), "a", max_tokens=8, ignore_eos=True, stop=(stop,))
    assert reason(world, client.spec.turn) is EndReason.STOP
    assert stop not in client.text
    branch = world.core._board.sessions.find("", "a").branches[-1]  # type: ignore[union-attr]
    assert branch.ids == words(1, 9) + tuple(plain.ids[:4])


def test_closing_a_session_ends_its_turns_and_keeps_shared_pages() -> None:
    world = World(config(n_pages=60))
    world.ask(words(1, 20), "a", max_tokens=2)
    turn = world.submit((*words(1, 20), 1, 2), "a", max_tokens=30, ignore_eos=True)
    world.feed(ev.CloseSession(world.now, "a"))
    assert reason(world, turn) is EndReason.CANCELLED
    other = world.ask((*words(1, 20), 3), "b", max_tokens=2)
    assert other.ended is not None
    assert other.ended.report.resident_tokens >= 16


@pytest.mark.parametrize("lag", [0, 1])
def test_a_lost_device_ends_every_turn_once_and_ram_still_drains(lag: int) -> None:
    world = World(config(lag=lag, n_pages=25, ram_slots=8))
    for i in range(3):
        world.ask(words(i, 30), f"s{i}", max_tokens=2)
    turns = [world.submit(words(9 + i, 12), f"t{i}", max_tokens=20) for i in range(4)]
    world.step()
    world.fail_device()
    assert {reason(world, turn) for turn in turns} == {EndReason.DEVICE_ERROR}
    refused = world.submit(words(1, 5))
    assert world.clients[refused].refusal is Refusal.DEVICE_LOST
    world.feed(ev.BeginDrain(world.now, world.now + 100.0))
    world.settle()
    assert len(world.drained) == 1
    world.assert_quiet()


def test_a_drain_lets_turns_finish_then_writes_all_and_refuses_new_ones() -> None:
    world = World(config(n_pages=60, ram_slots=4))
    clients = [world.ask(words(i, 21), f"s{i}", max_tokens=4, ignore_eos=True) for i in range(3)]
    running = world.submit(words(7, 10), "r", max_tokens=10)
    world.feed(ev.BeginDrain(world.now, world.now + 100.0))
    assert world.clients[world.submit(words(8, 5))].refusal is Refusal.CLOSING
    world.settle()
    assert reason(world, running) in (EndReason.STOP, EndReason.LENGTH)
    assert world.drained == [0]
    world.assert_quiet()
    world.kill()
    back = world.ask(clients[0].spec.prompt + tuple(clients[0].ids) + (1,), "s0", max_tokens=2)
    assert back.ended is not None
    assert back.ended.report.disk_tokens == 24


def test_a_drain_ends_what_still_runs_at_its_deadline() -> None:
    world = World(config(n_pages=60))
    turn = world.submit(words(1, 10), max_tokens=200, ignore_eos=True)
    world.feed(ev.BeginDrain(world.now, world.now + 5.0))
    world.step()
    world.tick()
    assert reason(world, turn) is EndReason.SHUTDOWN
    assert len(world.drained) == 1
    assert world.drained[0] > 0


def test_another_tenants_pages_are_never_seen() -> None:
    world = World(config(n_pages=60))
    world.ask(words(1, 30), "a", max_tokens=2)
    turn = world.submit(words(1, 30), "a", secret=b"o" * 32, max_tokens=2)
    world.run_to_end(turn)
    ended = world.clients[turn].ended
    assert ended is not None
    assert ended.report.cached_tokens == 0


def test_a_session_without_a_name_is_recognised_by_its_boundary() -> None:
    world = World(config(n_pages=60))
    first = world.ask(words(1, 12), max_tokens=4, ignore_eos=True)
    world.ask(words(1, 12) + tuple(first.ids) + (4, 5), max_tokens=2)
    assert world.core.statistics().sessions == 1
    other = world.ask((*words(1, 11), 91, 92), max_tokens=2)
    assert world.core.statistics().sessions == 2
    assert other.ended is not None
    assert other.ended.report.diverged_at == -1


def test_divergence_is_reported() -> None:
    world = World(config(n_pages=60))
    first = world.ask(words(1, 12), "a", max_tokens=6, ignore_eos=True)
    changed = world.ask((*words(1, 12), first.ids[0], 95, 96), "a", max_tokens=2)
    assert changed.ended is not None
    assert changed.ended.report.diverged_at == 13
    assert changed.ended.report.resident_tokens == 13
