"""One captured decode step per batch bucket. Source of the technique: PyTorch's CUDA graphs; SGLang and vLLM decode so too.

All inputs are static buffers that a replay reads: positions, places and slots in one tensor, page tables in the attention plan.
Ids come from ``last_ids`` [slots] and go back there, so that consecutive greedy steps need nothing from the host but page
tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from kvalet.runtime.attn_flashinfer import DecodePlan
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.page_tables import PageTables
from torch import Tensor

STAGES = 4
"""Pinned input buffers in turn: at most two steps are in flight."""


class DecodeGraph:
    """A decode step of exactly ``plan.rows`` rows; unused rows are padding on the scratch page and slot 0.

    ``next_ids`` [rows] and ``logits`` [rows, vocab] hold the newest replay's results until the next one.
    """

    def __init__(self, decoder: CudaDecoder, plan: DecodePlan, last_ids: Tensor, page_tokens: int) -> None:
        """Captures at once (writes only to the scratch page and slot 0)."""
        self.decoder, self.plan, self.last_ids = decoder, plan, last_ids
        self._page_tokens = page_tokens
        self._inputs = torch.zeros(3, plan.rows, dtype=torch.int64, device=last_ids.device)
        self._stages = [torch.zeros(3, plan.rows, dtype=torch.int64).pin_memory() for _ in range(STAGES)]
        self._turn = 0
        self.logits = torch.empty(0)
        self.next_ids = torch.empty(0)
        self._graph = torch.cuda.CUDAGraph()
        self.set_rows([], [], [])
        self._capture()

    def _step(self) -> None:
        positions, places, slots = self._inputs
        ids = self.last_ids.index_select(0, slots)
        self.logits = self.decoder.logits(self.decoder.hidden(ids, positions, places, self.plan.run))
        self.next_ids = self.logits.argmax(dim=-1)
        self.last_ids.index_copy_(0, slots, self.next_ids)

    def _capture(self) -> None:
        with torch.inference_mode():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self._graph):
                self._step()

    def set_rows(self, pages: Sequence[Sequence[int]], positions: Sequence[int], slots: Sequence[int]) -> None:
        """The rows of the next replay: page tables, position of the fed token, place in ``last_ids``. Queues small copies.

        Raises ValueError for more rows than the bucket or a page table that does not cover its position."""
        n = len(positions)
        if n > self.plan.rows:
            raise ValueError(f"{n} rows in a bucket of {self.plan.rows}")
        stage = self._stages[self._turn % STAGES]
        self._turn += 1
        host = stage.numpy()
        host[:, n:] = 0
        host[0, :n] = positions
        host[1, :n] = [
            row[p // self._page_tokens] * self._page_tokens + p % self._page_tokens
            for row, p in zip(pages, positions, strict=True)
        ]
        host[2, :n] = slots
        self._inputs.copy_(stage, non_blocking=True)
        self.plan.plan(self._tables(pages, np.asarray(positions, dtype=np.int64)))

    def _tables(self, pages: Sequence[Sequence[int]], positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> PageTables:
        """As ``page_tables.page_tables``, padded with rows of one token on the scratch page."""
        padding = self.plan.rows - len(pages)
        counts = np.concatenate((positions // self._page_tokens + 1, np.ones(padding, dtype=np.int64)))
        indptr = np.zeros(self.plan.rows + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        flat = np.zeros(int(indptr[-1]), dtype=np.int32)
        for row, (table, count) in enumerate(zip(pages, counts, strict=False)):
            flat[indptr[row] : indptr[row] + count] = table[:count]
        last = np.concatenate((positions % self._page_tokens + 1, np.ones(padding, dtype=np.int64))).astype(np.int32)
        return PageTables(torch.from_numpy(indptr), torch.from_numpy(flat), torch.from_numpy(last))

    def replay(self) -> None:
        self._graph.replay()
