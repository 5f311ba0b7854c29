"""Sizes of pool, RAM tier, staging and disk tier: chosen, given, clamped, refused, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvalet.api.config import EngineConfig
from kvalet.api.machine import available_memory, folder_bytes, free_disk_bytes
from kvalet.api.memory_plan import MAX_STAGING_BYTES, MemoryPlan, PlanError, plan_memory
from kvalet.runtime.geometry import KVGeometry

SMOLLM = KVGeometry(n_layers=30, n_kv_heads=3, head_dim=64)
HUGE = KVGeometry(n_layers=128, n_kv_heads=64, head_dim=256, kv_dtype="fp32")
GIB = 1 << 30


def plan(geometry: KVGeometry = SMOLLM, *, available: int = 16 * GIB, disk: int = 100 * GIB, **config: Any) -> MemoryPlan:
    asked = EngineConfig(**{"max_rows": 16, **config})
    return plan_memory(asked, geometry, context_tokens=8192, available_bytes=available, free_disk_bytes=disk)


def says(made: MemoryPlan, text: str) -> bool:
    return any(text in note for note in made.notes)


def test_chosen_sizes_fit_and_are_explained() -> None:
    made = plan()
    assert 0 < made.pool_tokens * SMOLLM.token_bytes <= 2 * GIB
    assert made.pool_bytes == made.n_pages * SMOLLM.page_stride_bytes
    assert made.ram_bytes == made.ram_slots * SMOLLM.slot_bytes <= 2 * GIB
    assert says(made, "pool: ")
    assert says(made, "RAM tier: ")
    assert made.store_bytes == 0


def test_a_small_machine_gets_a_small_pool_and_is_told() -> None:
    made = plan(available=256 << 20)
    assert made.pool_tokens < 8192
    assert says(made, "smaller than the context")


def test_given_sizes_are_taken() -> None:
    made = plan(pool_tokens=1000, ram_bytes=100 << 20, store_dir="/x", store_bytes=GIB, store_readers=2, store_writers=1)
    assert (made.n_pages, made.pool_tokens) == (64, 1008)
    assert made.ram_slots == (100 << 20) // SMOLLM.slot_bytes
    assert made.staging_slots == 5
    assert made.store_bytes == GIB
    assert not says(made, "chosen")


def test_staging_is_bounded_and_never_too_small() -> None:
    assert plan(store_dir="/x", store_readers=1000).staging_bytes <= MAX_STAGING_BYTES
    with pytest.raises(PlanError, match="staging slots exceed"):
        plan(HUGE)


@pytest.mark.parametrize(
    ("config", "disk", "note"),
    [
        ({"ram_bytes": 1000}, GIB, "RAM tier off"),
        ({"ram_bytes": 0}, GIB, "no tier below the pool"),
        ({"store_dir": "/x", "store_bytes": 1000}, 100 * GIB, "disk tier off"),
        ({"store_dir": "/x"}, GIB, "disk tier off"),
        ({"store_dir": "/x", "store_bytes": 90 * GIB}, 50 * GIB, "to spare"),
        ({"store_dir": "/x", "store_bytes": GIB, "ram_bytes": 2 * GIB}, 100 * GIB, "only helps after a restart"),
        ({"store_dir": "/x"}, 101 * GIB, "disk tier: 51,200.0 MiB, chosen"),
    ],
)
def test_tiers_that_do_nothing_are_named(config: dict[str, Any], disk: int, note: str) -> None:
    made = plan(disk=disk, **config)
    assert says(made, note), made.notes
    if note == "no tier below the pool":
        assert (made.ram_slots, made.staging_slots) == (0, 0)


def test_disk_without_ram_still_has_staging() -> None:
    made = plan(ram_bytes=0, store_dir="/x", store_bytes=GIB)
    assert made.ram_slots == 0
    assert made.staging_slots >= 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pool_tokens": 16}, "give at least 2 pages"),
        ({"pool_tokens": 10_000_000}, "are available"),
        ({"ram_bytes": 64 * GIB}, "are available"),
    ],
)
def test_what_cannot_be_had_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**config)


def test_limit_of_a_control_group_is_told() -> None:
    made = plan_memory(
        EngineConfig(max_rows=16), SMOLLM, context_tokens=8192, available_bytes=GIB, limited_by="/sys/fs/cgroup/x"
    )
    assert says(made, "limited by /sys/fs/cgroup/x")


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_of_a_machine_without_limits(tmp_path: Path) -> None:
    tree(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:  2048 kB\n")
    found = available_memory(tmp_path)
    assert (found.available_bytes, found.limited_by) == (2048 * 1024, "machine")


@pytest.mark.parametrize("own_limit", ["max", "3000000"])
def test_the_tightest_control_group_counts(tmp_path: Path, own_limit: str) -> None:
    tree(
        tmp_path,
        proc__meminfo="MemAvailable: 1000000 kB\n",
        proc__self__cgroup="0::/a/b\n",
        sys__fs__cgroup__a__memory_dot_max="1000000\n",
        sys__fs__cgroup__a__memory_dot_current="400000\n",
        sys__fs__cgroup__a__memory_dot_stat="anon 5\ninactive_file 100000\n",
        sys__fs__cgroup__a__b__memory_dot_max=own_limit,
        sys__fs__cgroup__a__b__memory_dot_current="100",
    )
    found = available_memory(tmp_path)
    assert (found.available_bytes, found.limited_by) == (700_000, "/sys/fs/cgroup/a")


def test_version_1_control_groups(tmp_path: Path) -> None:
    tree(
        tmp_path,
        proc__meminfo="MemAvailable: 1000000 kB\n",
        proc__self__cgroup="5:cpu:/c\n4:memory:/m\n",
        sys__fs__cgroup__memory__m__memory_dot_limit_in_bytes="5000",
        sys__fs__cgroup__memory__m__memory_dot_usage_in_bytes="6000",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes=str(1 << 62),
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes="1",
    )
    assert available_memory(tmp_path).available_bytes == 0


def test_this_machine_has_memory_and_disk(tmp_path: Path) -> None:
    assert available_memory().available_bytes > 1 << 20
    assert free_disk_bytes(str(tmp_path / "not" / "there")) > 0
    tree(tmp_path, a="123", b__c="4567")
    assert folder_bytes(str(tmp_path)) == 7
    assert folder_bytes(str(tmp_path / "none")) == 0
