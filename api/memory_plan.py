"""How large pool, RAM tier and disk tier are: decided once, from what the machine has left after the weights. Pure.

Every choice that was not the user's, every size that was clamped, and every tier that would never be used is told in
``notes``: they are printed at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvalet.api.config import EngineConfig
from kvalet.runtime.geometry import KVGeometry
from kvalet.sched.persist import MAX_WRITES

POOL_SHARE = 0.125
RAM_SHARE = 0.125
DEVICE_RAM_SHARE = 0.5
MOST_SHARE = 0.8
"""Of the available memory: chosen sizes (the RAM tier's beside a pool on a device of its own is the second), and the most that
may be asked for (pool and slab are touched whole at start)."""
DISK_SHARE = 0.5
ARENA_SHARE = 0.05
ARENA_ROUNDING_TOKENS = 512
MAX_ARENA_TOKENS = 32_768
MAX_STAGING_BYTES = 256 * 1024 * 1024
MIN_STAGING_SLOTS = 3


class PlanError(ValueError):
    """The sizes asked for cannot be had. One sentence, for the start."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``n_pages`` counts the scratch page. ``arena_tokens``: room for contiguous copies of running rows. Bytes include
    padding and slot headers. ``ram_slots`` and ``staging_slots`` 0: no slab. ``store_bytes`` 0: no disk tier."""

    n_pages: int
    pool_tokens: int
    pool_bytes: int
    arena_tokens: int
    ram_slots: int
    ram_bytes: int
    staging_slots: int
    staging_bytes: int
    store_bytes: int
    notes: tuple[str, ...] = ()


def plan_memory(
    config: EngineConfig,
    geometry: KVGeometry,
    *,
    context_tokens: int,
    available_bytes: int,
    limited_by: str = "machine",
    free_disk_bytes: int = 0,
    device_pages: int = 0,
) -> MemoryPlan:
    """PlanError where a size that was asked for does not fit, or leaves too little to work with.

    ``available_bytes``: memory left after the weights were loaded, and ``limited_by`` whose limit that is.
    ``free_disk_bytes``: what the store may fill, its own files included (or a restart would halve a chosen cap).
    ``device_pages``: the pool is on a device of its own and has so many pages (``device_plan.plan_pool``); then memory is for
    the tiers alone.
    """
    notes: list[str] = []
    n_pages = device_pages or _pool_pages(config, geometry, context_tokens, available_bytes, notes)
    pool_bytes = n_pages * geometry.page_stride_bytes
    in_memory = 0 if device_pages else pool_bytes
    staging = _staging_slots(config, geometry)
    disk = _disk_bytes(config, geometry, free_disk_bytes, notes)
    share = DEVICE_RAM_SHARE if device_pages else RAM_SHARE
    ram = _ram_slots(config, geometry, int(share * available_bytes), pool_bytes, f"{share:.1%} of the available memory", notes)
    if not ram and not disk:
        staging = 0
        notes.append("no tier below the pool: KV that does not fit is dropped and computed again")
    arena = 0 if device_pages else _arena_tokens(config, geometry, n_pages, available_bytes)
    needed = in_memory + arena * geometry.token_bytes + (ram + staging) * geometry.slot_bytes
    if needed > MOST_SHARE * available_bytes:
        parts = {"pool": in_memory, "arena": arena * geometry.token_bytes, "RAM tier": ram * geometry.slot_bytes}
        raise PlanError(
            f"{', '.join(f'{name} {_mib(size)}' for name, size in parts.items())} and staging"
            f" {_mib(staging * geometry.slot_bytes)} need {_mib(needed)} of memory; {_mib(available_bytes)} are available"
            f" (limited by {limited_by}) and at most {MOST_SHARE:.0%} of that is taken. Give smaller sizes."
        )
    if disk and ram and disk <= ram * geometry.slot_bytes:
        notes.append(
            f"the disk tier ({_mib(disk)}) is not larger than the RAM tier ({_mib(ram * geometry.slot_bytes)}): it only helps"
            " after a restart"
        )
    if limited_by != "machine":
        notes.append(f"available memory is limited by {limited_by}: {_mib(available_bytes)}")
    return MemoryPlan(
        n_pages=n_pages,
        pool_tokens=(n_pages - 1) * geometry.page_tokens,
        pool_bytes=pool_bytes,
        arena_tokens=arena,
        ram_slots=ram,
        ram_bytes=ram * geometry.slot_bytes,
        staging_slots=staging,
        staging_bytes=staging * geometry.slot_bytes,
        store_bytes=disk,
        notes=tuple(notes),
    )


def _pool_pages(config: EngineConfig, geometry: KVGeometry, context_tokens: int, available_bytes: int, notes: list[str]) -> int:
    """Pages with the scratch page. Chosen: room for ``max_rows`` full contexts, within a share of the memory."""
    if config.pool_tokens:
        pages = geometry.pages_for(config.pool_tokens)
    else:
        wanted = config.max_rows * geometry.pages_for(context_tokens)
        pages = min(wanted, int(POOL_SHARE * available_bytes) // geometry.page_stride_bytes)
        why = "all rows at full context" if pages == wanted else f"{POOL_SHARE:.1%} of the available memory"
        notes.append(f"pool: {pages * geometry.page_tokens} tokens, chosen: {why}")
    if pages < 2:
        raise PlanError(f"A pool of {pages} pages cannot hold one prompt and one page of growth; give at least 2 pages.")
    if pages * geometry.page_tokens < context_tokens:
        notes.append(
            f"the pool ({pages * geometry.page_tokens} tokens) is smaller than the context ({context_tokens}): longer prompts"
            " are refused, longer answers end with 'length'"
        )
    return pages + 1


def _arena_tokens(config: EngineConfig, geometry: KVGeometry, n_pages: int, available_bytes: int) -> int:
    """As much as the pool could have running, each row rounded up, within a share of the memory."""
    running = n_pages * geometry.page_tokens + config.max_rows * ARENA_ROUNDING_TOKENS
    return min(running, MAX_ARENA_TOKENS, int(ARENA_SHARE * available_bytes) // geometry.token_bytes)


def _staging_slots(config: EngineConfig, geometry: KVGeometry) -> int:
    """Readers + ancestor copies + 2, within 256 MB. Fewer than 3 cannot work: the model is refused by name of the limit. The
    scheduler asks for ``MAX_WRITES`` at once: more writers need no more slots."""
    most = MAX_STAGING_BYTES // geometry.slot_bytes
    if most < MIN_STAGING_SLOTS:
        raise PlanError(
            f"One chunk of this model takes {_mib(geometry.slot_bytes)}: {MIN_STAGING_SLOTS} staging slots exceed"
            f" {_mib(MAX_STAGING_BYTES)}."
        )
    return max(MIN_STAGING_SLOTS, min(most, config.store_readers + min(config.store_writers, MAX_WRITES) + 2))


def _ram_slots(
    config: EngineConfig, geometry: KVGeometry, chosen_bytes: int, pool_bytes: int, why: str, notes: list[str]
) -> int:
    if config.ram_bytes == 0:
        return 0
    chosen = config.ram_bytes < 0
    size = min(chosen_bytes, 4 * pool_bytes) if chosen else config.ram_bytes
    slots = size // geometry.slot_bytes
    if chosen:
        notes.append(f"RAM tier: {_mib(slots * geometry.slot_bytes)}, chosen: {why}, at most 4 pools")
    if slots == 0:
        notes.append(f"RAM tier off: {_mib(size)} is less than one chunk ({_mib(geometry.slot_bytes)})")
    return slots


def _disk_bytes(config: EngineConfig, geometry: KVGeometry, free_disk_bytes: int, notes: list[str]) -> int:
    if not config.store_dir:
        return 0
    spare = free_disk_bytes - config.store_min_free_bytes
    size = config.store_bytes
    if not size:
        size = max(0, int(DISK_SHARE * spare))
        notes.append(f"disk tier: {_mib(size)}, chosen: half of what is free above {_mib(config.store_min_free_bytes)}")
    elif size > spare:
        notes.append(f"the disk has {_mib(max(0, spare))} to spare, less than the disk tier's cap of {_mib(size)}")
    if size < geometry.slot_bytes:
        notes.append(f"disk tier off: {_mib(size)} is less than one chunk ({_mib(geometry.slot_bytes)})")
        return 0
    return size


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):,.1f} MiB"
