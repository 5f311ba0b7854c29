"""The step engine on a device: decode graphs per batch bucket, packed prefill, ids fed on the device, the host one step behind.

``launch`` queues the whole step and returns; ``finish`` waits for its event and reads its ids. Ids of rows whose logits nobody
edits are sampled on the device and never leave it on their way into the next step; rows that need edited logits (penalties,
biases, grammars, log-probabilities, min_tokens) are sampled on the host at ``finish``, so a launch that feeds such a row first
finishes the step before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.cuda_forward import Forwards
from kvalet.runtime.cuda_pool import CudaPool
from kvalet.runtime.cuda_step import RING, Launched, OpenRow, Where, Work, buckets_for
from kvalet.runtime.errors import EngineError
from kvalet.runtime.plan import Row, RowId, RowOpen, RowResult, StepPlan, StepResult, TokenLogprob
from kvalet.runtime.rows import RowState, TextContext
from kvalet.runtime.sampler import sample


class CudaEngine:
    """``sched.ports.EnginePort`` on the device of ``decoder.ops``. Driven from the engine thread only.

    ``deterministic``: every decode call has ``decode_rows`` rows, every prefill piece is a call of its own.
    """

    synchronous = False

    def __init__(
        self,
        decoder: CudaDecoder,
        pool: CudaPool,
        text: TextContext,
        *,
        max_rows: int,
        max_step_tokens: int,
        deterministic: bool = False,
        decode_rows: int = 16,
    ) -> None:
        """Captures one decode graph per bucket and computes one full step on the scratch page: seconds, once.
        ``max_rows``: rows open at once."""
        self.decoder, self.pool, self.text = decoder, pool, text
        self.rows: dict[RowId, OpenRow] = {}
        self._free_slots = list(range(max_rows, 0, -1))
        self._page_tokens = pool.geometry.page_tokens
        self._max_step_tokens = max_step_tokens
        buckets = (decode_rows,) if deterministic else buckets_for(max_rows)
        self.forwards = Forwards(decoder, self._page_tokens, max_rows=max_rows, buckets=buckets, alone=deterministic)
        self.forwards.warm_up(max_step_tokens, max_rows)
        self._ids_ring = [decoder.ops.pinned(max_rows + 1) for _ in range(RING)]
        self._previous: Launched | None = None

    def launch(self, plan: StepPlan) -> Launched:
        """Queue the step. Raises EngineError for a plan that contradicts what the engine holds, RuntimeError when the device is
        lost."""
        started = time.perf_counter()
        self.forwards.wait_planned()
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
            launched = Launched(plan, work, self._ids_ring[plan.step % RING], self.decoder.ops.event(), started)
            self.forwards.feed(work)
            self.forwards.queue(launched)
            launched.event.record()
        self._previous = launched
        return launched

    def finish(self, launched: Launched) -> StepResult:
        """Wait for the step (the device is waited on here and nowhere else) and hand its tokens to their rows."""
        self._resolve(launched)
        assert launched.result is not None
        return launched.result

    def kv_digest(self, pages: Sequence[int], n_tokens: int) -> str:
        """Digest of the exact KV bytes of a page table's first ``n_tokens`` tokens (tests compare histories by it)."""
        return self.pool.digest(pages, n_tokens)

    def _open(self, opened: RowOpen) -> None:
        if opened.row in self.rows:
            raise EngineError(f"row {opened.row} is opened twice")
        if not self._free_slots:
            raise EngineError(f"row {opened.row}: more rows are open than the engine was made for")
        state = RowState(opened, self.text)
        sampling, params = state.sampling(), opened.params
        where = Where.GREEDY if sampling.greedy else Where.DRAWN
        if not sampling.plain or params.grammar is not None or params.logprobs is not None or params.min_tokens:
            where = Where.HOST
        pages = [int(page) for page in opened.pages]
        self.rows[opened.row] = OpenRow(state, self._free_slots.pop(), pages, where, sampling.seed)

    def _work(self, plan: StepPlan) -> list[Work]:
        """The plan's rows that have not ended, their new pages appended."""
        work = []
        for row in plan.rows:
            held = self.rows.get(row.row)
            if held is None:
                raise EngineError(f"row {row.row} is in the plan but was never opened, or was closed")
            held.pages.extend(row.new_pages)
            if held.state.ended is None:
                if len(held.pages) * self._page_tokens < row.start + row.n:
                    raise EngineError(f"row {row.row}: {len(held.pages)} pages do not cover [{row.start}, {row.start + row.n})")
                work.append((row, held))
        if sum(row.n for row, _ in work) > self._max_step_tokens:
            raise EngineError(f"more than {self._max_step_tokens} tokens in one step")
        return work

    def _waits_for_host(self, row: Row, held: OpenRow) -> bool:
        """The row is fed an id that neither host nor device has yet: the host must sample the step before first."""
        return row.start + row.n > len(held.state.ids) and held.on_device != row.start

    def _resolve(self, launched: Launched) -> None:
        """Wait for the step and accept its tokens, once."""
        if launched.result is not None:
            return
        launched.event.synchronize()
        waited = time.perf_counter()
        chosen: dict[int, tuple[int, TokenLogprob | None]] = {
            i: (int(launched.ids[place]), None) for i, place in launched.sampled
        }
        chosen |= self._sampled_on_host(launched)
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
        launched.hosted.clear()
        launched.result = StepResult(
            launched.plan.step, tuple(results), (waited - launched.started) * 1e3, (ended - waited) * 1e3
        )

    def _sampled_on_host(self, launched: Launched) -> dict[int, tuple[int, TokenLogprob | None]]:
        """Index in ``work`` -> choice, of the hosted rows that go on."""
        live = [(i, logits) for i, logits in launched.hosted if launched.work[i][1].state.ended is None]
        if not live:
            return {}
        samplings = [launched.work[i][1].state.sampling() for i, _ in live]
        choices = sample(torch.stack([logits for _, logits in live]).cpu(), samplings)
        return {i: (choice.token_id, choice.logprob) for (i, _), choice in zip(live, choices, strict=True)}
