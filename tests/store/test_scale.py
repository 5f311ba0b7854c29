"""Many names, and the benchmark's own sanity (G4 scaled down; the long run has 200,000)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from kvalet.store import bench, layout
from storekit import FILE_BYTES, Rig


def fill_with_names(root: Path, n: int) -> None:
    """Empty files under chunk names: opening looks at names, sizes and times only."""
    for shard in layout.SHARDS:
        (root / "c" / shard).mkdir(mode=0o700)
    for i in range(n):
        key = f"{i * 2654435761 % 2**32:08x}" + f"{i:056x}"
        (root / "c" / key[:2] / f"{key}.{i % 7}.00000000").touch(mode=0o600)


def open_with(tmp_path: Path, n: int) -> float:
    with Rig(tmp_path / "s"):
        pass
    fill_with_names(tmp_path / "s", n)
    started = time.perf_counter()
    with Rig(tmp_path / "s") as rig:
        took = time.perf_counter() - started
        assert rig.store.found.files == n
        assert rig.store.statistics().files == n
        metas = rig.chain(2)
        assert [r.reason for r in rig.write(metas)] == ["", ""]
        assert [rig.read(meta) for meta in metas] == ["", ""]
    return took


def test_a_store_of_many_files_opens_and_works(tmp_path: Path) -> None:
    assert open_with(tmp_path, 5_000) < 10.0


@pytest.mark.long
def test_a_store_of_200_000_files_opens_in_seconds(tmp_path: Path) -> None:
    """G4."""
    assert open_with(tmp_path, 200_000) < 10.0


def test_the_benchmark_measures_and_cleans_up(tmp_path: Path) -> None:
    plan = bench.BenchPlan(str(tmp_path), chains=2, chunks=3, pages=2, stride=4096, repeat=1)
    report = bench.run(plan)
    assert report.file_bytes == FILE_BYTES
    assert report.total_bytes == 6 * FILE_BYTES
    assert min(report.restore_of_raw, report.spill_of_raw, report.open_ms) > 0
    assert report.direct
    assert json.loads(json.dumps(report.as_dict()))["file_bytes"] == FILE_BYTES
    assert list(tmp_path.iterdir()) == []
