"""Sessions without a name are recognised as a comparison with every branch would."""

from __future__ import annotations

import random
import time

import pytest
from kvalet.runtime.plan import SamplingParams
from kvalet.sched import prefix_names
from kvalet.sched.prefix_names import STRIDE, PrefixNames
from kvalet.sched.session import Branch, Session
from kvalet.sched.turns import TurnId, TurnSpec

SECRETS = (b"a" * 32, b"b" * 32)


def spec(prompt: tuple[int, ...], secret: bytes = SECRETS[0]) -> TurnSpec:
    return TurnSpec(TurnId(1), prompt, SamplingParams(), secret)


def plainly(sessions: list[Session], asked: TurnSpec) -> int:
    """The longest boundary that the prompt begins with; -1 if there is none."""
    return max(
        (
            branch.boundary
            for session in sessions
            for branch in session.branches
            if branch.secret == asked.secret and asked.prompt[: branch.boundary] == branch.ids[: branch.boundary]
        ),
        default=-1,
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_boundary_is_found(seed: int) -> None:
    rng = random.Random(seed)
    names, sessions = PrefixNames(), [Session("", "") for _ in range(12)]
    lines = [tuple(rng.randint(0, 1) for _ in range(4 * STRIDE)) for _ in range(3)]
    found = 0
    for _ in range(300):
        line = rng.choice(lines)
        action = rng.random()
        session = rng.choice(sessions)
        if action < 0.35:
            ids = line[: rng.randint(1, len(line))]
            session.extend(rng.choice([None, *session.branches]), Branch(ids, rng.randint(1, len(ids)), 0, rng.choice(SECRETS)))
            names.update(session)
        elif action < 0.42:
            names.forget(session)
            session.branches.clear()
        asked = spec(line[: rng.randint(1, len(line))], rng.choice(SECRETS))
        right = plainly(sessions, asked)
        session_or_none = names.find(asked)
        assert (session_or_none is None) == (right == -1)
        if session_or_none is not None:
            assert plainly([session_or_none], asked) == right
            found += 1
        assert len(names) == sum(len(s.branches) for s in sessions)
    assert found > 50
    for session in sessions:
        names.forget(session)
    assert (names._sessions, names._marks, names._names) == ({}, {}, {})


def test_of_two_sessions_that_begin_alike_the_later_one() -> None:
    names, ids = PrefixNames(), tuple(range(100))
    first, second = Session("", ""), Session("", "")
    for session in (first, second):
        session.extend(None, Branch(ids, 80, 0, SECRETS[0]))
        names.update(session)
    assert names.find(spec(ids)) is second
    names.update(first)
    assert names.find(spec(ids)) is first
    names.forget(first)
    assert names.find(spec(ids[:79])) is None


def test_the_number_of_tries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that are known behind the marks of a prompt and lead nowhere."""
    names = PrefixNames()
    prompt = tuple(range(10 * STRIDE))
    for length in range(STRIDE, 2 * STRIDE):
        session = Session("", "")
        session.extend(None, Branch((*prompt[: length - 1], 7_777), length, 0, SECRETS[0]))
        names.update(session)
    real = Session("", "")
    real.extend(None, Branch(prompt, STRIDE // 2, 0, SECRETS[0]))
    names.update(real)
    assert names.find(spec(prompt)) is real
    monkeypatch.setattr(prefix_names, "MAX_TRIES", 10)
    assert names.find(spec(prompt)) is None


def test_a_prompt_costs_the_same_however_many_lengths_are_known() -> None:
    """As CPU time within one run: a thousand lengths on other lines against none."""
    rng = random.Random(1)
    prompt = tuple(rng.choices(range(150_000), k=16_384))
    few, many = PrefixNames(), PrefixNames()
    for names, n in ((few, 1), (many, 1000)):
        for i in range(n):
            session = Session("", "")
            ids = tuple(rng.choices(range(150_000), k=50 + 3 * i))
            session.extend(None, Branch(ids, len(ids), 0, SECRETS[0]))
            names.update(session)

    def cost(names: PrefixNames) -> float:
        def once() -> float:
            began = time.process_time()
            assert names.find(spec(prompt)) is None
            return time.process_time() - began

        return min(once() for _ in range(15))

    assert cost(many) < 5 * cost(few) + 0.001
