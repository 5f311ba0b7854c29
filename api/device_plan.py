"""How large the pool on a GPU is: what is left of its memory after weights, graphs and workspaces. Pure.

The sizes that do not depend on the pool are upper bounds, so that nothing has to be allocated while serving; the GPU's tests
compare them with what the allocator says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvalet.api.config import EngineConfig
from kvalet.api.memory_plan import PlanError
from kvalet.runtime.device_sampler import DRAW_ROWS
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.spec import ModelSpec

ELEMENT_BYTES = 2
"""bf16, for weights, activations and logits alike."""
WORKSPACE_BYTES = 256 << 20
"""Of one attention plan (``attn_flashinfer.WORKSPACE_BYTES``)."""
GRAPH_BYTES = 16 << 20
"""Of one captured graph, beside the activations that all share."""
LIBRARY_BYTES = 512 << 20
"""Workspaces of the matrix library, compiled kernels, fragmentation."""
DRAW_BYTES_PER_LOGIT = 96
"""Of drawing tokens on the device: noise, order and masses of a row's whole vocabulary."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """``free_bytes``: after the weights were loaded. ``total_bytes``: of the card."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePool:
    """``overhead_bytes``: kept free of the pool, for everything else that computing needs."""

    n_pages: int
    overhead_bytes: int
    notes: tuple[str, ...] = ()


def overhead_bytes(spec: ModelSpec, *, max_step_tokens: int, max_rows: int, buckets: Sequence[int]) -> int:
    """Device memory that computing takes beside weights and pool, an upper bound."""
    largest = max(buckets)
    windows = len(set(spec.windows))
    logits = spec.vocab * ELEMENT_BYTES * (largest + 2 * max_rows)
    drawing = spec.vocab * DRAW_BYTES_PER_LOGIT * min(DRAW_ROWS, max_rows)
    activations = _activation_bytes(spec) * (max_step_tokens + largest)
    rope = 4 * spec.head_dim * spec.served_context(spec.max_context)
    return 2 * windows * WORKSPACE_BYTES + GRAPH_BYTES * len(buckets) + LIBRARY_BYTES + logits + drawing + activations + rope


def _activation_bytes(spec: ModelSpec) -> int:
    """Of one token: residual, normed input and product beside each other, q twice, gate and up, their product."""
    q_width = spec.n_q_heads * spec.head_dim
    return ELEMENT_BYTES * (6 * spec.hidden + spec.qkv_width + 2 * q_width + 3 * spec.ffn)


def plan_pool(
    config: EngineConfig, geometry: KVGeometry, memory: DeviceMemory, *, context_tokens: int, overhead: int
) -> DevicePool:
    """PlanError with the numbers where the pool that was asked for, or any pool, does not fit.

    Of the card ``device_share`` may be used in all, weights included; what others use counts as used.
    """
    used = memory.total_bytes - memory.free_bytes
    room = min(memory.free_bytes, int(config.device_share * memory.total_bytes) - used) - overhead
    most = max(0, room) // geometry.page_stride_bytes
    numbers = (
        f"the device has {_gib(memory.total_bytes)}, {_gib(used)} are used (weights included), {_gib(overhead)} are kept for"
        f" computing, and {config.device_share:.0%} of the card may be used: {_gib(max(0, room))} are left"
    )
    notes = []
    if config.pool_tokens:
        n_pages = geometry.pages_for(config.pool_tokens) + 1
        if n_pages > most:
            asked = _gib(n_pages * geometry.page_stride_bytes)
            raise PlanError(f"A pool of {config.pool_tokens:,} tokens takes {asked}; {numbers}. Give a smaller --pool-tokens.")
    else:
        n_pages = most
        notes.append(f"pool: {max(0, n_pages - 1) * geometry.page_tokens:,} tokens, chosen: {numbers}")
    if n_pages < 3:
        raise PlanError(f"The model does not fit: {numbers}; one prompt and a page of growth take at least 3 pages of"
                        f" {geometry.page_stride_bytes:,} bytes.")  # fmt: skip
    if (n_pages - 1) * geometry.page_tokens < context_tokens:
        notes.append(
            f"the pool ({(n_pages - 1) * geometry.page_tokens} tokens) is smaller than the context ({context_tokens}): longer"
            " prompts are refused, longer answers end with 'length'"
        )
    return DevicePool(n_pages, overhead, tuple(notes))


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):,.2f} GiB"
