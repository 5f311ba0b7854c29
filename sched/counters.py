"""What the core counts, and the frozen picture of itself that it gives out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvalet.sched.pages import PageStatistics
from kvalet.store.ram import RamStatistics


@dataclass(slots=True)
class Counters:
    """Grow only. Chunks count whole chunks and tails alike; bytes are payload bytes as the events report them (pages where
    no event does: the loop knows a page's size). ``dropped``: device victims given up because no slot came free, and
    chunks that RAM gave up to make room; ``lost_tokens`` by reason is in the reports of turns. ``checkpointed``: of the
    written chunks, those that no eviction asked for. ``lost_pinned``: pinned ones given up because the disk did not take
    them and a turn could not go on otherwise. ``lost_device``: what went with a lost device: cached pages that had no copy
    below, and chunks in RAM or on their way to disk that a page before them, lost with it, made useless."""

    events: int = 0
    steps: int = 0
    accepted: int = 0
    refused: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    spilled_chunks: int = 0
    spilled_pages: int = 0
    evicted_clean_pages: int = 0
    dropped_chunks: int = 0
    dropped_pages: int = 0
    ram_dropped_chunks: int = 0
    written_chunks: int = 0
    written_bytes: int = 0
    write_failures: Counter[str] = field(default_factory=Counter)
    restored_chunks_ram: int = 0
    restored_chunks_disk: int = 0
    restored_pages: int = 0
    read_bytes: int = 0
    read_failures: Counter[str] = field(default_factory=Counter)
    copy_failures: int = 0
    cancelled_spills: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    diverged_turns: int = 0
    stale_results: int = 0
    written_records: int = 0
    record_bytes: int = 0
    record_failures: Counter[str] = field(default_factory=Counter)
    read_records: int = 0
    record_read_failures: Counter[str] = field(default_factory=Counter)
    checkpointed_chunks: int = 0
    checkpoint_refusals: Counter[str] = field(default_factory=Counter)
    lost_pinned_chunks: int = 0
    lost_device_pages: int = 0
    lost_device_chunks: int = 0


@dataclass(frozen=True, slots=True)
class CoreStatistics:
    """``turns``: live turns by state. ``transfers``: live transfers by kind. ``counters``: name -> number, or -> {word:
    number}; they never fall. ``sessions``: open. ``chunks``: in the chunk map. ``idle_pages``: cached pages that nobody
    stands on (part of ``pages.held``)."""

    turns: dict[str, int]
    queue_length: int
    steps_in_flight: int
    pages: PageStatistics
    idle_pages: int
    ram: RamStatistics
    staging: RamStatistics
    chunks: int
    sessions: int
    transfers: dict[str, int]
    counters: dict[str, Any]
    draining: bool
    device_lost: bool
