"""The engine on the CPU: one model, its pages, its rows; one step in, one result out.

``launch`` computes the whole step, sampling included, so ``finish`` only hands the result over (``synchronous``). A row that
ended in step n may still be in the plan of step n + 1 (lag 1): it is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvalet.runtime.batch import Segment
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.errors import EngineError
from kvalet.runtime.forward import Forward
from kvalet.runtime.identity import identity_fields
from kvalet.runtime.kvpool import KVPool
from kvalet.runtime.loading import open_model
from kvalet.runtime.model import Decoder
from kvalet.runtime.plan import Row, RowId, RowResult, StepPlan, StepResult
from kvalet.runtime.rows import GrammarSource, RowState, TextContext
from kvalet.runtime.sampler import sample
from kvalet.runtime.spec import ModelSpec
from kvalet.runtime.threads import on_ending_thread
from kvalet.runtime.tokenizer import Tokenizer
from kvalet.runtime.weights import load_weights
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model turned into what computes, before there is a pool. ``identity``: the fields, see ``runtime.identity``."""

    spec: ModelSpec
    decoder: Decoder
    tokenizer: Tokenizer
    identity: dict[str, str]
    context_tokens: int
    weights_bytes: int


def load_model(config: EngineConfig) -> LoadedModel:
    """Read the file or folder, make the weights and the tokenizer. Raises ModelError (one sentence) or TokenizerError (names
    the field).

    Sets the process's torch thread count: one engine per process. Computes on a thread that ends (``runtime.threads``).
    """
    return on_ending_thread(lambda: _load(config))


def _load(config: EngineConfig) -> LoadedModel:
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    with open_model(config.model, cache_dir=config.cache_dir, load_format=config.load_format) as files:
        spec, tokenizer = files.spec, files.tokenizer
        mode = "bf16" if config.deterministic and config.weights == "auto" else config.weights
        weights = load_weights(files.source, spec, mode)
        digest = files.weights_digest()
    context = spec.served_context(config.context_tokens)
    fields = identity_fields(config, spec, weights=digest, path=weights.path, tokenizer=tokenizer.digest)
    decoder = Decoder(spec, weights, context + 1)
    return LoadedModel(spec, decoder, tokenizer, fields, context, weights.nbytes)


class StepEngine:
    """``sched.ports.EnginePort`` on the CPU. Driven from one thread; only ``pool.page_view`` is used from others, the copier's.

    A plan that contradicts what the engine holds (an unknown row, a hole before ``start``, more than ``max_step_tokens``)
    raises EngineError: a defect of the planner, after which the engine must not be used further.
    """

    synchronous = True

    def __init__(self, config: EngineConfig, model: LoadedModel | None = None, grammars: GrammarSource | None = None) -> None:
        """Loads the model if none is given. Raises ModelError, TokenizerError, EngineError."""
        self.config = config
        self.model = load_model(config) if model is None else model
        self.geometry = self.model.spec.geometry(config.kv_dtype)
        self.pool = KVPool(self.geometry, config.n_pages)
        self.text = TextContext(
            vocabulary=self.model.tokenizer,
            vocab_size=self.model.spec.vocab,
            end_ids=self.model.tokenizer.end_ids,
            grammars=grammars,
            forced_runs=config.forced_runs,
        )
        self.forward = on_ending_thread(lambda: Forward(config, self.model.decoder, self.pool))
        self.rows: dict[RowId, RowState] = {}

    def launch(self, plan: StepPlan) -> StepResult:
        """Apply closes, opens, page copies; compute and sample the rows. Returns the step's result."""
        started = time.perf_counter()
        for row_id in plan.closes:
            self.rows.pop(row_id, None)
            self.forward.release(row_id)
        for opened in plan.opens:
            if opened.row in self.rows:
                raise EngineError(f"row {opened.row} is opened twice")
            self.rows[opened.row] = RowState(opened, self.text)
        for source, destination in plan.page_copies:
            self.pool.copy_page(source, destination)
        work = [(row, state) for row in plan.rows if (state := self._grown(row)).ended is None]
        with torch.inference_mode():
            logits = self.forward([_segment(row, state) for row, state in work])
            computed = time.perf_counter()
            results = self._sampled(work, logits)
        ended = time.perf_counter()
        return StepResult(
            step=plan.step,
            rows=tuple(results),
            forward_ms=(computed - started) * 1e3,
            sample_ms=(ended - computed) * 1e3,
            stats=self.forward.stats(),
        )

    def finish(self, launched: StepResult) -> StepResult:
        """The result of ``launch``."""
        return launched

    def kv_digest(self, pages: Sequence[int], n_tokens: int) -> str:
        """Digest of the exact KV bytes of a page table's first ``n_tokens`` tokens (tests compare histories by it)."""
        return self.pool.digest(pages, n_tokens)

    def _grown(self, row: Row) -> RowState:
        """The row's state with its new pages appended."""
        state = self.rows.get(row.row)
        if state is None:
            raise EngineError(f"row {row.row} is in the plan but was never opened, or was closed")
        state.pages.extend(row.new_pages)
        return state

    def _sampled(self, work: Sequence[tuple[Row, RowState]], logits: Tensor) -> list[RowResult]:
        """Results in the plan's order; ``logits`` has one row per sampled row of the plan."""
        asking = [state for row, state in work if row.sample]
        choices = iter(sample(logits, [state.sampling() for state in asking]))
        results = []
        for row, state in work:
            state.kv_len = row.start + row.n
            if row.sample:
                choice = next(choices)
                results.append(state.accept(choice.token_id, choice.logprob))
            else:
                results.append(state.progress())
        return results


def _segment(row: Row, state: RowState) -> Segment:
    end = row.start + row.n
    if row.start > state.kv_len or end > len(state.ids) or row.sample != (end == len(state.ids)):
        raise EngineError(
            f"row {row.row}: [{row.start}, {end}) sample={row.sample}, but kv_len is {state.kv_len} of {len(state.ids)} ids"
        )
    ids = tuple(state.ids[row.start : end])
    return Segment(int(row.row), row.start, ids, tuple(state.pages), row.decode, row.sample)
