"""One configuration for people -> those of runtime and sched. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvalet.api.config import EngineConfig
from kvalet.api.memory_plan import MemoryPlan
from kvalet.runtime.config import EngineConfig as RuntimeConfig
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.grammar import MAX_FORCED
from kvalet.sched.config import SchedConfig
from kvalet.store.ids import Identity

STEP_TOKENS = 272
IDLE_STEP_TOKENS = 2048
"""Token budgets of a step where the configuration gives none: with and without somebody decoding (docs/numbers.md)."""


DEVICE_STEP_TOKENS = 1024
DEVICE_IDLE_STEP_TOKENS = 8192
"""The same on a GPU."""
CPU_ROWS, DEVICE_ROWS = 16, 256


def resolved(config: EngineConfig, device: str) -> EngineConfig:
    """What the device decides where the configuration leaves it open: rows, step budgets, lag. Pure.

    On the CPU a step is computed when ``launch`` returns: planning ahead of its result would only cost a surplus token.
    """
    on_device = device != "cpu"
    rows = config.max_rows or (DEVICE_ROWS if on_device else CPU_ROWS)
    return replace(
        config,
        device=device,
        max_rows=rows,
        step_tokens=config.step_tokens or max(DEVICE_STEP_TOKENS if on_device else STEP_TOKENS, rows),
        idle_step_tokens=config.idle_step_tokens or (DEVICE_IDLE_STEP_TOKENS if on_device else IDLE_STEP_TOKENS),
        lag=config.lag if config.lag >= 0 else int(on_device),
    )


def _lag(config: EngineConfig) -> int:
    return max(0, config.lag)


def _forced_runs(config: EngineConfig) -> bool:
    return not config.deterministic and _lag(config) == 0


def runtime_config(config: EngineConfig, path: Path, cache: Path) -> RuntimeConfig:
    """Before the pool is sized: ``n_pages`` and ``arena_tokens`` are put in later. ValueError for values that contradict."""
    return RuntimeConfig(
        model=path,
        n_pages=2,
        weights=config.weights,
        context_tokens=config.context_tokens,
        max_step_tokens=max(_idle_step_tokens(config), config.max_rows * (MAX_FORCED + 1)) + config.max_rows,
        threads=config.threads,
        deterministic=config.deterministic,
        decode_rows=config.decode_rows,
        forced_runs=_forced_runs(config),
        cache_dir=cache,
        load_format=config.load_format,
    )


def _step_tokens(config: EngineConfig) -> int:
    return config.step_tokens or max(STEP_TOKENS, config.max_rows)


def _idle_step_tokens(config: EngineConfig) -> int:
    return max(config.idle_step_tokens or IDLE_STEP_TOKENS, _step_tokens(config))


def sched_config(
    config: EngineConfig, geometry: KVGeometry, plan: MemoryPlan, identity: Identity, context_tokens: int
) -> SchedConfig:
    """ValueError for values that contradict."""
    if config.checkpoint == "idle" and not config.store_dir:
        raise ValueError("--checkpoint idle writes to the disk tier, and there is none: give --store DIR")
    if config.checkpoint not in ("off", "idle"):
        raise ValueError(f"checkpoint must be off or idle, not {config.checkpoint!r}")
    return SchedConfig(
        page_tokens=geometry.page_tokens,
        chunk_tokens=geometry.chunk_tokens,
        n_pages=plan.n_pages,
        context_tokens=context_tokens,
        identity=identity.digest,
        page_bytes=geometry.page_stride_bytes,
        ram_slots=plan.ram_slots,
        staging_slots=plan.staging_slots,
        max_rows=config.max_rows,
        step_tokens=_step_tokens(config),
        idle_step_tokens=_idle_step_tokens(config),
        queue_limit=config.queue_limit,
        max_sessions=config.max_sessions,
        lag=_lag(config),
        deterministic=config.deterministic,
        decode_rows=config.decode_rows,
        forced_runs=_forced_runs(config),
        checkpoint_idle=config.checkpoint == "idle",
    )
