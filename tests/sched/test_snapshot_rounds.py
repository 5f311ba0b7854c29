"""A restored turn is itself snapshotted again, from unaligned positions too: round after round through RAM, disk and restarts.

The fake model's KV is a function of all ids before it, so a byte in the wrong place is a wrong answer (``World.judge``). What
is asserted beside it is the price: each turn computes its own new tokens and the one that was never fed, and nothing again.
"""

from __future__ import annotations

import random

import pytest
from kvalet.runtime.fake_model import FakeModel
from schedworld import Client, World, config
from talk import after, crowd, drain, open_session, records, report, restart, words

WAYS = ("stay", "to RAM", "to disk", "drain and restart", "checkpoint and kill")


def leave(world: World, way: str, number: int) -> None:
    """What happens to the session between two of its turns."""
    if way == "to RAM":
        crowd(world, 2, 20, first=100 + number)
    elif way == "to disk":
        crowd(world, 9, 24, first=200 + 10 * number)
        world.settle()
    elif way == "drain and restart":
        restart(world)
    elif way == "checkpoint and kill":
        world.session("a", True)
        world.settle()
        world.kill()


def price(world: World, before: Client | None, client: Client) -> None:
    """``client``'s turn computed what it brought, and the last token of the answer before it."""
    had = 0 if before is None else len(after(before)) - 1
    assert report(client).computed_tokens == len(client.spec.prompt) - had, world.core.tell()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_rounds_of_every_kind_compute_only_what_is_new(seed: int, deterministic: bool) -> None:
    rng = random.Random(seed)
    cfg = config(
        n_pages=rng.choice((36, 60)), ram_slots=rng.choice((0, 3, 24)), staging_slots=rng.choice((1, 3)),
        chunk_tokens=rng.choice((4, 8, 16)), lag=seed % 2, deterministic=deterministic,
        checkpoint_idle=rng.random() < 0.3, pin_wait_s=1e6, slot_wait_s=1e6,
    )  # fmt: skip
    world = World(cfg, model=FakeModel(vocab=97, shape_sensitive=deterministic))
    before: Client | None = None
    prompt = words(1, rng.randint(1, 20))
    passed = []
    for number in range(7):
        client = world.ask(prompt, "a", max_tokens=rng.randint(1, 9), ignore_eos=True)
        try:
            price(world, before, client)
        except AssertionError as error:
            error.add_note(f"seed {seed}, after {passed}, {cfg}")
            raise
        before, prompt = client, after(client, *words(40 + number, rng.randint(1, 6)))
        passed.append(rng.choice(WAYS))
        leave(world, passed[-1], number)
    world.settle()
    world.assert_quiet()


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
def test_each_end_inside_a_page_is_an_end_to_go_on_from(new: int) -> None:
    """Histories that end at every offset of a page and a chunk, each through a restart."""
    world = World(config(n_pages=60))
    before: Client | None = None
    prompt = words(1, 9)
    offsets = set()
    for _ in range(8):
        client = world.ask(prompt, "a", max_tokens=2, ignore_eos=True)
        price(world, before, client)
        offsets.add((len(after(client)) - 1) % 8)
        restart(world)
        (record,) = records(world)
        assert record.kv_len == len(after(client)) - 1
        before, prompt = client, after(client, *words(7, new))
    assert len(offsets) > 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_client_that_dropped_the_end_of_the_answer_pays_from_there(deterministic: bool) -> None:
    cfg = config(n_pages=60, chunk_tokens=16, deterministic=deterministic)
    world = World(cfg, model=FakeModel(vocab=31, shape_sensitive=deterministic))
    client = world.ask(words(1, 18), "a", max_tokens=9, ignore_eos=True)  # the answer lies in one chunk: 18 .. 26
    for number in range(3):
        restart(world)
        kept = (*client.spec.prompt, *client.ids[:3])
        back = world.ask((*kept, 80 + number, 81), "a", max_tokens=9, ignore_eos=True)
        assert report(back).diverged_at == len(kept)
        assert report(back).computed_tokens == 2
        state = world.session("a")
        assert state is not None
        assert state.saved_tokens == len(kept)  # what the client changed is no longer what the record says
        restart(world)
        client = world.ask(words(1, 18), "a", max_tokens=9, ignore_eos=True)
        assert report(client).computed_tokens == (2 if deterministic else 1)  # a piece may only begin at 16 there


def test_tails_that_a_longer_one_begins_with_are_superseded_above_the_disk() -> None:
    """Checkpoints link a partial page after each turn; when the turn after it went on, the shorter one leaves."""
    world = World(config(n_pages=60, ram_slots=10, checkpoint_idle=True))
    client = world.ask(words(1, 9), "a", max_tokens=1)
    for number in range(6):
        world.settle()
        crowd(world, 6, 24, first=60 + 6 * number)
        client = world.ask(after(client, number + 1), "a", max_tokens=1)
    world.settle()
    (line,) = open_session(world, "a").lines.values()
    board = world.core._board
    partial = [n for n in board.index.nodes() if n.ids[:1] and len(n.ids) < 4 and line.branch.ids[: n.end][n.start :] == n.ids]
    assert len(partial) <= 1
    parent = board.chunks.get(line.keys[-1])
    in_ram = [c for c in board.chunks.children_of(parent, line.branch.secret).values() if c.slot is not None and c.tail]
    assert len(in_ram) <= 1
    drain(world)
    assert [r.tail_key for r in records(world, "a")] == [line.tail]
