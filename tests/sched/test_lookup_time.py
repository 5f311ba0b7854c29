"""What the record says of looking for a turn's history, and what the disk is told of it."""

from __future__ import annotations

import itertools

from kvalet.sched.commands import TouchDisk
from schedworld import World, config


def test_the_record_says_how_long_the_history_was_looked_for() -> None:
    world = World(config())
    ticks = itertools.count()
    world.core.measure_with(lambda: next(ticks) * 0.25)
    client = world.ask(tuple(range(1, 12)))
    assert client.ended is not None
    assert client.ended.report.lookup_ms == 250.0


def test_without_a_stopwatch_it_says_nothing() -> None:
    client = World(config()).ask(tuple(range(1, 12)))
    assert client.ended is not None
    assert client.ended.report.lookup_ms == 0.0


def test_a_stored_tail_is_touched_when_a_longer_page_stands_for_it() -> None:
    """Its chain keeps one recency whichever tier serves it: what a restart would read must not age behind its own beginning."""
    world = World(config(n_pages=60, ram_slots=0, staging_slots=2, checkpoint_idle=True))
    prompt = tuple(range(1, 12))
    client = world.ask(prompt, "s", max_tokens=3)
    world.settle()
    assert world.store is not None
    tails = [key for key, entry in world.store.entries.items() if entry.meta.tail]
    assert len(tails) == 1, "the checkpoint wrote the tail"
    world.commands.clear()
    world.submit(prompt + tuple(client.ids) + (90, 91, 92), "s", max_tokens=1)
    touched = [key for command in world.commands if isinstance(command, TouchDisk) for key in command.keys]
    assert tails[0] in touched
    assert len(touched) == len(set(touched))
    world.commands.clear()
    world.settle()
    world.submit((*prompt[:9], 95, 96, 97, 98), "s", max_tokens=1)
    touched = [key for command in world.commands if isinstance(command, TouchDisk) for key in command.keys]
    assert tails[0] not in touched, "the prompt goes another way before the tail's end"
