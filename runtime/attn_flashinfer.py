"""FlashInfer on the GPU: paged attention over the page-first pool, and its fused elementwise kernels.

The one file that imports flashinfer (>= 0.6.13; only what 0.6.13 and 0.7 both have). The pool is
``[page, layer, 2, token, kv_head, head_dim]``; FlashInfer reads it through strided views per layer (``pool[:, l, 0]``,
``pool[:, l, 1]``), so that a page stays one contiguous run for the copy engine.

Source: flashinfer-ai/flashinfer, ``BatchDecodeWithPagedKVCacheWrapper`` and ``BatchPrefillWithPagedKVCacheWrapper``.
"""

from __future__ import annotations

from collections.abc import Sequence

import flashinfer
import torch
from kvalet.runtime.page_tables import PageTables, page_tables
from torch import Tensor

__all__ = [
    "DecodePlan",
    "PageTables",
    "PrefillPlan",
    "add_rmsnorm",
    "page_tables",
    "rmsnorm",
    "silu_mul",
    "workspace",
]

WORKSPACE_BYTES = 256 << 20


class DecodePlan:
    """Decode attention for exactly ``rows`` rows, usable inside a CUDA graph: its index buffers never move.

    ``fixed_split_pages`` > 0 fixes how a row's KV is split over thread blocks, so that its bits do not depend on its neighbours
    (``--deterministic``)."""

    def __init__(
        self, pool: Tensor, n_q_heads: int, rows: int, max_pages: int, workspace: Tensor, fixed_split_pages: int = 0
    ) -> None:
        device = pool.device
        self.pool = pool
        self.rows = rows
        self.n_q_heads = n_q_heads
        self.fixed_split_pages = fixed_split_pages
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.zeros(max_pages, dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.ones(rows, dtype=torch.int32, device=device),
        )

    def plan(self, tables: PageTables) -> None:
        """Once a step. Host work of 0.14-0.22 ms plus small copies on the current stream."""
        _, _, _, page_tokens, n_kv_heads, head_dim = self.pool.shape
        self._wrapper.plan(
            tables.indptr,
            tables.indices.to(self.pool.device, non_blocking=True),
            tables.last,
            self.n_q_heads,
            n_kv_heads,
            head_dim,
            page_tokens,
            q_data_type=self.pool.dtype,
            kv_data_type=self.pool.dtype,
            **self._split(),
        )

    def _split(self) -> dict[str, int]:
        return {"fixed_split_size": self.fixed_split_pages} if self.fixed_split_pages else {}

    def run(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        """``q`` and ``out`` [rows, n_q_heads, head_dim]."""
        self._wrapper.run(q, (self.pool[:, layer, 0], self.pool[:, layer, 1]), out=out)
        return out


class PrefillPlan:
    """Causal attention of new tokens against their row's pages (the new tokens' KV is already in them). FA3 on Hopper."""

    def __init__(
        self, pool: Tensor, n_q_heads: int, workspace: Tensor, backend: str = "auto", fixed_split_pages: int = 0
    ) -> None:
        self.pool = pool
        self.n_q_heads = n_q_heads
        self.fixed_split_pages = fixed_split_pages
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)

    def plan(self, tables: PageTables, new_tokens: Sequence[int]) -> None:
        _, _, _, page_tokens, n_kv_heads, head_dim = self.pool.shape
        qo_indptr = torch.zeros(len(new_tokens) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(new_tokens, dtype=torch.int32), 0, out=qo_indptr[1:])
        self._wrapper.plan(
            qo_indptr,
            tables.indptr,
            tables.indices,
            tables.last,
            self.n_q_heads,
            n_kv_heads,
            head_dim,
            page_tokens,
            causal=True,
            q_data_type=self.pool.dtype,
            kv_data_type=self.pool.dtype,
            **({"fixed_split_size": self.fixed_split_pages} if self.fixed_split_pages else {}),
        )

    def run(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        self._wrapper.run(q, (self.pool[:, layer, 0], self.pool[:, layer, 1]), out=out)
        return out


def workspace(device: torch.device) -> Tensor:
    """One per stream that runs attention: zeroed, as FlashInfer asks for its first use."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = flashinfer.rmsnorm(x, weight, eps)
    return normed


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In place: residual += x; x = rmsnorm(residual) * weight."""
    flashinfer.fused_add_rmsnorm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """``gate_up`` [n, 2 * ffn] -> silu(first half) * second half, [n, ffn]."""
    flashinfer.silu_and_mul(gate_up, out=out)
    return out
