"""What a session remembers of its lines of history, who may forget it, and what closing and forking do to the KV below."""

from __future__ import annotations

import random

import pytest
from kvalet.runtime.plan import SamplingParams
from kvalet.sched import events as ev
from kvalet.sched.calls import DECODED, allowed_below, calls_of, next_piece, piece_code
from kvalet.sched.session import MAX_BRANCHES, Branch, Session, Turn
from kvalet.sched.session_book import SessionBook
from kvalet.sched.turns import EndReason, TurnId, TurnReport, TurnSpec
from schedworld import SECRET, World, config

OTHER = b"o" * 32


def words(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 37 + i * 11) % 90 + 1 for i in range(length))


def spec(prompt: tuple[int, ...], session: str = "", tenant: str = "", secret: bytes = SECRET) -> TurnSpec:
    return TurnSpec(TurnId(1), prompt, SamplingParams(), secret, session, tenant)


def branch(ids: tuple[int, ...], boundary: int, secret: bytes = SECRET) -> Branch:
    return Branch(ids, boundary, len(ids), secret)


def report(world: World, turn: TurnId) -> TurnReport:
    ended = world.clients[turn].ended
    assert ended is not None
    return ended.report


# the book


def test_the_same_name_of_two_tenants_is_two_sessions() -> None:
    book = SessionBook(9)
    one = book.open(spec((1, 2), "a", "x"))
    assert book.open(spec((5, 6), "a", "x")) is one
    assert book.open(spec((1, 2), "a", "y")) is not one
    assert len(book) == 2


def test_the_nearest_branch_is_the_longest_shared_one_then_the_latest_and_never_another_tenants() -> None:
    session = Session("", "a")
    far, near, twin = branch((1, 2, 9), 2), branch((1, 2, 3, 4), 2), branch((1, 2, 3, 4), 3)
    for line in (near, far, twin, branch((1, 2, 3, 4, 5), 2, OTHER)):
        session.extend(None, line)
    assert session.nearest((1, 2, 3, 4, 5), SECRET) == (twin, 4)
    assert session.nearest((1, 2, 9, 9), SECRET) == (far, 3)
    assert session.nearest((1, 2), b"z" * 32) is None


def test_a_session_keeps_its_latest_branches_and_a_longer_line_takes_the_old_ones_place() -> None:
    session = Session("", "a")
    lines = [branch((i,), 1) for i in range(MAX_BRANCHES + 3)]
    for line in lines:
        session.extend(None, line)
    assert session.branches == lines[3:]
    longer = branch((5, 6), 1)
    session.extend(lines[5], longer)
    assert len(session.branches) == MAX_BRANCHES
    assert lines[5] not in session.branches
    assert session.branches[-1] is longer


def test_the_least_recently_used_session_without_turns_is_forgotten_for_a_new_one() -> None:
    book = SessionBook(2)
    one, two = (book.open(spec((1,), name)) for name in "ab")
    assert one is not None
    assert two is not None
    book.open(spec((1,), "a"))  # used again: b is the oldest now
    assert book.open(spec((1,), "c")) is not None
    assert book.find("", "b") is None
    assert book.find("", "a") is one
    one.turns.add(TurnId(7))
    third = book.find("", "c")
    assert third is not None
    third.turns.add(TurnId(8))
    assert book.open(spec((1,), "d")) is None
    assert not book.fork(one, "", "d")
    assert len(book) == 2


def test_a_nameless_session_is_found_by_the_longest_boundary_its_prompt_begins_with() -> None:
    book = SessionBook(9)
    short, long = (book.open(spec(words(n, 2))) for n in (1, 2))
    assert short is not None
    assert long is not None
    book.ended(short, None, branch((1, 2, 3, 30), 3))
    book.ended(long, None, branch((1, 2, 3, 4, 5, 50), 5))
    assert book.open(spec((1, 2, 3, 4, 5, 50, 6))) is long
    assert book.open(spec((1, 2, 3, 30, 7))) is short
    assert book.open(spec((1, 2, 3, 4, 9))) is short
    strangers = [book.open(spec((1, 2))), book.open(spec((1, 2, 3, 30), secret=OTHER))]
    assert short not in strangers
    assert long not in strangers


def test_what_a_forgotten_nameless_session_began_with_is_not_recognised_any_more() -> None:
    book = SessionBook(1)
    one = book.open(spec((1, 2)))
    assert one is not None
    book.ended(one, None, branch((1, 2, 3), 2))
    assert book.open(spec((8, 9), "named")) is not None
    assert len(book) == 1
    again = book.open(spec((1, 2, 3)))
    assert again is not one
    assert again is not None
    assert again.branches == []


# closing and forking, through the core


def test_a_fork_goes_on_from_its_parents_history_and_each_keeps_its_own_line() -> None:
    world = World(config(n_pages=60))
    first = world.ask(words(1, 16), "p", max_tokens=6, ignore_eos=True)
    history = first.spec.prompt + tuple(first.ids)
    world.feed(ev.ForkSession(world.now, "p", "c"))
    assert world.core.statistics().sessions == 2
    turns = [world.submit((*history, 80 + i), name, max_tokens=2) for i, name in enumerate("pc")]
    world.run_to_end(*turns)
    for turn in turns:
        assert report(world, turn).diverged_at == -1
        assert report(world, turn).resident_tokens == 21
    lines = [world.core._board.sessions.find("", name) for name in "pc"]
    assert [line.branches[-1].ids[22] for line in lines if line] == [80, 81]
    world.settle()
    world.assert_quiet()


def test_a_fork_of_nobody_and_a_close_of_nobody_change_nothing() -> None:
    world = World(config())
    world.feed(ev.ForkSession(world.now, "nobody", "c"))
    world.feed(ev.CloseSession(world.now, "nobody"))
    assert world.core.statistics().sessions == 0


def test_closing_ends_every_turn_of_that_session_only_and_says_why() -> None:
    world = World(config(n_pages=60))
    mine = [world.submit(words(i, 10), "a", max_tokens=20, ignore_eos=True) for i in range(3)]
    other = world.submit(words(9, 10), "b", max_tokens=3)
    world.step()
    world.feed(ev.CloseSession(world.now, "a"))
    ends = [world.clients[turn].ended for turn in mine]
    assert [(end.reason, end.message) for end in ends if end] == [(EndReason.CANCELLED, "its session was closed")] * 3
    assert world.clients[other].ended is None
    world.run_to_end(other)
    world.settle()
    world.assert_quiet()


@pytest.mark.parametrize("forked", [False, True])
def test_a_closed_sessions_pages_leave_first_unless_a_fork_still_claims_them(forked: bool) -> None:
    world = World(config(n_pages=25, ram_slots=0, staging_slots=0), disk=False)
    world.now = 1.0
    world.ask(words(1, 24), "old", max_tokens=1)
    world.now += 1.0
    world.ask(words(2, 24), "new", max_tokens=1)
    if forked:
        world.feed(ev.ForkSession(world.now, "new", "child"))
    world.feed(ev.CloseSession(world.now, "new"))
    world.now += 1.0
    world.ask(words(3, 60), "big", max_tokens=1)
    index = world.core._board.index
    old, new = (len(index.walk(index.root(SECRET), words(i, 24), 24)) for i in (1, 2))
    assert (old, new) == ((2, 6) if forked else (6, 2))


def test_a_turn_that_is_cancelled_before_its_prompt_is_through_leaves_no_history() -> None:
    world = World(config(n_pages=60))
    turn = world.submit(words(1, 40), "a", max_tokens=4)
    world.step()
    world.cancel(turn)
    session = world.core._board.sessions.find("", "a")
    assert session is not None
    assert session.branches == []
    back = world.ask(words(1, 40), "a", max_tokens=1)
    assert back.ended is not None
    assert back.ended.report.resident_tokens == 24  # what the step computed stays cached all the same


def test_divergence_is_where_the_prompt_leaves_the_nearest_line() -> None:
    world = World(config(n_pages=100))
    first = world.ask(words(1, 12), "a", max_tokens=6, ignore_eos=True)
    same = world.ask(words(1, 12), "a", max_tokens=1)
    shorter = world.ask(words(1, 9), "a", max_tokens=1)
    early = world.ask((*words(1, 5), 95, 96), "a", max_tokens=1)
    grown = world.ask(words(1, 12) + tuple(first.ids) + (7,), "a", max_tokens=1)
    alien = world.ask((7, *words(2, 9)), "a", max_tokens=1)
    asked = (first, same, shorter, early, grown, alien)
    assert [c.ended.report.diverged_at for c in asked if c.ended] == [-1, -1, -1, 5, -1, -1]
    assert world.core.statistics().counters["diverged_turns"] == 1


# deterministic mode: which call computes what


def turn_of(prompt: int, decoded: list[tuple[int, int]], answer: int = 0) -> Turn:
    request = spec(words(1, prompt))
    turn = Turn(request, Session("", ""), request.params, 0.0, list(words(1, prompt + answer)))
    turn.decoded = decoded
    turn.feed_end = prompt + answer
    return turn


def test_codes_name_the_piece_up_to_the_next_multiple_or_to_where_decoding_began() -> None:
    codes = calls_of(turn_of(14, [(5, 7)], answer=2), 8)
    first, second, third = piece_code(0, 5), piece_code(7, 8), piece_code(8, 14)
    assert codes == (first,) * 5 + (DECODED,) * 2 + (second,) + (third,) * 6 + (DECODED,) * 2


@pytest.mark.parametrize("seed", range(20))
def test_pieces_that_are_fed_are_those_that_the_codes_name(seed: int) -> None:
    """``next_piece`` (what is done) and ``calls_of`` (what pages are keyed by) are two tellings of the same calls; a
    match may end after each decoded token and at each multiple."""
    rng = random.Random(seed)
    at, decoded = 0, []
    for _ in range(rng.randint(0, 4)):
        start = at + rng.randint(1, 12)
        at = start + rng.randint(0, 5)
        decoded.append((start, at))
    turn = turn_of(at + rng.randint(1, 20), decoded, rng.randint(0, 4))
    codes: list[int] = []
    while turn.fed < turn.feed_end:
        n, decode = next_piece(turn, 8)
        assert n >= 1
        codes += [DECODED] * n if decode else [piece_code(turn.fed, turn.fed + n)] * n
        turn.fed += n
        if decode or turn.fed % 8 == 0:
            assert allowed_below(turn, turn.fed, 8) == turn.fed, f"seed {seed}"
    assert tuple(codes) == calls_of(turn, 8), f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
def test_an_allowed_end_equals_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    turn = turn_of(40, [(9, 11), (20, 20), (29, 33)], answer=3)
    free = {at for start, end in (*turn.decoded, (40, 43)) for at in range(start, end + 1)}
    upto = rng.randint(0, 50)
    assert allowed_below(turn, upto, 8) == max(at for at in range(upto + 1) if at % 8 == 0 or at in free), f"seed {seed}"
