"""Models of random tensors for the device engine and for the CPU engine, alike; and a driver that makes plans for either."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.cuda_engine import CudaEngine
from kvalet.runtime.cuda_pool import CudaPool
from kvalet.runtime.dummy import DummyTensors, ids_tokenizer
from kvalet.runtime.engine import LoadedModel, StepEngine
from kvalet.runtime.model import Decoder
from kvalet.runtime.plain_ops import PlainOps
from kvalet.runtime.plain_weights import load_plain
from kvalet.runtime.plan import PageId, Row, RowId, RowOpen, SamplingParams, StepPlan
from kvalet.runtime.rope_spec import RopeSpec
from kvalet.runtime.rows import TextContext
from kvalet.runtime.spec import ModelSpec
from kvalet.runtime.weights import load_weights

CPU = torch.device("cpu")
CONTEXT = 512
NO_ROW = RowId(0)
SMALL = ModelSpec(
    architecture="llama", name="small", n_layers=3, hidden=64, n_q_heads=4, n_kv_heads=2, head_dim=16, ffn=96, vocab=211,
    context=CONTEXT, eps=1e-5, rope=RopeSpec(10_000.0),
)  # fmt: skip


class RandomTensors(DummyTensors):
    """As dummy weights, but norms and biases are random, too, and the logits are far apart."""

    def load(self, role: str, out: torch.Tensor) -> None:
        super().load(role, out)
        generator = torch.Generator().manual_seed(zlib.crc32(role.encode()) + 1)
        if out.dim() == 1:
            noise = torch.empty(out.shape).normal_(0, 0.3, generator=generator)
            out.add_(noise.to(out))
        else:
            out.mul_(4.0 if role.startswith(("token_embd", "output.")) else 1.5)


def cpu_engine(spec: ModelSpec, n_pages: int = 200) -> StepEngine:
    """fp32."""
    config = EngineConfig(model=Path(), n_pages=n_pages, weights="fp32", arena_tokens=0)
    decoder = Decoder(spec, load_weights(RandomTensors(spec), spec, "fp32"), CONTEXT + 1)
    return StepEngine(config, LoadedModel(spec, decoder, ids_tokenizer(spec.vocab, frozenset()), {}, CONTEXT, 0))


def device_engine(spec: ModelSpec, n_pages: int = 200, **options: Any) -> CudaEngine:
    """fp32, in plain torch on the CPU; free pages are poisoned."""
    pool = CudaPool(spec.geometry("fp32"), n_pages, CPU)
    pool.poison(range(1, n_pages))
    weights = load_plain(RandomTensors(spec), spec, torch.float32, CPU)
    decoder = CudaDecoder(spec, weights, pool.pages, CONTEXT + 1, PlainOps(CPU))
    text = TextContext(ids_tokenizer(spec.vocab, frozenset()), spec.vocab, frozenset())
    return CudaEngine(decoder, pool, text, **{"max_rows": 8, "max_step_tokens": 512, **options})


@dataclass
class Session:
    """One row to be generated: its prompt, how many tokens, and what came."""

    prompt: list[int]
    n: int
    params: SamplingParams
    pages: list[int] = field(default_factory=list)
    row: RowId = NO_ROW
    fed: int = 0
    planned: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


class Driver:
    """Plays the scheduler: prefill in pieces, decode in steps with the host ``lag`` steps behind, rows that come and go. Pages
    in a random order; a page is poisoned when it is given out, which only an engine that reads too far notices."""

    def __init__(self, engine: Any, lag: int = 1, seed: int = 0, piece: int = 40) -> None:
        self.engine, self.lag, self.piece, self.rng = engine, lag, piece, random.Random(seed)
        self._steps, self._rows = itertools.count(), itertools.count(1)
        self._pages = list(range(1, engine.pool.n_pages))
        self.rng.shuffle(self._pages)
        self._in_flight: list[Any] = []

    def run(self, sessions: list[Session], at_once: int = 5) -> None:
        waiting, running, closes = list(sessions), list[Session](), list[RowId]()
        by_row: dict[RowId, Session] = {}
        while waiting or running:
            opens = []
            while waiting and len(running) < at_once:
                session = waiting.pop(0)
                session.row = RowId(next(self._rows))
                by_row[session.row] = session
                session.pages = [self._pages.pop() for _ in range(-(-(len(session.prompt) + session.n + 1) // 16))]
                self.engine.pool.poison(session.pages)
                running.append(session)
                ids = tuple(session.prompt)
                opens.append(RowOpen(session.row, ids, len(ids), 0, tuple(PageId(p) for p in session.pages), session.params))
            rows = tuple(row for session in running if (row := self._row(session)) is not None)
            self._step(StepPlan(next(self._steps), rows, tuple(opens), tuple(closes)), by_row, self.lag)
            closes = [s.row for s in running if s.ended]
            for session in [s for s in running if s.ended]:
                running.remove(session)
                self._pages += session.pages
        self._step(StepPlan(next(self._steps), (), closes=tuple(closes)), by_row, 0)

    def _row(self, session: Session) -> Row | None:
        end = len(session.prompt)
        if session.fed < end:
            n = min(self.piece, end - session.fed)
            row = Row(session.row, session.fed, n, False, session.fed + n == end)
            session.fed += n
        else:
            if session.planned >= session.n:
                return None
            row = Row(session.row, session.fed, 1, True, True)
            session.fed += 1
        session.planned += row.sample
        return row

    def _step(self, plan: StepPlan, by_row: dict[RowId, Session], lag: int) -> None:
        self._in_flight.append(self.engine.launch(plan))
        while len(self._in_flight) > lag:
            for result in self.engine.finish(self._in_flight.pop(0)).rows:
                session = by_row[result.row]
                session.ids += result.ids
                session.logprobs += [found.logprob for found in result.logprobs]
                session.ended = session.ended or result.ended_by is not None
