"""Random walks over the whole machine: 200,000 events and more, every invariant after each, every answer compared.

A failing walk names its seed: ``python tests/support/schedsim.py SEED EVENTS`` replays it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from schedsim import Walk, walk
from schedworld import World

BATCHES = 20
EVENTS_PER_BATCH = 10_500
EVENTS_PER_WALK = 400


def add_up(world: World, seen: Counter[str]) -> None:
    stats = world.core.statistics()
    for name, value in stats.counters.items():
        seen[name] += sum(value.values()) if isinstance(value, dict) else value
    seen.update(world.log)
    seen.update(client.ended.reason.value for client in world.clients.values() if client.ended)
    seen.update(client.refusal.value for client in world.clients.values() if client.refusal)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_walks(batch: int) -> None:
    seen: Counter[str] = Counter()
    seed = batch * 10_000
    while seen["events"] < EVENTS_PER_BATCH:
        add_up(walk(seed, EVENTS_PER_WALK), seen)
        seed += 1
    # a walk that never spills or restores proves nothing
    for name in ("spilled_chunks", "restored_chunks_ram", "restored_chunks_disk", "written_chunks", "read_failures",
                 "preemptions", "dropped_chunks", "evicted_clean_pages", "cancelled_spills", "TouchDisk",
                 "CancelTransfer", "stop", "length", "grammar", "cancelled", "write_failures", "copy_failures"):  # fmt: skip
        assert seen[name] > 0, f"no {name} in batch {batch}: {dict(seen)}"


def test_a_seed_replays() -> None:
    first, second = Walk(123), Walk(123)
    first.run(200)
    second.run(200)
    assert first.world.core.tell() == second.world.core.tell()
    assert first.world.core.statistics() == second.world.core.statistics()


def test_a_failing_walk_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "assert_quiet", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        walk(7, 50)
    assert any("schedsim.py 7 50" in note for note in caught.value.__notes__)
