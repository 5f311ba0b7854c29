"""Limits of the scheduler. Frozen; only api/settings.py fills it from the outside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """Sizes come from runtime's geometry and memory plan. Tokens, pages, slots and seconds as named.

    ``n_pages`` counts the scratch page 0, so n_pages - 1 can be owned. ``context_tokens``: the model's limit for prompt +
    completion. ``max_rows``: rows in one step. ``step_tokens``: token budget of a step in which somebody decodes;
    ``idle_step_tokens``: of one in which nobody does. ``lag``: 0 or 1 steps planned ahead of their results.
    ``decode_rows``: under ``deterministic``, the fixed row count of a decode call (rows beyond it go into further calls).
    ``forced_runs``: the engine may answer several ids at once for a grammar row (only with lag 0, not deterministic).
    ``low_watermark``/``high_watermark``: shares of the pool; below low, spilling starts, and stops at high. The same pair of
    names with ``ram_`` for free or clean slots of the RAM tier.
    ``copies_ahead``: copies of chunks to the device that are out at once: enough to keep the link busy while the loop is away;
    the rest wait in the core, the oldest turn's first.
    ``page_bytes``: bytes of one page in pool, slot and file; only reported (``TurnReport.bytes_from_ram``).
    ``checkpoint_idle``: every session's chain is written to disk after each turn, at the lowest class; else only pinned ones'.
    ``record_wait_s``: how long the turns of a session that was just opened wait for its records. ``pin_wait_s``: how long a
    turn waits for the disk before pinned KV is given up where nothing else is left to evict (``lost_pinned_chunks``).
    At a bound: a full queue refuses (429), ``max_sessions`` forgets the least recently used idle session's name (its pages
    stay cached as long as they are not evicted).
    """

    page_tokens: int
    chunk_tokens: int
    n_pages: int
    context_tokens: int
    identity: bytes
    ram_slots: int = 0
    staging_slots: int = 0
    max_rows: int = 16
    step_tokens: int = 272
    idle_step_tokens: int = 2048
    queue_limit: int = 256
    max_sessions: int = 10_000
    low_watermark: float = 0.05
    high_watermark: float = 0.10
    ram_low_watermark: float = 0.10
    ram_high_watermark: float = 0.25
    lag: int = 0
    deterministic: bool = False
    deterministic_piece: int = 256
    decode_rows: int = 16
    forced_runs: bool = False
    slot_wait_s: float = 0.05
    restore_deadline_s: float = 30.0
    max_preemptions: int = 5
    copies_ahead: int = 32
    page_bytes: int = 0
    checkpoint_idle: bool = False
    record_wait_s: float = 2.0
    pin_wait_s: float = 10.0

    def __post_init__(self) -> None:
        if self.lag not in (0, 1):
            raise ValueError(f"lag must be 0 or 1, not {self.lag}")
        if self.chunk_tokens % self.page_tokens:
            raise ValueError("chunk_tokens must be a multiple of page_tokens")
        if self.n_pages < 2:
            raise ValueError("n_pages must be at least 2: page 0 is scratch")
        if len(self.identity) != 32:
            raise ValueError("identity must be 32 bytes")
