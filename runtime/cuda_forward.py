"""The forwards of one step: which rows go into which call, in which order calls are planned and run, ids chosen on the device.

Rows that decode one token go into a graph; prefill pieces and forced runs are one packed call. ``alone`` (deterministic mode):
every graph has the same number of rows and every piece is a call of its own, so that the bits of a row depend on nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from kvalet.runtime import device_sampler
from kvalet.runtime.cuda_batch import pack_rows
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.cuda_graphs import DecodeGraph
from kvalet.runtime.cuda_step import RING, Call, Launched, Where, Work
from kvalet.runtime.device_sampler import Draw
from kvalet.runtime.page_tables import page_tables
from kvalet.runtime.plan import SamplingParams
from torch import Tensor

HEADER = 2
"""Before the parameters of a draw: its row in the call's logits, its slot."""


class Forwards:
    """Owns the graphs, the prefill plan and ``last_ids`` [max_rows + 1] int64: the newest id of each slot (0 is nobody's)."""

    def __init__(self, decoder: CudaDecoder, page_tokens: int, *, max_rows: int, buckets: Sequence[int], alone: bool) -> None:
        """Captures one graph per bucket, the largest first."""
        self.decoder, self._ops, self._page_tokens, self._alone = decoder, decoder.ops, page_tokens, alone
        device, spec, windows = decoder.ops.device, decoder.spec, decoder.spec.windows
        self._device = device
        self.last_ids = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._prefill = self._ops.prefill_attention(decoder.pool, spec.n_q_heads, windows)
        logits = torch.zeros(max(buckets), spec.vocab, dtype=decoder.weights.head.dtype, device=device)
        self._graphs: dict[int, DecodeGraph] = {}
        for bucket in sorted(buckets, reverse=True):
            plan = self._ops.decode_attention(decoder.pool, spec.n_q_heads, bucket, windows, alone=alone)
            self._graphs[bucket] = DecodeGraph(decoder, plan, self.last_ids, page_tokens, logits)
        self._draws_ring = [self._ops.pinned((HEADER + device_sampler.FIELDS) * (max_rows + 1)) for _ in range(RING)]
        self._draws_turn = 0
        self._planned = self._ops.event()
        self._planned.record()

    def warm_up(self, n_tokens: int, max_rows: int) -> None:
        """A prefill of ``n_tokens`` tokens and draws of every kind, on the scratch page: kernels are compiled and the allocator
        gets what serving needs now, not at somebody's first request."""
        size = self._page_tokens
        rows = max(1, n_tokens // size)
        with torch.inference_mode():
            self._prefill.plan(page_tables([[0]] * rows, [size] * rows, size), [size] * rows)
            at = torch.arange(size, dtype=torch.int64, device=self._device).repeat(rows)
            hidden = self.decoder.hidden(torch.zeros_like(at), at, at, self._prefill.run)
            logits = self.decoder.logits(hidden[:max_rows])
            draws = [Draw(SamplingParams(temperature=1.0), 0, k) for k in range(logits.shape[0])]
            packed = np.zeros((device_sampler.FIELDS, len(draws)), dtype=np.int64)
            device_sampler.pack(draws, packed)
            for in_order in (False, True):
                device_sampler.draw(logits, torch.from_numpy(packed).to(self._device), in_order=in_order)
        self._planned.record()

    def wait_planned(self) -> None:
        """Until the device has read the newest step's plan: its pinned buffers may be written again."""
        self._planned.synchronize()

    def feed(self, work: Sequence[Work]) -> None:
        """Put ids that only the host knows (after an admission, or sampled there) where the decode graph reads them."""
        fed = [(held, row.start) for row, held in work if row.decode and row.n == 1 and held.on_device != row.start]
        if fed:
            pairs = torch.tensor([[h.slot for h, _ in fed], [h.state.ids[at] for h, at in fed]]).to(self._device)
            self.last_ids.index_copy_(0, pairs[0], pairs[1])

    def queue(self, launched: Launched) -> None:
        """Queue all forwards of the step.

        All is planned before anything runs, so that the host is done early. Where calls share one plan's buffers, each runs
        before the next is planned, and the next waits until this one's plan was read.
        """
        calls = self.calls(launched.work)
        if sum(call.graph is None for call in calls) <= 1 and sum(call.graph is not None for call in calls) <= 1:
            for call in calls:
                self._plan(launched, call)
            self._planned.record()
            for call in calls:
                self._run(launched, call)
            return
        for call in calls:
            self._planned.synchronize()
            self._plan(launched, call)
            self._planned.record()
            self._run(launched, call)

    def calls(self, work: Sequence[Work]) -> list[Call]:
        """Which rows are computed together: at most as many decodes as the largest graph has rows."""
        decodes = [i for i, (row, _) in enumerate(work) if row.decode and row.n == 1]
        pieces = [i for i, (row, _) in enumerate(work) if not (row.decode and row.n == 1)]
        most = max(self._graphs)
        calls = []
        for begin in range(0, len(decodes), most):
            at = decodes[begin : begin + most]
            asking = [(i, k) for k, i in enumerate(at) if work[i][0].sample]
            calls.append(Call(at, asking, self._graphs[min(b for b in self._graphs if b >= len(at))]))
        for at in [[i] for i in pieces] if self._alone else [pieces] if pieces else []:
            asks = [i for i in at if work[i][0].sample]
            calls.append(Call(at, [(i, k) for k, i in enumerate(asks)]))
        return calls

    def _plan(self, launched: Launched, call: Call) -> None:
        rows = [launched.work[i] for i in call.at]
        tables = [held.pages for _, held in rows]
        if call.graph is not None:
            call.graph.set_rows(tables, [row.start for row, _ in rows], [held.slot for _, held in rows])
        else:
            self._prefill.plan(
                page_tables(tables, [row.start + row.n for row, _ in rows], self._page_tokens), [row.n for row, _ in rows]
            )
            tokens = [(held.state.ids, held.pages, row.start, row.n) for row, held in rows]
            call.packed = torch.from_numpy(pack_rows(tokens, self._page_tokens)).to(self._device)
            ends = np.cumsum([row.n for row, _ in rows]) - 1
            picked = [(end, held.slot) for end, (row, held) in zip(ends, rows, strict=True) if row.sample]
            call.picks = torch.tensor(picked, dtype=torch.int64).view(-1, 2).t().contiguous().to(self._device)
        call.draws = self._draws(launched.work, call)

    def _draws(self, work: Sequence[Work], call: Call) -> Tensor | None:
        """int64 [HEADER + FIELDS, drawn] of the rows that are drawn on the device."""
        drawn = [(k, *work[i]) for i, k in call.asking if work[i][1].where is Where.DRAWN]
        if not drawn:
            return None
        rows = HEADER + device_sampler.FIELDS
        buffer = self._draws_ring[self._draws_turn % RING][: rows * len(drawn)].view(rows, len(drawn))
        self._draws_turn += 1
        host = buffer.numpy()
        host[0] = [k for k, _, _ in drawn]
        host[1] = [held.slot for _, _, held in drawn]
        draws = [Draw(held.state.params, held.seed, row.start + row.n) for _, row, held in drawn]
        device_sampler.pack(draws, host[HEADER:])
        return buffer.to(self._device, non_blocking=True)

    def _run(self, launched: Launched, call: Call) -> None:
        """Queue the forward, choose ids on the device, start their way to the host."""
        if call.graph is not None:
            call.graph.replay()
            logits, chosen = call.graph.logits[: len(call.at)], call.graph.next_ids[: len(call.at)]
        else:
            assert call.packed is not None
            assert call.picks is not None
            hidden = self.decoder.hidden(call.packed[0], call.packed[1], call.packed[2], self._prefill.run)
            if not call.asking:
                return
            logits = self.decoder.logits(hidden[call.picks[0]])
            chosen = logits.argmax(dim=-1)
            self.last_ids.index_copy_(0, call.picks[1], chosen)
        if call.draws is not None:
            in_order = any(device_sampler.ordered(launched.work[i][1].state.params) for i, _ in call.asking)
            ids = device_sampler.draw(logits[call.draws[0]], call.draws[HEADER:], in_order=in_order)
            chosen.index_copy_(0, call.draws[0], ids)
            self.last_ids.index_copy_(0, call.draws[1], ids)
        self._note(launched, call, logits, chosen)

    def _note(self, launched: Launched, call: Call, logits: Tensor, chosen: Tensor) -> None:
        """Copy the ids to the host, remember whose they are, and keep logits that the host samples from (a graph's are
        overwritten by the next replay)."""
        first = launched.taken
        launched.taken += chosen.shape[0]
        launched.ids[first : launched.taken].copy_(chosen, non_blocking=True)
        for i, k in call.asking:
            row, held = launched.work[i]
            if held.where is Where.HOST:
                held.on_device = -1
                launched.hosted.append((i, logits[k].clone()))
            else:
                held.on_device = row.start + row.n
                launched.sampled.append((i, first + k))
