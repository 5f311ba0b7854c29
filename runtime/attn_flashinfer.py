"""FlashInfer on the GPU: paged attention over the page-first pool, and its fused elementwise kernels.

The one file that imports flashinfer (>= 0.6.13; only what 0.6.13 and 0.7 both have). The pool is
``[page, layer, 2, token, kv_head, head_dim]``; FlashInfer reads it through strided views per layer (``pool[:, l, 0]``,
``pool[:, l, 1]``), so that a page stays one contiguous run for the copy engine. The decode wrapper runs with tensor cores,
which are the prefill kernels: these take any ratio of query to KV heads. A window of 0 gives ``window_left`` -1: no window.

Source: flashinfer-ai/flashinfer, ``BatchDecodeWithPagedKVCacheWrapper`` and ``BatchPrefillWithPagedKVCacheWrapper``.
"""

from __future__ import annotations

from collections.abc import Sequence

import flashinfer
import torch
from kvalet.runtime.page_tables import PageTables
from torch import Tensor

WORKSPACE_BYTES = 256 << 20


class DecodePlan:
    """``device_ops.DecodeAttention``, usable inside a CUDA graph. One wrapper per distinct window of the layers.

    ``alone``: KV is not split over thread blocks, so that a row's bits do not depend on its neighbours (``--deterministic``; a
    fixed split size is not promised to work inside a graph)."""

    def __init__(
        self,
        pool: Tensor,
        n_q_heads: int,
        rows: int,
        windows: Sequence[int],
        workspaces: dict[int, Tensor],
        *,
        alone: bool = False,
    ) -> None:
        """``workspaces``: one per distinct window; decode plans of several buckets may share them."""
        self.pool, self.rows, self.n_q_heads, self._windows = pool, rows, n_q_heads, tuple(windows)
        self._split = {"disable_split_kv": True} if alone else {}
        self._wrappers = {
            window: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspaces[window],
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32, device=pool.device),
                paged_kv_indices_buffer=torch.zeros(pool.shape[0], dtype=torch.int32, device=pool.device),
                paged_kv_last_page_len_buffer=torch.ones(rows, dtype=torch.int32, device=pool.device),
            )
            for window in sorted(set(windows))
        }

    def plan(self, tables: PageTables) -> None:
        """Host work of 0.14-0.22 ms per wrapper, and small copies on the current stream."""
        _, _, _, page_tokens, n_kv_heads, head_dim = self.pool.shape
        indices = tables.indices.to(self.pool.device, non_blocking=True)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                tables.indptr,
                indices,
                tables.last,
                self.n_q_heads,
                n_kv_heads,
                head_dim,
                page_tokens,
                window_left=window - 1,
                q_data_type=self.pool.dtype,
                kv_data_type=self.pool.dtype,
                **self._split,
            )

    def run(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        self._wrappers[self._windows[layer]].run(q, (self.pool[:, layer, 0], self.pool[:, layer, 1]), out=out)
        return out


class PrefillPlan:
    """``device_ops.PrefillAttention``. FA3 on Hopper."""

    def __init__(self, pool: Tensor, n_q_heads: int, windows: Sequence[int], backend: str = "auto") -> None:
        self.pool, self.n_q_heads, self._windows = pool, n_q_heads, tuple(windows)
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(make_workspace(pool.device), "NHD", backend=backend)
            for window in sorted(set(windows))
        }

    def plan(self, tables: PageTables, new_tokens: Sequence[int]) -> None:
        _, _, _, page_tokens, n_kv_heads, head_dim = self.pool.shape
        qo_indptr = torch.zeros(len(new_tokens) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(new_tokens, dtype=torch.int32), 0, out=qo_indptr[1:])
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                qo_indptr,
                tables.indptr,
                tables.indices,
                tables.last,
                self.n_q_heads,
                n_kv_heads,
                head_dim,
                page_tokens,
                causal=True,
                window_left=window - 1,
                q_data_type=self.pool.dtype,
                kv_data_type=self.pool.dtype,
            )

    def run(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        self._wrappers[self._windows[layer]].run(q, (self.pool[:, layer, 0], self.pool[:, layer, 1]), out=out)
        return out


def make_workspace(device: torch.device) -> Tensor:
    """One per wrapper whose plan lives across others': zeroed, as FlashInfer asks for its first use. Decode wrappers of all
    buckets may share one: only one of them is planned and run in a step."""
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
