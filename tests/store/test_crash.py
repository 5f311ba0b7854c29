"""Crash states (fault plan P1-P3): acked chunks survive, nothing wrong is served, closed under ancestors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from crashmodel import Moment, RecordingIO, crash_states, materialise
from kvalet.store import workers, writing
from kvalet.store.directory import Directory
from kvalet.store.ids import ChunkMeta
from storekit import Rig, chain


@dataclass(slots=True)
class Tally:
    states: int = 0
    lost: int = 0
    orphans: int = 0
    refused: int = 0


def record(directory: Path, io: RecordingIO, *, sync: str, evict: bool) -> list[ChunkMeta]:
    """A run with forks, a tail and (``evict``) evictions. Each acknowledgement is a moment too."""
    cap = {"cap_bytes": 5 * 12288} if evict else {}
    with Rig(directory, io=io, sync=sync, writers=2, probe_every_s=1000.0, **cap) as rig:
        trunk = rig.chain(2)
        metas = [*trunk, *rig.chain(1, after=trunk, seed=1, tail=5), *rig.chain(1, after=trunk, seed=2)]
        batches = [metas, rig.chain(2, seed=3)] if evict else [metas]
        for batch in batches:
            keys = {rig.submit_write(meta): meta for meta in batch}
            for _ in batch:
                outcome = rig.settle()
                if not outcome.reason:
                    io.acknowledge(keys[outcome.job].key)
        return [meta for batch in batches for meta in batch]


def examine(
    moments: list[Moment], metas: list[ChunkMeta], original: Path, scratch: Path, *, per_moment: int, seed: int
) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    by_key = {bytes(meta.key): meta for meta in metas}
    seen: set[int] = set()
    for moment in moments:
        for state in crash_states(moment, rng, per_moment):
            fingerprint = hash((frozenset(state.items()), moment.acked))
            if fingerprint in seen:
                continue
            seen.add(fingerprint)
            tally.states += 1
            materialise(state, original, scratch)
            with Rig(scratch, readers=1, writers=1, sync="none", direct="off") as rig:
                assert rig.tmp_names() == []
                here = {key for key, meta in by_key.items() if rig.store.has(meta.key)}
                good = {key for key in here if not rig.read(by_key[key])}  # read asserts the bytes
                tally.refused += len(here - good)
                tally.lost += len({bytes(key) for key in moment.acked} - good)
                tally.orphans += sum(by_key[key].ordinal > 0 and bytes(by_key[key].parent) not in here for key in here)
    return tally


def test_synced_writes_survive_any_crash(tmp_path: Path) -> None:
    """P1: nothing acked is lost, nothing wrong is served, and no file is there without its ancestors."""
    io = RecordingIO()
    metas = record(tmp_path / "s", io, sync="data", evict=False)
    assert len(io.acked) == len(metas)
    tally = examine(io.moments, metas, tmp_path / "s", tmp_path / "crashed", per_moment=4, seed=1)
    assert tally.states > 30
    assert (tally.lost, tally.orphans, tally.refused) == (0, 0, 0)


def test_unsynced_writes_may_be_lost_but_never_wrong(tmp_path: Path) -> None:
    """P2: sync=none. The reads inside ``examine`` assert the bytes; torn files are refused, not served."""
    io = RecordingIO()
    metas = record(tmp_path / "s", io, sync="none", evict=False)
    tally = examine(io.moments[-16:], metas, tmp_path / "s", tmp_path / "crashed", per_moment=4, seed=2)
    assert tally.states > 30
    assert tally.refused > 0  # the model does produce torn files
    assert tally.lost > 0  # and lost names


MUTANTS: dict[str, Callable[[], RecordingIO]] = {
    "no fdatasync": lambda: RecordingIO(skip_fdatasync=True),
    "no directory fsync": lambda: RecordingIO(skip_fsync=True),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_protocols_are_caught(tmp_path: Path, name: str) -> None:
    """P3's kind: a protocol without its flushes loses acknowledged chunks in this model."""
    io = MUTANTS[name]()
    metas = record(tmp_path / "s", io, sync="data", evict=False)
    tally = examine(io.moments[-12:], metas, tmp_path / "s", tmp_path / "crashed", per_moment=4, seed=3)
    assert tally.lost > 0


def test_mutant_that_publishes_children_before_their_parents_are_durable_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All names renamed first, then all directories flushed: orphans are possible, and the model finds them."""
    real = writing.publish

    def hasty(disk, wave, *, sync):  # type: ignore[no-untyped-def]
        return real(disk, wave, sync=False)

    monkeypatch.setattr(workers.writing, "publish", hasty)
    io = RecordingIO()
    metas = record(tmp_path / "s", io, sync="data", evict=False)
    tally = examine(io.moments[-12:], metas, tmp_path / "s", tmp_path / "crashed", per_moment=4, seed=4)
    assert tally.orphans > 0


def test_mutant_that_never_flushes_new_shards_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is only as durable as the folder it lies in."""
    monkeypatch.setattr(Directory, "flush_folders", lambda self: None)
    io = RecordingIO()
    metas = record(tmp_path / "s", io, sync="data", evict=False)
    tally = examine(io.moments[-12:], metas, tmp_path / "s", tmp_path / "crashed", per_moment=4, seed=6)
    assert tally.lost > 0


def test_eviction_leaves_no_orphans_behind_a_crash(tmp_path: Path) -> None:
    """Unlinks are not flushed: after power loss evicted files may be back, whole and right. Nothing kept is lost."""
    io = RecordingIO()
    metas = record(tmp_path / "s", io, sync="data", evict=True)
    evicted = [
        moment for moment in io.moments if any(change.inode is None and "/c/" in change.path for change in moment.pending)
    ]
    assert evicted, "nothing was evicted: the test tested nothing"
    rng = random.Random(5)
    with_rig = rng.sample(evicted, min(len(evicted), 12))
    tally = examine(with_rig, metas, tmp_path / "s", tmp_path / "crashed", per_moment=6, seed=5)
    assert tally.refused == 0


def test_chains_of_the_model_are_chains() -> None:
    metas = chain(b"s" * 32, 3)
    assert [meta.parent for meta in metas[1:]] == [meta.key for meta in metas[:-1]]
