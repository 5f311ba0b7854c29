"""The step engine on CUDA: decode graphs per batch bucket, packed prefill, ids fed on the device, the host one step behind.

``launch`` queues the whole step and returns; ``finish`` waits for its event and reads its ids. Ids of plain greedy rows are
sampled on the device and never leave it on their way into the next step; rows that need edited logits (sampling, penalties,
grammars, log-probabilities) are sampled on the host at ``finish``, so a launch that feeds such a row first finishes the step
before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from kvalet.runtime import attn_flashinfer as fi
from kvalet.runtime.attn_flashinfer import DecodePlan, PrefillPlan
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.cuda_graphs import DecodeGraph
from kvalet.runtime.cuda_pool import CudaPool
from kvalet.runtime.errors import EngineError
from kvalet.runtime.plan import Row, RowId, RowOpen, RowResult, StepPlan, StepResult, TokenLogprob
from kvalet.runtime.rows import RowState, TextContext
from kvalet.runtime.sampler import sample
from numpy.typing import NDArray
from torch import Tensor

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
RING = 4
"""Pinned buffers per kind. A step's are free again when it has finished; at most two steps are in flight."""


@dataclass(slots=True)
class _Open:
    """An open row: its text state, page table and place in ``last_ids``. ``on_device``: the position whose id stands there."""

    state: RowState
    slot: int
    pages: list[int]
    greedy: bool
    on_device: int = -1


@dataclass(slots=True)
class _Launched:
    """A step in flight. ``sampled``: (index in ``work``, index in ``ids``) of rows sampled on the device; ``hosted``: indices
    in ``work`` of those that the host samples from ``logits``, in order."""

    plan: StepPlan
    work: list[tuple[Row, _Open]]
    ids: Tensor
    event: torch.cuda.Event
    started: float
    sampled: list[tuple[int, int]] = field(default_factory=list)
    hosted: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    result: StepResult | None = None


class CudaEngine:
    """``sched.ports.EnginePort`` on one CUDA device. Driven from the engine thread only."""

    synchronous = False

    def __init__(self, decoder: CudaDecoder, pool: CudaPool, text: TextContext, *, max_rows: int, max_step_tokens: int) -> None:
        """Captures one decode graph per bucket: seconds, once. ``max_rows``: rows open at once."""
        self.decoder, self.pool, self.text = decoder, pool, text
        self.device = pool.bytes.device
        self.rows: dict[RowId, _Open] = {}
        self._free_slots = list(range(max_rows, 0, -1))
        self.last_ids = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)
        self._page_tokens = pool.geometry.page_tokens
        space = fi.workspace(self.device)
        shape = decoder.shape
        self._prefill = PrefillPlan(pool.pages, shape.n_q_heads, fi.workspace(self.device))
        limit = min((b for b in BUCKETS if b >= max_rows), default=BUCKETS[-1])
        self._graphs: dict[int, DecodeGraph] = {}
        for bucket in sorted((b for b in BUCKETS if b <= limit), reverse=True):
            plan = DecodePlan(pool.pages, shape.n_q_heads, bucket, pool.n_pages, space)
            self._graphs[bucket] = DecodeGraph(decoder, plan, self.last_ids, self._page_tokens)
        self._ids_ring = [torch.zeros(max_rows + 1, dtype=torch.int64).pin_memory() for _ in range(RING)]
        self._planned = torch.cuda.Event()
        self._planned.record()
        self._previous: _Launched | None = None
        self._max_step_tokens = max_step_tokens

    def launch(self, plan: StepPlan) -> _Launched:
        """Queue the step. Raises EngineError for a plan that contradicts what the engine holds."""
        started = time.perf_counter()
        self._planned.synchronize()  # the step before has read its pinned plan: it may be written again
        for row_id in plan.closes:
            closed = self.rows.pop(row_id, None)
            if closed is not None:
                self._free_slots.append(closed.slot)
        for opened in plan.opens:
            self._open(opened)
        with torch.inference_mode():
            for source, destination in plan.page_copies:
                self.pool.copy_page(source, destination)
            work = self._work(plan)
            if self._previous is not None and any(self._waits_for_host(row, held) for row, held in work):
                self._resolve(self._previous)
                work = [(row, held) for row, held in work if held.state.ended is None]
            launched = _Launched(plan, work, self._ids_ring[plan.step % RING], torch.cuda.Event(), started)
            self._feed(work)
            runs = (self._plan_decode(launched), self._plan_prefill(launched))
            self._planned.record()
            for run in runs:
                if run is not None:
                    run()
            launched.event.record()
        self._previous = launched
        return launched

    def finish(self, launched: _Launched) -> StepResult:
        """Wait for the step (the device is waited on here and nowhere else) and hand its tokens to their rows."""
        self._resolve(launched)
        assert launched.result is not None
        return launched.result

    def kv_digest(self, pages: Sequence[int], n_tokens: int) -> str:
        return self.pool.digest(pages, n_tokens)

    def _open(self, opened: RowOpen) -> None:
        if not self._free_slots:
            raise EngineError(f"row {opened.row}: more rows are open than the engine was made for")
        state = RowState(opened, self.text)
        sampling = state.sampling()
        params = opened.params
        greedy = (
            sampling.greedy and sampling.plain and params.grammar is None and params.logprobs is None and not params.min_tokens
        )
        self.rows[opened.row] = _Open(state, self._free_slots.pop(), [int(p) for p in opened.pages], greedy)

    def _work(self, plan: StepPlan) -> list[tuple[Row, _Open]]:
        """The plan's rows that have not ended, their new pages appended."""
        work = []
        for row in plan.rows:
            held = self.rows.get(row.row)
            if held is None:
                raise EngineError(f"row {row.row} is in the plan but was never opened, or was closed")
            held.pages.extend(row.new_pages)
            if held.state.ended is None:
                work.append((row, held))
        if sum(row.n for row, _ in work) > self._max_step_tokens:
            raise EngineError(f"more than {self._max_step_tokens} tokens in one step")
        return work

    def _waits_for_host(self, row: Row, held: _Open) -> bool:
        """The row is fed an id that neither host nor device has yet: the host must sample the step before first."""
        return row.start + row.n > len(held.state.ids) and held.on_device != row.start

    def _feed(self, work: Sequence[tuple[Row, _Open]]) -> None:
        """Put ids that only the host knows (after an admission, or sampled there) where the decode graph reads them."""
        fed = [(held, row.start) for row, held in work if row.decode and row.n == 1 and held.on_device != row.start]
        if fed:
            pairs = torch.tensor([[h.slot for h, _ in fed], [h.state.ids[at] for h, at in fed]]).to(self.device)
            self.last_ids.index_copy_(0, pairs[0], pairs[1])

    def _plan_decode(self, launched: _Launched) -> Callable[[], None] | None:
        """Plan one graph replay for all rows that decode one token; returns what runs it."""
        at = [i for i, (row, _) in enumerate(launched.work) if row.decode and row.n == 1]
        if not at:
            return None
        bucket = min((b for b in self._graphs if b >= len(at)), default=0)
        if not bucket:
            raise EngineError(f"{len(at)} decode rows; the largest graph takes {max(self._graphs)}")
        rows = [launched.work[i] for i in at]
        graph = self._graphs[bucket]
        graph.set_rows([held.pages for _, held in rows], [row.start for row, _ in rows], [held.slot for _, held in rows])

        def run() -> None:
            graph.replay()
            launched.ids[: len(at)].copy_(graph.next_ids[: len(at)], non_blocking=True)
            self._note_sampled(launched, at, range(len(at)), graph.logits)

        return run

    def _plan_prefill(self, launched: _Launched) -> Callable[[], None] | None:
        """Plan all prefill pieces (and forced runs) of the step as one packed call; returns what runs it."""
        at = [i for i, (row, _) in enumerate(launched.work) if not (row.decode and row.n == 1)]
        if not at:
            return None
        rows = [launched.work[i] for i in at]
        self._prefill.plan(
            fi.page_tables([held.pages for _, held in rows], [row.start + row.n for row, _ in rows], self._page_tokens),
            [row.n for row, _ in rows],
        )
        packed = torch.from_numpy(_packed(rows, self._page_tokens)).to(self.device)
        ends = np.cumsum([row.n for row, _ in rows]) - 1
        asking = [k for k, (row, _) in enumerate(rows) if row.sample]
        picks = torch.tensor([[ends[k], rows[k][1].slot] for k in asking], dtype=torch.int64).view(-1, 2).to(self.device)
        first = len(launched.work) - len(rows)

        def run() -> None:
            hidden = self.decoder.hidden(packed[0], packed[1], packed[2], self._prefill.run)
            if not asking:
                return
            logits = self.decoder.logits(hidden[picks[:, 0]])
            chosen = logits.argmax(dim=-1)
            self.last_ids.index_copy_(0, picks[:, 1], chosen)
            launched.ids[first : first + len(asking)].copy_(chosen, non_blocking=True)
            self._note_sampled(launched, [at[k] for k in asking], range(first, first + len(asking)), logits)

        return run

    def _note_sampled(self, launched: _Launched, at: Sequence[int], places: Sequence[int], logits: Tensor) -> None:
        """Remember where the rows' ids will be; keep logits that the host samples from (the graph's are overwritten)."""
        for k, (i, place) in enumerate(zip(at, places, strict=True)):
            row, held = launched.work[i]
            if not row.sample:
                continue
            if held.greedy:
                held.on_device = row.start + row.n
                launched.sampled.append((i, place))
            else:
                held.on_device = -1
                launched.hosted.append(i)
                launched.logits.append(logits[k].clone())

    def _resolve(self, launched: _Launched) -> None:
        """Wait for the step and accept its tokens, once."""
        if launched.result is not None:
            return
        launched.event.synchronize()
        waited = time.perf_counter()
        chosen: dict[int, tuple[int, TokenLogprob | None]] = {
            i: (int(launched.ids[place]), None) for i, place in launched.sampled
        }
        live = [i for i in launched.hosted if launched.work[i][1].state.ended is None]
        if live:
            kept = [launched.logits[launched.hosted.index(i)] for i in live]
            states = [launched.work[i][1].state for i in live]
            choices = sample(torch.stack(kept).cpu(), [state.sampling() for state in states])
            chosen |= {i: (choice.token_id, choice.logprob) for i, choice in zip(live, choices, strict=True)}
        results: list[RowResult] = []
        for i, (row, held) in enumerate(launched.work):
            state = held.state
            if state.ended is not None:
                continue
            state.kv_len = row.start + row.n
            if i in chosen:
                token_id, logprob = chosen[i]
                results.append(state.accept(token_id, logprob))
            else:
                results.append(state.progress())
        ended = time.perf_counter()
        launched.logits.clear()
        launched.result = StepResult(
            launched.plan.step, tuple(results), (waited - launched.started) * 1e3, (ended - waited) * 1e3
        )


def _packed(rows: Sequence[tuple[Row, _Open]], page_tokens: int) -> NDArray[np.int64]:
    """[3, tokens]: ids, positions and places of a packed call."""
    parts: list[NDArray[np.int64]] = []
    for row, held in rows:
        span = np.arange(row.start, row.start + row.n, dtype=np.int64)
        pages = np.asarray(held.pages, dtype=np.int64)
        ids = np.asarray(held.state.ids[row.start : row.start + row.n], dtype=np.int64)
        parts.append(np.stack((ids, span, pages[span // page_tokens] * page_tokens + span % page_tokens)))
    return np.concatenate(parts, axis=1)
