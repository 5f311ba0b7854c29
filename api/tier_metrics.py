"""Pages, RAM slots and the disk tier as Prometheus families. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvalet.api.families import alone, by, counter, gauge
from kvalet.api.memory_plan import MemoryPlan
from kvalet.sched.counters import CoreStatistics
from kvalet.sched.stats import TransferCounts
from kvalet.store.stats import StoreStatistics
from prometheus_client.metrics_core import Metric

CORE_COUNTERS = {
    "spilled_chunks": "Chunks moved from the device to RAM",
    "spilled_pages": "Pages moved from the device to RAM",
    "evicted_clean_pages": "Pages freed that had a copy below",
    "dropped_chunks": "Chunks of device victims given up because no slot came free",
    "dropped_pages": "Pages of device victims given up because no slot came free",
    "ram_dropped_chunks": "Chunks that RAM gave up to make room",
    "written_chunks": "Chunks written to disk",
    "restored_chunks_ram": "Chunks brought back from RAM",
    "restored_chunks_disk": "Chunks brought back from disk",
    "restored_pages": "Pages brought back",
    "copy_failures": "Copies between device and RAM that failed",
    "cancelled_spills": "Spills cancelled because their session returned",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix index",
    "prefix_hit_tokens": "Prompt tokens found in any tier",
    "lost_device_pages": "Cached pages that were lost with the device",
    "lost_device_chunks": "Chunks in RAM made useless by pages lost with the device",
    "diverged_turns": "Turns whose prompt differs from their session's history",
    "written_records": "Session records written to disk",
    "record_bytes": "Bytes of session records written to disk",
    "read_records": "Session records read back",
    "checkpointed_chunks": "Chunks written to disk although nobody needed their room",
    "lost_pinned_chunks": "Chunks of pinned sessions given up because the disk took none and a turn could not go on",
}
REASONS = {
    "write_failures": "Chunk writes that failed",
    "read_failures": "Chunk reads that were of no use",
    "record_failures": "Session records that could not be written",
    "record_read_failures": "Session records that could not be read or used",
    "checkpoint_refusals": "Checkpoint writes that the disk refused",
}
"""Fields of ``sched.counters.Counters`` that are shown under their own names; the others are shown by other families."""
DISK_BYTES = ("live", "reserved", "dying", "aside", "stranded")
DISK_COUNTERS = (
    "reads",
    "hits",
    "read_bytes",
    "writes",
    "skipped",
    "written_bytes",
    "evicted_files",
    "quarantined",
    "internal",
    "expired_records",
)
DISK_GAUGES = (
    "files",
    "cap_bytes",
    "used_bytes",
    "pinned",
    "reads_waiting",
    "reads_running",
    "writes_in_flight",
    "records",
    "record_bytes",
    "pinned_records",
    "held_bytes",
    "bytes_per_day",
    "budget_left_bytes",
)


def core_families(core: CoreStatistics) -> Iterator[Metric]:
    pages, ram, staging = core.pages, core.ram, core.staging
    yield gauge("kvalet_turns", "Live turns", by(core.turns), ("state",))
    yield gauge("kvalet_queue_length", "Turns that wait for pages", alone(core.queue_length))
    yield gauge("kvalet_sessions", "Open sessions", alone(core.sessions))
    yield gauge("kvalet_chunks", "Chunks known in any tier", alone(core.chunks))
    conditions = {"free": pages.free, "held": pages.held, "leased": pages.leased_only}
    yield gauge("kvalet_pages", "Pages of the pool; they sum to kvalet_pool_pages", by(conditions), ("state",))
    yield gauge("kvalet_pool_pages", "Pages that can be owned", alone(pages.total))
    yield gauge("kvalet_idle_pages", "Held pages that only cache", alone(core.idle_pages))
    for name, slots in (("ram", ram), ("staging", staging)):
        states = {"free": slots.free, "taken": slots.taken, "clean": slots.clean, "dirty": slots.dirty}
        yield gauge(f"kvalet_{name}_slots", f"Slots of the slab: {name}", by(states), ("state",))
    yield gauge("kvalet_live_transfers", "Transfers under way", by(core.transfers), ("kind",))
    for name, text in CORE_COUNTERS.items():
        yield counter(f"kvalet_{name}", text, alone(core.counters[name]))
    for name, text in REASONS.items():
        yield counter(f"kvalet_{name}", text, by(core.counters[name]), ("reason",))


def memory_families(plan: MemoryPlan, transfers: Mapping[str, TransferCounts], model: str) -> Iterator[Metric]:
    """Sizes of the tiers, and bytes spilled into them: copies count whole pages, files what was written."""
    sizes = {"pool": plan.pool_bytes, "ram": plan.ram_bytes, "staging": plan.staging_bytes, "disk": plan.store_bytes}
    yield gauge("kvalet_tier_bytes", "Size of each tier, fixed at the start", by(sizes), ("tier",))
    page_bytes = plan.pool_bytes // plan.n_pages
    spilled = {
        "ram": transfers["device_to_ram"].pages * page_bytes if "device_to_ram" in transfers else 0,
        "disk": transfers["ram_to_disk"].n_bytes if "ram_to_disk" in transfers else 0,
    }
    yield counter("kvalet_spilled_bytes", "Bytes of KV moved down", by(spilled), ("tier",))
    n_pages = plan.n_pages - 1
    info = ((model, str(plan.pool_tokens // max(1, n_pages)), str(n_pages)), 1.0)
    yield gauge("vllm:cache_config_info", "The pool", [info], ("model_name", "block_size", "num_gpu_blocks"))


def vllm_gauges(core: CoreStatistics, model: str) -> Iterator[Metric]:
    """Gauges that routers read. Cached pages that nobody stands on count as unused, as they do for vLLM."""
    waiting = core.turns.get("queued", 0)
    running = sum(core.turns.values()) - waiting
    used = (core.pages.total - core.pages.free - core.idle_pages) / max(1, core.pages.total)
    for name, text, value in (
        ("vllm:num_requests_running", "Turns that run", running),
        ("vllm:num_requests_waiting", "Turns that wait", waiting),
        ("vllm:kv_cache_usage_perc", "Share of the pool in use, 0 to 1", min(max(used, 0.0), 1.0)),
    ):
        yield gauge(name, text, [((model,), value)], ("model_name",))


def store_families(store: StoreStatistics) -> Iterator[Metric]:
    for name in DISK_GAUGES:
        yield gauge(f"kvalet_disk_{name}", f"Disk tier: {name.replace('_', ' ')}", alone(getattr(store, name)))
    yield gauge(
        "kvalet_disk_bytes",
        "Bytes of files by condition",
        by({s: getattr(store, f"{s}_bytes") for s in DISK_BYTES}),
        ("state",),
    )
    yield gauge("kvalet_disk_direct", "1 if the store goes past the page cache", alone(store.direct))
    yield gauge("kvalet_disk_read_breaker_open", "1 while reads are refused", alone(store.read_breaker_open))
    yield gauge("kvalet_disk_write_breaker_open", "1 while writes are refused", alone(bool(store.write_breaker)))
    for name in DISK_COUNTERS:
        yield counter(f"kvalet_disk_{name}", f"Disk tier: {name.replace('_', ' ')}", alone(getattr(store, name)))
    refusals = [((reason, field), float(n)) for reason, field, n in store.refusals]
    yield counter("kvalet_disk_refusals", "Files that were not used", refusals, ("reason", "field"))
    yield counter("kvalet_disk_failures", "Writes that failed", by(dict(store.failures)), ("reason",))
