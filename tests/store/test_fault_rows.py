"""Rows of the fault plan around jobs and threads: cancels at every call (C5), a hanging disk and a busy store beside an
event loop (E7, L1), images in the keys (R4)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from kvalet.store import bench_lag
from kvalet.store.bench_lag import Desk, heartbeat, percentiles
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.ids import ChunkMeta, chunk_key
from storekit import CHUNK_TOKENS, WAIT_S, Rig, slot

WRITE_OPS = ("open", "pwritev", "utime", "fdatasync", "close", "rename", "fsync", "mkdir")
READ_OPS = ("open", "fstat", "preadv", "close")
SLACK_MS = 100.0
"""What a busy machine may add to a loop's lag, whoever makes it: ten times what was seen on one with a load of 7."""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("kind", "op"), [("write", op) for op in WRITE_OPS] + [("read", op) for op in READ_OPS])
def test_cancelled_while_each_call_hangs(tmp_path: Path, kind: str, op: str) -> None:
    """C5: whatever is under way ends once, as what it is; afterwards every counter is 0 and the slot is free."""
    fired = 0
    for nth in range(1, 20):
        io = FaultIO()
        with Rig(tmp_path / f"s{nth}", io=io, touch_every_s=1e6, free_every_s=1e6) as rig:
            trunk = rig.chain(1)
            rig.write(trunk)
            metas = rig.chain(2, after=trunk)
            if kind == "read":
                rig.write(metas)
            files = open_files()
            io.arm(Fault(op, nth, "hang"))
            jobs = [rig.submit_write(meta) if kind == "write" else rig.submit_read(meta) for meta in metas]
            if io.hanging.wait(0.05 if nth > 2 else 0.5):
                fired += 1
            for job in jobs:
                rig.store.cancel(job)
            io.release()
            outcomes = rig.settle_all(len(jobs))
            assert {outcomes[job].reason for job in jobs} <= {"", "cancelled", "ancestor"}
            io.disarm()
            rig.quiet()
            statistics = rig.store.statistics()
            assert (statistics.pinned, statistics.unsettled, statistics.reserved_bytes, statistics.internal) == (0, 0, 0, 0)
            assert (statistics.writes_in_flight, statistics.reads_waiting, statistics.reads_running) == (0, 0, 0)
            assert open_files() == files
            assert rig.done.empty()
            done = io.fired
        if not done:
            break
    assert fired >= 1, f"{op} never hung: nothing was tested"


@pytest.mark.parametrize("number", range(1, 12))
def test_cancelled_at_once_or_a_little_later(tmp_path: Path, number: int) -> None:
    """C5: every job of a mixed batch is cancelled when ``number`` of them have ended, and each ends exactly once."""
    with Rig(tmp_path / "s", readers=1, writers=1, committers=1) as rig:
        old, new = rig.chain(6), rig.chain(6, seed=1)
        rig.write(old)
        jobs = [job for pair in zip(old, new, strict=True) for job in (rig.submit_read(pair[0]), rig.submit_write(pair[1]))]
        outcomes = rig.settle_all(number)
        for job in jobs:
            rig.store.cancel(job)
        outcomes |= rig.settle_all(len(jobs) - number)
        assert set(outcomes) == set(jobs)
        assert {outcome.reason for outcome in outcomes.values()} <= {"", "cancelled", "ancestor"}
        rig.quiet()
        assert rig.store.statistics().pinned == 0
        durable = [meta for meta in new if rig.store.has(meta.key)]
        assert durable == new[: len(durable)]  # no child without its parent
        assert [rig.read(meta) for meta in old + durable] == [""] * (6 + len(durable))


def on_uvloop(main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_the_loop_beats_on_while_restores_and_spills_run(tmp_path: Path) -> None:
    """L1: 8 restores and 8 spills at once; the lag beside that of the idle loop in the same run."""
    with Rig(tmp_path / "s", cap_bytes=1 << 24) as rig:
        kept = [rig.chain(3, seed=i) for i in range(8)]
        for metas in kept:
            rig.write(metas)
            rig.store.pin([meta.key for meta in metas])
        new = [[rig.chain(8, seed=100 * (i + 1) + k) for k in range(25)] for i in range(8)]

        async def main() -> tuple[list[float], list[float], Desk]:
            desk, loop = Desk(rig.store), asyncio.get_running_loop()
            idle: list[float] = []
            busy: list[float] = []
            await heartbeat(0.4, idle)
            until = bench_lag.time.perf_counter() + 0.8
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(heartbeat(0.8, busy), name="heartbeat")]
                tasks += [group.create_task(desk.restore_on(kept[i], slot(), until)) for i in range(8)]
                tasks += [group.create_task(desk.spill_on(new[i], slot(), until)) for i in range(8)]
            assert loop.is_running()
            return idle, busy, desk

        idle, busy, desk = on_uvloop(main)
        assert min(desk.restored, desk.spilled) >= 16, "the store did nothing: nothing was tested"
        assert percentiles(busy)["p99"] <= 10 * percentiles(idle)["p99"] + SLACK_MS, (percentiles(idle), percentiles(busy))
        for metas in kept:
            rig.store.unpin([meta.key for meta in metas])
        rig.quiet()


def test_a_hanging_disk_does_not_touch_the_loop(tmp_path: Path) -> None:
    """E7, scaled: all readers hang. What waits behind them is answered at the deadline, the loop beats on as an idle one does,
    and when the disk comes back every slot is free again."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io, readers=2, queue_deadline_s=0.3) as rig:
        metas = rig.chain(6)
        rig.write(metas)
        io.arm(Fault("preadv", 1, "hang", sticky=True))

        async def main() -> tuple[list[float], list[float], list[str]]:
            desk = Desk(rig.store)
            idle: list[float] = []
            hung: list[float] = []
            await heartbeat(0.3, idle)
            async with asyncio.TaskGroup() as group:
                reads = [group.create_task(desk.read(meta, slot(), "s")) for meta in metas]
                beat = group.create_task(heartbeat(1.0, hung))
                await asyncio.wait(reads[2:], timeout=WAIT_S)
                assert not any(read.done() for read in reads[:2])
                assert "hang" in str(rig.store.health().why) or rig.store.statistics().reads_running == 2
                await beat
                io.disarm()
            return idle, hung, [read.result() for read in reads]

        idle, hung, reasons = on_uvloop(main)
        assert reasons == ["", "", *["deadline"] * 4]
        assert percentiles(hung)["p99"] <= 10 * percentiles(idle)["p99"] + SLACK_MS
        assert rig.store.statistics().reads_running == 0
        assert [rig.read(meta) for meta in metas] == [""] * 6
        rig.quiet()


def with_images(secret: bytes, root: bytes, images: dict[int, bytes]) -> list[ChunkMeta]:
    """Four chunks of the same placeholder tokens; ``images``: chunk in which an image starts -> its hash."""
    parent, metas = root, []
    for i in range(4):
        ids = tuple(7 for _ in range(CHUNK_TOKENS))
        key = chunk_key(secret, parent, ids, images.get(i, b""))
        metas.append(ChunkMeta(key, parent, i, i * CHUNK_TOKENS, ids, 2))
        parent = bytes(key)
    return metas


@pytest.mark.parametrize("at", range(4))
def test_an_image_splits_keys_from_the_chunk_it_starts_in(tmp_path: Path, at: int) -> None:
    """R4: equal tokens, another image in chunk ``at``: what is before it hits, nothing from there on; the same one hits."""
    with Rig(tmp_path / "s") as rig:
        cat = with_images(rig.secret, rig.root, {at: b"cat" * 8})
        dog = with_images(rig.secret, rig.root, {at: b"dog" * 8})
        none = with_images(rig.secret, rig.root, {})
        assert [r.reason for r in rig.write(cat)] == [""] * 4
        again = with_images(rig.secret, rig.root, {at: b"cat" * 8})
        assert [rig.read(meta) for meta in again] == [""] * 4
        for other in (dog, none):
            assert [rig.read(meta) for meta in other] == [""] * at + ["missing"] * (4 - at)
