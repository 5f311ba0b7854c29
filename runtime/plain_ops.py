"""The device engine's needs in plain torch, on any device: the twin of ``runtime.cuda_ops``, and what its tests run on.

Nothing is in flight here: an event has always happened, a graph is its function. Buffers that never move on the GPU do not move
here either, so what reads them too late is wrong here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from kvalet.runtime.page_tables import PageTables
from kvalet.runtime.qkv_plain import qkv_to_pages_plain
from torch import Tensor
from torch.nn import functional


class PlainEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class PlainAttention:
    """Both kinds of attention: dense, per row, in fp32, over exactly the pages and offsets of the row."""

    def __init__(self, pool: Tensor, n_q_heads: int, windows: Sequence[int], rows: int = 0) -> None:
        self.rows = rows
        self._pool, self._windows = pool, tuple(windows)
        self._group = n_q_heads // pool.shape[4]
        self._rows: list[tuple[Tensor, int, int]] = []

    def plan(self, tables: PageTables, new_tokens: Sequence[int] | None = None) -> None:
        """``new_tokens`` None: one per row."""
        page_tokens = self._pool.shape[3]
        bounds = tables.indptr.tolist()
        counts = list(new_tokens) if new_tokens is not None else [1] * (len(bounds) - 1)
        self._rows = []
        for begin, end, last, new in zip(bounds, bounds[1:], tables.last.tolist(), counts, strict=False):
            pages = tables.indices[begin:end].long().to(self._pool.device)
            self._rows.append((pages, (end - begin - 1) * page_tokens + last, new))

    def run(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        window, at = self._windows[layer], 0
        for pages, length, new in self._rows:
            kv = self._pool[pages, layer].transpose(0, 1).flatten(1, 2)[:, :length].float()
            k, v = kv.repeat_interleave(self._group, dim=2).unbind(0)
            scores = torch.einsum("qhd,khd->hqk", q[at : at + new].float(), k) * q.shape[-1] ** -0.5
            behind = torch.arange(length - new, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
            hidden = (behind < 0) | (behind >= window) if window else behind < 0
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[at : at + new] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
            at += new
        return out


class PlainOps:
    """``runtime.device_ops.DeviceOps`` without kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        residual.add_(x)
        x.copy_(self.rmsnorm(residual, weight, eps))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return out.copy_(functional.silu(gate).mul_(up))

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
        q_out.copy_(qkv_to_pages_plain(qkv, pool, layer, dest, positions, cos_sin, q_out.shape[1], norms, eps))

    def decode_attention(
        self, pool: Tensor, n_q_heads: int, rows: int, windows: Sequence[int], *, alone: bool
    ) -> PlainAttention:
        return PlainAttention(pool, n_q_heads, windows, rows)

    def prefill_attention(self, pool: Tensor, n_q_heads: int, windows: Sequence[int]) -> PlainAttention:
        return PlainAttention(pool, n_q_heads, windows)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return step

    def event(self, *, blocking: bool = False) -> PlainEvent:
        return PlainEvent()

    def copy_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pinned(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)
