"""Rule 11 in the core: whatever was evicted, restored, preempted or lost, the same calls compute the same positions.

The model here is shape sensitive: KV depends on the kind and bounds of the call that computed it. So equal answers on a
machine that holds everything and on one that is always short mean that the same calls were made.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from kvalet.runtime.fake_model import FakeModel
from kvalet.runtime.plan import Row
from kvalet.sched import calls
from kvalet.sched.turns import TurnId
from schedworld import World, config

SYSTEM = tuple(range(40, 60))


class Talker:
    """An agent whose prompts depend on its own seed and the answers only, never on timing."""

    def __init__(self, number: int, turns: int) -> None:
        self.rng = random.Random(number)
        self.name = f"agent{number}"
        self.history = SYSTEM + self._words()
        self.left = turns
        self.turn: TurnId | None = None
        self.answers: list[tuple[int, ...]] = []

    def _words(self) -> tuple[int, ...]:
        return tuple(self.rng.randint(1, 30) for _ in range(self.rng.randint(1, 7)))

    def act(self, world: World) -> None:
        if self.turn is not None:
            client = world.clients[self.turn]
            if client.ended is None:
                return
            self.answers.append(tuple(client.ids))
            self.turn = None
            answer = tuple(client.ids)
            if self.rng.random() < 0.3:
                answer = answer[: self.rng.randint(0, len(answer))]
            self.history = client.spec.prompt + answer + self._words()
        if self.left:
            self.left -= 1
            self.turn = world.submit(self.history, self.name, max_tokens=self.rng.randint(1, 9), ignore_eos=True)


def converse(world: World, seed: int, faults: float) -> list[list[tuple[int, ...]]]:
    rng = random.Random(seed)
    talkers = [Talker(i, 5) for i in range(6)]
    while any(t.left or t.turn is not None for t in talkers):
        rng.choice(talkers).act(world)
        for _ in range(rng.randint(1, 4)):
            error = "stutter" if rng.random() < faults else None
            reason = "io" if rng.random() < faults else ""
            act = rng.choice(
                [
                    world.step,
                    lambda error=error: world.copy(True, error),
                    lambda error=error: world.copy(False, error),
                    lambda reason=reason: world.job("", reason),
                    lambda: world.tick(0.01),
                ]
            )
            act()
    world.settle()
    world.assert_quiet()
    return [t.answers for t in talkers]


def machine(lag: int, **changes: object) -> World:
    cfg = config(deterministic=True, deterministic_piece=8, lag=lag, max_rows=6, **changes)
    return World(cfg, model=FakeModel(vocab=31, shape_sensitive=True))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_short_machine_answers_as_one_that_holds_everything(lag: int) -> None:
    right = converse(machine(lag, n_pages=800, ram_slots=0), 0, 0.0)
    seen: Counter[str] = Counter()
    for seed in range(24):
        short = machine(lag, n_pages=24 + seed % 12, ram_slots=seed % 5, chunk_tokens=(8, 16)[seed % 2])
        assert converse(short, seed, 0.05) == right, f"lag {lag}, seed {seed}"
        counters = short.core.statistics().counters
        seen.update({name: counters[name] for name in ("spilled_chunks", "restored_pages", "dropped_chunks", "preemptions")})
    assert min(seen.values()) > 0, seen


def test_the_twin_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule (ordinary cuts by budget) the same comparison fails."""
    monkeypatch.setattr(calls, "next_piece", lambda turn, piece: (min(turn.feed_end - turn.fed, 5), False))
    right = converse(machine(0, n_pages=800, ram_slots=0), 0, 0.0)
    got = converse(machine(0, n_pages=24, ram_slots=1), 3, 0.05)
    assert got != right


def rows_of(world: World, prompt: tuple[int, ...], session: str, **params: object) -> list[Row]:
    """All rows of one turn, in order."""
    turn = world.submit(prompt, session, **params)
    rows = []
    while world.clients[turn].ended is None:
        if world.plans:
            rows += list(world.plans[0].rows)
        assert world.advance()
    return rows


def shape(rows: list[Row]) -> list[tuple[int, int, bool]]:
    return [(row.start, row.n, row.decode) for row in rows]


def test_pieces_run_from_multiple_to_multiple() -> None:
    world = machine(0, n_pages=100, step_tokens=4, idle_step_tokens=5)
    rows = rows_of(world, tuple(range(1, 20)), "a", max_tokens=3, ignore_eos=True)
    assert shape(rows) == [(0, 8, False), (8, 8, False), (16, 3, False), (19, 1, True), (20, 1, True)]


def test_the_first_piece_after_a_hit_runs_to_the_next_multiple() -> None:
    world = machine(0, n_pages=100)
    first = world.ask(tuple(range(1, 20)), "a", max_tokens=3, ignore_eos=True)  # KV ends at 21
    prompt = tuple(range(1, 20)) + tuple(first.ids) + tuple(range(60, 70))
    rows = rows_of(world, prompt, "a", max_tokens=1)
    assert shape(rows) == [(21, 3, False), (24, 8, False)]


def test_what_was_decoded_is_decoded_again() -> None:
    world = machine(0, n_pages=100, ram_slots=0, staging_slots=0)
    first = world.ask(tuple(range(1, 20)), "a", max_tokens=4, ignore_eos=True)  # decoded 19, 20, 21
    board = world.core._board
    while board.index.leaves:
        board.remove_node(next(iter(board.index.leaves)))
    prompt = tuple(range(1, 20)) + tuple(first.ids) + (7, 7, 7)
    rows = rows_of(world, prompt, "a", max_tokens=1)
    assert shape(rows) == [(0, 8, False), (8, 8, False), (16, 3, False), (19, 1, True), (20, 1, True), (21, 1, True),
                           (22, 2, False), (24, 2, False)]  # fmt: skip


def test_a_hit_may_end_between_decoded_tokens() -> None:
    """The client dropped the end of the answer: what is before it is kept, and what follows is cut there."""
    world = machine(0, n_pages=100)
    first = world.ask(tuple(range(1, 20)), "a", max_tokens=6, ignore_eos=True)
    client = world.ask(tuple(range(1, 20)) + tuple(first.ids[:2]) + (33, 33), "a", max_tokens=1)
    assert client.ended is not None
    assert client.ended.report.resident_tokens == 21
    assert client.ended.report.diverged_at == 21


def test_a_stranger_hits_multiples_only() -> None:
    world = machine(0, n_pages=100)
    world.ask(tuple(range(1, 20)), "a", max_tokens=3)
    client = world.ask((*range(1, 19), 55, 56), "b", max_tokens=1)
    assert client.ended is not None
    assert client.ended.report.resident_tokens == 16
