"""Who is let in, what a refusal says, and how much room a turn that was preempted needs to come back."""

from __future__ import annotations

import pytest
from kvalet.runtime.plan import SamplingParams
from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.board import Board
from kvalet.sched.matching import Match, pages_needed
from kvalet.sched.session import Session, Turn
from kvalet.sched.turns import EndReason, Refusal, TurnId, TurnSpec
from schedworld import SECRET, Client, NoDisk, World, config


def words(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 41 + i * 13) % 90 + 1 for i in range(length))


def refusal(world: World, prompt: tuple[int, ...], session: str = "") -> cmd.Refuse:
    turn = world.submit(prompt, session)
    answer = world.commands[-1]
    assert isinstance(answer, cmd.Refuse)
    assert answer.turn == turn
    return answer


def test_every_refusal_names_its_numbers_and_only_a_passing_one_says_when_to_come_back() -> None:
    world = World(config(n_pages=11, context_tokens=39, queue_limit=1, max_rows=1))
    empty, context, pool = (refusal(world, words(1, n)) for n in (0, 39, 38))
    assert {r.refusal for r in (empty, context, pool)} == {Refusal.NEVER_FITS}
    assert "empty" in empty.message
    assert "39 tokens" in context.message
    assert "context 39" in context.message
    assert "needs 11 pages" in pool.message
    assert "pool has 10" in pool.message
    running = [world.submit(words(i, 30), max_tokens=2) for i in (2, 3)]
    full = refusal(world, words(4, 4))
    assert full.refusal is Refusal.QUEUE_FULL
    assert full.message.startswith("1 turns")
    assert [r.retry_after_s > 0 for r in (empty, context, pool, full)] == [False, False, False, True]
    assert world.core.statistics().counters["refused"] == 4
    assert world.core.statistics().counters["accepted"] == 2
    world.run_to_end(*running)


def test_what_never_fits_is_said_even_when_the_queue_is_full() -> None:
    """A client that comes back later with it would be refused again: it must not be told to wait."""
    world = World(config(n_pages=11, queue_limit=1, max_rows=1))
    turns = [world.submit(words(i, 30), max_tokens=2) for i in (2, 3)]
    assert refusal(world, words(1, 60)).refusal is Refusal.NEVER_FITS
    world.run_to_end(*turns)


def test_a_refused_turn_opens_no_session_and_leaves_nothing() -> None:
    world = World(config())
    refusal(world, (), "nobody")
    assert world.core.statistics().sessions == 0
    world.assert_quiet()


def test_sessions_that_all_have_turns_refuse_another_and_a_known_one_still_gets_in() -> None:
    world = World(config(max_sessions=2, n_pages=60))
    turns = [world.submit(words(i, 12), f"s{i}", max_tokens=6) for i in range(2)]
    full = refusal(world, words(3, 12), "s2")
    assert full.refusal is Refusal.SESSIONS_FULL
    assert full.message.startswith("2 sessions")
    assert full.retry_after_s > 0
    turns.append(world.submit(words(4, 12), "s1", max_tokens=2))
    world.run_to_end(*turns)
    world.ask(words(3, 12), "s2", max_tokens=2)
    assert world.core.statistics().sessions == 2


def test_closing_comes_before_everything_that_a_prompt_may_lack() -> None:
    world = World(config())
    world.feed(ev.BeginDrain(world.now, world.now + 10.0))
    assert refusal(world, ()).refusal is Refusal.CLOSING


def waiting(n_prompt: int, *, preemptions: int = 0, max_tokens: int = 200) -> Turn:
    spec = TurnSpec(TurnId(1), words(1, n_prompt), SamplingParams(max_tokens=max_tokens), SECRET)
    turn = Turn(spec, Session("", ""), spec.params, 0.0, list(spec.prompt))
    turn.preemptions = preemptions
    return turn


def test_a_new_turn_reserves_its_prompt_and_one_page_but_never_more_than_it_can_feed() -> None:
    board = Board(config(n_pages=101), NoDisk())
    root = board.index.root(SECRET)
    assert pages_needed(board, waiting(9), Match(root, [])) == 4
    assert pages_needed(board, waiting(8), Match(root, [])) == 3
    assert pages_needed(board, waiting(8, max_tokens=1), Match(root, [])) == 2  # the last token is never fed


@pytest.mark.parametrize("n", range(1, 6))
def test_readmission_asks_for_two_to_the_n_more_pages(n: int) -> None:
    board = Board(config(n_pages=101), NoDisk())
    match = Match(board.index.root(SECRET), [])
    first = pages_needed(board, waiting(9), match)
    turn = waiting(9, preemptions=n)
    assert pages_needed(board, turn, match) == first + 2**n
    turn.older_ended = True  # an older one has made room: as at first
    assert pages_needed(board, turn, match) == first


def test_readmission_never_asks_for_more_than_the_pool_has() -> None:
    board = Board(config(n_pages=21), NoDisk())
    turn = waiting(9, preemptions=9)
    assert pages_needed(board, turn, Match(board.index.root(SECRET), [])) == 20


def client_of(world: World, turn: TurnId) -> Client:
    return world.clients[turn]


def test_the_newest_goes_the_oldest_never_and_both_end() -> None:
    world = World(config(n_pages=11, ram_slots=0, staging_slots=0), disk=False)
    old, new = (world.submit(words(i, 8), f"s{i}", max_tokens=20, ignore_eos=True) for i in range(2))
    world.run_to_end(old, new)
    reports = [client_of(world, t).ended.report for t in (old, new)]  # type: ignore[union-attr]
    assert [r.preemptions > 0 for r in reports] == [False, True]
    assert world.core.statistics().counters["preemptions"] == reports[1].preemptions
    assert reports[1].recomputed_tokens > 0
    assert reports[1].computed_tokens == 8  # the first admission's; what was done again is beside it
    world.settle()
    world.assert_quiet()


def test_a_turn_that_outgrows_an_empty_pool_ends_by_length_with_what_it_has() -> None:
    world = World(config(n_pages=6), disk=False)
    client = world.ask(words(1, 9), max_tokens=100, ignore_eos=True)
    assert client.ended is not None
    assert client.ended.reason is EndReason.LENGTH
    assert len(client.ids) == 5 * 4 - 9 + 1
    assert client.ended.report.preemptions == 0


def test_a_queued_turn_owns_and_leases_nothing() -> None:
    world = World(config(n_pages=11), disk=False)
    running = world.submit(words(1, 30), max_tokens=8, ignore_eos=True)
    before = world.core.statistics().pages
    waits = world.submit(words(2, 30), max_tokens=2)
    after = world.core.statistics()
    assert after.turns["queued"] == after.queue_length == 1
    assert after.pages == before
    world.cancel(waits)
    assert world.core.statistics().pages == before
    report = client_of(world, waits).ended.report  # type: ignore[union-attr]
    assert (report.computed_tokens, report.completion_tokens, report.prompt_tokens) == (0, 0, 30)
    world.run_to_end(running)


def test_a_cancel_that_comes_after_the_end_or_twice_changes_nothing() -> None:
    world = World(config())
    turn = world.submit(words(1, 9), max_tokens=30, ignore_eos=True)
    world.cancel(turn, EndReason.WRITE_TIMEOUT)
    world.cancel(turn)
    ended = client_of(world, turn).ended
    assert ended is not None
    assert ended.reason is EndReason.WRITE_TIMEOUT
    assert world.core.statistics().counters["ended"] == {"write_timeout": 1}
    world.settle()
    world.assert_quiet()
