"""Drives a StepEngine by hand, as a scheduler would: turns with page tables, pieces, decodes; free pages poisoned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tinymodel
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel, StepEngine, load_model
from kvalet.runtime.plan import PageId, Row, RowId, RowOpen, RowResult, SamplingParams, StepPlan

_ROW_IDS = itertools.count(1_000)
"""Row ids are never reused, not even by another stepper on the same engine."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)


def tiny_model(
    folder: Path, weights: str = "fp32", *, tiny: tinymodel.Tiny | None = None, deterministic: bool = False
) -> tuple[EngineConfig, LoadedModel]:
    """A small model of random weights, loaded; one thread (it is too small for more)."""
    path = folder / "tiny.gguf"
    if not path.exists():
        tinymodel.write(path, tiny or tinymodel.Tiny())
    config = EngineConfig(path, n_pages=200, weights=weights, threads=1, deterministic=deterministic, decode_rows=4)
    return config, load_model(config)


@dataclass
class Driven:
    """One open row: its pages in order, what it has accepted, how far its KV goes."""

    row: RowId
    ids: list[int]
    pages: list[PageId]
    params: SamplingParams
    n_prompt: int
    kv_len: int = 0
    accepted: list[int] = field(default_factory=list)
    ended: bool = False
    opened: bool = False


class Stepper:
    """``free``: the pages nobody has, taken from the end. Pages are poisoned when they come back."""

    def __init__(self, engine: StepEngine, free: Sequence[int] | None = None) -> None:
        self.engine = engine
        self.free = list(range(engine.config.n_pages - 1, 0, -1)) if free is None else list(free)
        self.engine.pool.poison(range(engine.config.n_pages))
        self._step = 0

    def turn(self, ids: Sequence[int], params: SamplingParams = GREEDY, kv: Driven | None = None, kv_len: int = 0) -> Driven:
        """A new row; with ``kv`` it takes over that row's pages, whose first ``kv_len`` tokens it keeps."""
        pages = list(kv.pages) if kv is not None else []
        return Driven(RowId(next(_ROW_IDS)), list(ids), pages, params, len(ids), kv_len=kv_len)

    def step(self, *parts: tuple[Driven, int], decode: bool | None = None) -> list[RowResult]:
        """One step: (row, tokens to feed). A row whose prompt is in by then samples."""
        opens, rows = [], []
        for row, n in parts:
            new = self._grow(row, row.kv_len + n)
            if not row.opened:
                row.opened = True
                opens.append(RowOpen(row.row, tuple(row.ids), row.n_prompt, row.kv_len, tuple(row.pages), row.params))
                new = ()
            is_decode = row.kv_len >= row.n_prompt if decode is None else decode
            rows.append(Row(row.row, row.kv_len, n, is_decode, row.kv_len + n == len(row.ids), new))
        result = self.engine.finish(self.engine.launch(StepPlan(self._step, tuple(rows), tuple(opens))))
        assert result.step == self._step
        self._step += 1
        by_row = {row.row: row for row, _ in parts}
        for found in result.rows:
            driven = by_row[found.row]
            driven.kv_len = found.kv_len
            driven.ids += found.ids
            driven.accepted += found.ids
            driven.ended = found.ended_by is not None
        return list(result.rows)

    def prefill(self, row: Driven, piece: int = 10_000) -> Driven:
        while row.kv_len < row.n_prompt:
            self.step((row, min(piece, row.n_prompt - row.kv_len)))
        return row

    def decode(self, rows: Sequence[Driven], steps: int) -> None:
        for _ in range(steps):
            self.step(*[(row, 1) for row in rows])

    def close(self, row: Driven, *, keep_pages: bool = False) -> None:
        self.engine.launch(StepPlan(self._step, (), closes=(row.row,)))
        self._step += 1
        if not keep_pages:
            self.engine.pool.poison(row.pages)
            self.free += row.pages
            row.pages = []

    def move(self, row: Driven) -> list[PageId]:
        """The row's pages copied elsewhere and the old ones poisoned: what a spill and a restore do to it."""
        assert not row.opened, "move between rows, as the scheduler does"
        moved = [self._take() for _ in row.pages]
        for source, destination in zip(row.pages, moved, strict=True):
            self.engine.pool.copy_page(source, destination)
        self.engine.pool.poison(row.pages)
        self.free = [*row.pages, *self.free]
        row.pages = moved
        return moved

    def digest(self, row: Driven, n_tokens: int) -> str:
        return self.engine.kv_digest(row.pages, n_tokens)

    def _take(self) -> PageId:
        return PageId(self.free.pop())

    def _grow(self, row: Driven, n_tokens: int) -> tuple[PageId, ...]:
        new = []
        while (len(row.pages) + len(new)) * self.engine.geometry.page_tokens < n_tokens:
            new.append(self._take())
        row.pages += new
        return tuple(new)


def alone(engine: StepEngine, ids: Sequence[int], steps: int, piece: int = 10_000) -> list[int]:
    """What a row answers with nobody beside it."""
    stepper = Stepper(engine)
    row = stepper.prefill(stepper.turn(ids), piece)
    stepper.decode([row], steps - 1)
    stepper.close(row)
    return row.accepted
