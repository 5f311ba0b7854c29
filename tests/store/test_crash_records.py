"""Power loss and kill -9 with records (fault plan P1, P3, K1): a record that is there names only what is there, and an
acknowledged one is not lost; a protocol that publishes it too early is caught."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from crashmodel import Moment, RecordingIO, crash_states, materialise
from kvalet.store import layout, workers, writing
from kvalet.store.record import Record
from recordkit import RecordRig, record_of
from storekit import Rig

N_MOMENTS = 18


@dataclass(slots=True)
class Tally:
    states: int = 0
    seen: int = 0
    """Records that were read."""
    dangling: int = 0
    lost: int = 0
    wrong: int = 0


def run(directory: Path, io: RecordingIO) -> list[Record]:
    """Two chunks, a tail and the record of them, all submitted at once; then a longer chain of the same branch and its record.
    Acknowledgements are moments: b"0" and b"1"."""
    with RecordRig(directory, io=io, writers=2, probe_every_s=1000.0) as rig:
        short, long = rig.chain(1, tail=5), rig.chain(3)
        records = [record_of(short), record_of(long)]
        for number, (metas, record) in enumerate(zip((short, long), records, strict=True)):
            if number:
                assert {one.reason for one in rig.write(metas)} == {""}  # durable first, as the scheduler does it
                job = rig.submit_record(record)
                outcomes = rig.settle_all(1)
            else:
                rig.write(metas[:-1])
                rig.submit_write(metas[-1])
                job = rig.submit_record(record)
                outcomes = rig.settle_all(2)
            assert outcomes[job].reason == ""
            io.acknowledge(b"%d" % number)
    return records


def examine(
    moments: list[Moment], records: list[Record], original: Path, scratch: Path, *, per_moment: int, seed: int
) -> Tally:
    rng, tally, seen = random.Random(seed), Tally(), set()
    for moment in moments:
        for state in crash_states(moment, rng, per_moment):
            fingerprint = hash((frozenset(state.items()), moment.acked))
            if fingerprint in seen:
                continue
            seen.add(fingerprint)
            tally.states += 1
            materialise(state, original, scratch)
            with RecordRig(scratch, readers=1, writers=1, sync="none", direct="off") as rig:
                found = rig.get().record
                rig.quiet()
                if found is not None:
                    tally.seen += 1
                    tally.wrong += found not in records
                    tally.dangling += not all(rig.store.has(key) for key in found.keys)
                acked = max((int(number) for number in moment.acked), default=-1)
                tally.lost += acked >= 0 and (found is None or records.index(found) < acked)
    return tally


def test_a_record_after_a_crash_names_only_what_is_durable(tmp_path: Path) -> None:
    io = RecordingIO()
    records = run(tmp_path / "s", io)
    tally = examine(io.moments, records, tmp_path / "s", tmp_path / "crashed", per_moment=3, seed=1)
    assert tally.states > 30
    assert tally.seen > 10
    assert (tally.dangling, tally.lost, tally.wrong) == (0, 0, 0)


def test_mutant_that_publishes_the_record_before_the_directory_of_its_chunks_is_flushed_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: only records flush their shard; chunks and tails are renamed and acknowledged."""
    real = writing.publish

    def hasty(disk, wave, *, sync):  # type: ignore[no-untyped-def]
        return real(disk, wave, sync=wave[0].file.folder == layout.RECORDS)

    monkeypatch.setattr(workers.writing, "publish", hasty)
    io = RecordingIO()
    records = run(tmp_path / "s", io)
    tally = examine(io.moments[-N_MOMENTS:], records, tmp_path / "s", tmp_path / "crashed", per_moment=6, seed=3)
    assert tally.dangling > 0
    assert tally.wrong == 0


def test_mutant_that_does_not_flush_the_records_directory_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writing.publish

    def careless(disk, wave, *, sync):  # type: ignore[no-untyped-def]
        return real(disk, wave, sync=wave[0].file.folder != layout.RECORDS)

    monkeypatch.setattr(workers.writing, "publish", careless)
    io = RecordingIO()
    records = run(tmp_path / "s", io)
    tally = examine(io.moments[-N_MOMENTS:], records, tmp_path / "s", tmp_path / "crashed", per_moment=6, seed=4)
    assert tally.lost > 0
    assert (tally.dangling, tally.wrong) == (0, 0)


def test_mutant_that_flushes_no_data_never_makes_a_record_that_lies(tmp_path: Path) -> None:
    """P2: torn records are refused, not believed."""
    io = RecordingIO(skip_fdatasync=True)
    records = run(tmp_path / "s", io)
    tally = examine(io.moments[-N_MOMENTS:], records, tmp_path / "s", tmp_path / "crashed", per_moment=6, seed=5)
    assert tally.lost > 0
    assert tally.wrong == 0


def test_the_plain_rig_and_the_record_rig_are_one_store(tmp_path: Path) -> None:
    """Records do not disturb who knows nothing of them."""
    with RecordRig(tmp_path / "s") as rig:
        metas = rig.chain(1)
        rig.write(metas)
        rig.put(record_of(metas, pinned=True))
    with Rig(tmp_path / "s") as plain:
        assert plain.read(metas[0]) == ""
        plain.quiet()
