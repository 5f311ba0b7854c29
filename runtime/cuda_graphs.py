"""One captured decode step per batch bucket. Source of the technique: PyTorch's CUDA graphs; SGLang and vLLM decode so too.

All inputs are static buffers that a replay reads: positions, places and slots in one tensor, page tables in the attention plan.
Ids come from ``last_ids`` [slots] and go back there, so that consecutive greedy steps need nothing from the host but page
tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.device_ops import DecodeAttention
from kvalet.runtime.page_tables import PageTables
from torch import Tensor

STAGES = 4
"""Pinned input buffers in turn: at most two steps are in flight, and a step that replays a graph more than once waits between
its replays until the plan has been read."""


class DecodeGraph:
    """A decode step of exactly ``plan.rows`` rows; unused rows are padding on the scratch page and slot 0.

    ``next_ids`` [rows] and ``logits`` [rows, vocab] hold the newest replay's results until the next one, of any bucket: the
    logits' buffer is shared.
    """

    def __init__(self, decoder: CudaDecoder, plan: DecodeAttention, last_ids: Tensor, page_tokens: int, logits: Tensor) -> None:
        """Captures at once (writes only to the scratch page and slot 0). ``logits`` [>= rows, vocab]: the shared buffer."""
        self.decoder, self.plan, self.last_ids = decoder, plan, last_ids
        self._page_tokens = page_tokens
        self._inputs = torch.zeros(3, plan.rows, dtype=torch.int64, device=last_ids.device)
        self._stages = [decoder.ops.pinned(3, plan.rows) for _ in range(STAGES)]
        self._turn = 0
        self.logits = logits[: plan.rows]
        self.next_ids = torch.zeros(plan.rows, dtype=torch.int64, device=last_ids.device)
        self.set_rows([], [], [])
        with torch.inference_mode():
            self._replay = decoder.ops.capture(self._step)

    def _step(self) -> None:
        positions, places, slots = self._inputs
        ids = self.last_ids.index_select(0, slots)
        self.decoder.logits(self.decoder.hidden(ids, positions, places, self.plan.run), self.logits)
        torch.argmax(self.logits, dim=-1, out=self.next_ids)
        self.last_ids.index_copy_(0, slots, self.next_ids)

    def set_rows(self, pages: Sequence[Sequence[int]], positions: Sequence[int], slots: Sequence[int]) -> None:
        """The rows of the next replay: page tables, position of the fed token, place in ``last_ids``. Queues small copies.

        Raises ValueError for more rows than the bucket or a page table that does not cover its position."""
        n = len(positions)
        if n > self.plan.rows:
            raise ValueError(f"{n} rows in a bucket of {self.plan.rows}")
        for row, position in zip(pages, positions, strict=True):
            if len(row) * self._page_tokens <= position:
                raise ValueError(f"{len(row)} pages do not cover position {position}")
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
        self.plan.plan(padded_tables(pages, positions, self.plan.rows, self._page_tokens))

    def replay(self) -> None:
        self._replay()


def padded_tables(pages: Sequence[Sequence[int]], positions: Sequence[int], rows: int, page_tokens: int) -> PageTables:
    """Tables of rows that are fed one token at ``positions``, padded to ``rows`` with rows of one token on the scratch page."""
    at = np.asarray(positions, dtype=np.int64)
    padding = rows - len(pages)
    counts = np.concatenate((at // page_tokens + 1, np.ones(padding, dtype=np.int64)))
    indptr = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    flat = np.zeros(int(indptr[-1]), dtype=np.int32)
    for row, (table, count) in enumerate(zip(pages, counts, strict=False)):
        flat[indptr[row] : indptr[row] + count] = table[:count]
    last = np.concatenate((at % page_tokens + 1, np.ones(padding, dtype=np.int64))).astype(np.int32)
    return PageTables(torch.from_numpy(indptr), torch.from_numpy(flat), torch.from_numpy(last))
