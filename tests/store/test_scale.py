"""Many names (G4 scaled down; the long run has 200,000)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kvalet.store import layout
from storekit import Rig


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
