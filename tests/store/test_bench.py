"""The benchmark measures what it says, compares like with like, and cleans up. Its figures are its own affair."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvalet.store import bench, bench_disk, bench_lag, bench_open, bench_raw, layout
from kvalet.store.bench_disk import QWEN, SMOLLM, Bed, Plan, Shape
from storekit import slot

TINY = Shape("tiny", 2, 4096)


def tiny_plan(directory: Path) -> Plan:
    return Plan(str(directory), rounds=2, phase_bytes=1 << 18, readers=2, writers=2, slots=6)


def quiet(what: str) -> None:
    assert what


def test_the_whole_of_it_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_lag, "ROUND_S", 0.2)
    monkeypatch.setattr(bench_open, "LONG_TOKENS", 10_000)
    report = bench.run(tiny_plan(tmp_path), bench.Size((TINY,), 300), quiet)
    assert json.loads(json.dumps(report)) == report
    (chunk,) = report["chunks"]
    assert chunk["file_bytes"] == TINY.file_bytes == 4096 + 2 * 4096
    assert chunk["bytes_per_phase"] == bench_disk.CHAINS * tiny_plan(tmp_path).chunks(TINY) * TINY.file_bytes
    assert set(chunk["gb_per_s"]) == set(chunk["cpu_s_per_gb"]) == set(bench_disk.PHASES)
    assert all(value > 0 for value in chunk["gb_per_s"].values())
    assert report["restore_of_raw"] == chunk["restore_share"]["median"] > 0
    assert report["spill_of_raw"] == chunk["spill_share"]["median"] > 0
    assert report["open"]["files"] == 300
    assert report["staging"]["1k"]["slots_bytes"] == report["staging"]["143k"]["slots_bytes"] == 6 * TINY.file_bytes
    assert report["staging"]["143k"]["tokens"] >= 10_000 > report["staging"]["1k"]["tokens"]
    lag = report["loop_lag"]
    assert min(lag["restored_chunks"], lag["spilled_chunks"], lag["idle_ms"]["beats"], lag["busy_ms"]["beats"]) > 10
    assert lag["loop"] == "uvloop"
    assert list(tmp_path.iterdir()) == []


def names_with(report: Any, part: str) -> list[str]:
    if isinstance(report, dict):
        return [name for name in report if part in name] + [n for value in report.values() for n in names_with(value, part)]
    return [n for item in report for n in names_with(item, part)] if isinstance(report, list) else []


SHARE = {"median": 0.9, "low": 0.8, "high": 1.0}
REPORT = {
    "restore_of_raw": 0.95,
    "spill_of_raw": 0.7,
    "bars": {"restore": 0.9, "spill": 0.85},
    "chunks": [
        {
            "model": "m",
            "file_bytes": 5_902_336,
            "chunk_tokens": 256,
            "gb_per_s": dict.fromkeys(bench_disk.PHASES, 1.5),
            "cpu_s_per_gb": dict.fromkeys(bench_disk.PHASES, 0.1),
            "restore_share": SHARE,
            "spill_share": SHARE,
            "spill_share_of_flushed_writes": SHARE,
        }
    ],
    "loop_lag": {
        "loop": "uvloop",
        "idle_ms": {"p50": 0.1, "p99": 1.0, "max": 2.0, "beats": 9},
        "busy_ms": {"p50": 0.2, "p99": 3.0, "max": 4.0, "beats": 9},
    },
    "staging": {"1k": {"slots_bytes": 1e6, "grown_bytes": 0}, "143k": {"slots_bytes": 1e6, "grown_bytes": 0}},
    "open": {"files": 100_000, "seconds": 0.9, "index_bytes": 40e6},
    "machine": {"load": [1.0, 2.0], "cores": 2},
}


def test_the_table_and_the_json_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(bench, "run", lambda plan, size, progress: progress("a round") or REPORT)
    assert bench.main(["--dir", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out) == REPORT
    assert out.err == "a round\n"  # progress never mixes with the figures
    assert bench.main(["--dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "restore_of_raw 0.95 (bar 0.90: met)" in text
    assert "spill_of_raw   0.70 (bar 0.85: MISSED)" in text
    assert names_with(REPORT, "_of_raw") == ["restore_of_raw", "spill_of_raw"]


def test_what_cannot_be_measured_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert bench.main(["--dir", str(tmp_path)]) == 2
    assert "are needed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_job_ends_the_run_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a store that refuses would be figures of nothing."""

    def damaging(bed: Bed, phase: str) -> tuple[float, float]:
        if phase == "restore":
            for path in Path(bed.directory, "store", layout.CHUNKS).glob("*/*"):
                os.truncate(path, 4096)
        return measure(bed, phase)

    measure = Bed.measure
    monkeypatch.setattr(Bed, "measure", damaging)
    with pytest.raises(RuntimeError, match="failed: size"):
        bench.run(tiny_plan(tmp_path), bench.Size((TINY,), 10), quiet)
    assert list(tmp_path.iterdir()) == []


def test_each_phase_moves_all_its_bytes(tmp_path: Path) -> None:
    """Raw and store: as many files of one size, all of it on the disk, none read before it was written."""
    bed = Bed(tiny_plan(tmp_path), TINY, str(tmp_path))
    for phase in bench_disk.PHASES:
        bed.measure(phase)
    raw = [path.stat() for path in (tmp_path / "raw").iterdir()]
    stored = [path.stat() for path in (tmp_path / "store" / layout.CHUNKS).glob("*/*")]
    for files in (raw, stored):
        assert len(files) * TINY.file_bytes == bed.n_bytes
        assert {st.st_size for st in files} == {TINY.file_bytes}
        assert all(st.st_blocks * 512 >= TINY.file_bytes for st in files)
    assert bed.store.statistics().hits == len(stored)
    bed.close()


@pytest.mark.parametrize(("flushed", "calls"), [(False, 0), (True, 5)])
def test_raw_writes_flush_only_when_they_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool, calls: int
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(os, "fdatasync", seen.append)
    write: Callable[[str, memoryview], None] = bench_raw.write_raw_flushed if flushed else bench_raw.write_raw
    bench_raw.in_parallel(2, [str(tmp_path / str(i)) for i in range(5)], [slot(), slot()], write)
    assert len(seen) == calls
    assert len(list(tmp_path.iterdir())) == 5


def test_a_failing_raw_transfer_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bench_raw.in_parallel(2, [str(tmp_path / "none")], [slot(), slot()], bench_raw.read_raw)


def test_both_sizes_fit_the_staging_bound() -> None:
    for shape, tokens in ((SMOLLM, 256), (QWEN, 128)):
        assert shape.tokens == tokens
        n = len(bench_disk.make_slots(Plan(".", slots=3), shape))
        assert n == 3
        assert min(Plan(".").slots, bench_disk.STAGING_BYTES // shape.file_bytes) * shape.file_bytes <= 256 << 20
    assert (SMOLLM.file_bytes, QWEN.file_bytes) == (5_902_336, 18_878_464)


def test_the_heartbeat_sees_a_blocked_loop() -> None:
    """The control of the lag figures: 50 ms of blocking show as 50 ms."""
    lags: list[float] = []

    def block() -> None:
        end = asyncio.get_running_loop().time() + 0.05
        while asyncio.get_running_loop().time() < end:
            pass

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.02, block)
        await bench_lag.heartbeat(0.1, lags)

    asyncio.run(run())
    assert max(lags) >= 0.045
    assert bench_lag.percentiles(lags)["max"] >= 45


def test_a_share_is_the_median_of_ratios_of_one_round() -> None:
    assert bench_disk.share([1.0, 4.0, 90.0], [2.0, 4.0, 100.0]) == {"median": 0.9, "low": 0.5, "high": 1.0}
