"""What the device engine needs of a device: kernels, attention plans, graphs, events, pinned memory. The border between the
engine's logic and one kind of device.

``runtime.cuda_ops.CudaOps`` is the GPU (FlashInfer, Triton, CUDA graphs); ``runtime.plain_ops.PlainOps`` is plain torch on any
device, its twin: the whole engine runs on it in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from kvalet.runtime.page_tables import PageTables
from torch import Tensor


class DecodeAttention(Protocol):
    """Attention of one new token per row, for exactly ``rows`` rows; its own index buffers never move."""

    rows: int

    def plan(self, tables: PageTables) -> None:
        """Set the page tables of the next runs. Once a step."""
        ...

    def run(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        """``q`` and ``out`` [rows, q_heads, head_dim]; returns ``out``."""
        ...


class PrefillAttention(Protocol):
    """Causal attention of new tokens against their row's pages, the new tokens' K and V being in them already."""

    def plan(self, tables: PageTables, new_tokens: Sequence[int]) -> None: ...

    def run(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        """``q`` and ``out`` [sum of new tokens, q_heads, head_dim]; returns ``out``."""
        ...


class DeviceEvent(Protocol):
    """A point in the order of the device's work. ``synchronize`` raises RuntimeError when the device is lost."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class DeviceOps(Protocol):
    """``windows``: per layer how many tokens a token sees, itself included, 0 = all. ``alone``: a row's bits must not depend on
    its neighbours."""

    @property
    def device(self) -> torch.device: ...

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """In place: residual += x; x = rmsnorm(residual) * weight."""
        ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """``gate_up`` [n, 2 * ffn] -> silu(first half) * second half in ``out`` [n, ffn]."""
        ...

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
        """See ``qkv_plain.qkv_to_pages_plain``; q goes to ``q_out`` [n, q_heads, head_dim]."""
        ...

    def decode_attention(
        self, pool: Tensor, n_q_heads: int, rows: int, windows: Sequence[int], *, alone: bool
    ) -> DecodeAttention: ...

    def prefill_attention(self, pool: Tensor, n_q_heads: int, windows: Sequence[int]) -> PrefillAttention: ...

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run ``step`` (which reads and writes buffers that never move) and return what runs it again."""
        ...

    def event(self, *, blocking: bool = False) -> DeviceEvent:
        """``blocking``: whoever waits for it sleeps instead of spinning."""
        ...

    def copy_stream(self) -> AbstractContextManager[None]:
        """Inside, the calling thread's copies and events are ordered among themselves and beside all other work."""
        ...

    def pinned(self, *shape: int) -> Tensor:
        """Zeroed int64 host memory that the device copies from and to without waiting."""
        ...
