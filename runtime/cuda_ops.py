"""One CUDA device for the device engine: FlashInfer, the fused Triton kernel, CUDA graphs, events and pinned memory.

Importing this needs flashinfer and triton (extra ``[cuda]``); nothing else in runtime does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from kvalet.runtime import attn_flashinfer as fi
from kvalet.runtime.qkv_triton import qkv_to_pages
from torch import Tensor


class CudaOps:
    """``runtime.device_ops.DeviceOps`` on one GPU. Its graphs share one memory pool: only one of them runs at a time, and what
    they leave behind lies in buffers that the engine owns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._workspaces: dict[int, Tensor] = {}

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fi.rmsnorm(x, weight, eps)

    def add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        fi.add_rmsnorm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        return fi.silu_mul(gate_up, out)

    def qkv_to_pages(
        self,
        qkv: Tensor,
        pool: Tensor,
        layer: int,
        dest: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        norms: Tensor | None,
        eps: float,
        q_out: Tensor,
    ) -> None:
        qkv_to_pages(qkv, pool, layer, dest, positions, cos_sin, q_out.shape[1], norms, eps, q_out)

    def decode_attention(
        self, pool: Tensor, n_q_heads: int, rows: int, windows: Sequence[int], *, alone: bool
    ) -> fi.DecodePlan:
        return fi.DecodePlan(pool, n_q_heads, rows, windows, self._decode_workspaces(set(windows)), alone=alone)

    def _decode_workspaces(self, windows: set[int]) -> dict[int, Tensor]:
        """One per distinct window, shared by the buckets."""
        for window in windows:
            if window not in self._workspaces:
                self._workspaces[window] = fi.make_workspace(self.device)
        return self._workspaces

    def prefill_attention(self, pool: Tensor, n_q_heads: int, windows: Sequence[int]) -> fi.PrefillPlan:
        return fi.PrefillPlan(pool, n_q_heads, windows)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Two runs on a side stream first: kernels are compiled and libraries make their workspaces outside of the graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            step()
        return graph.replay

    def event(self, *, blocking: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=blocking)

    @contextmanager
    def copy_stream(self) -> Iterator[None]:
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            yield

    def pinned(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64).pin_memory()
