"""Adds up what turns, steps and transfers report. Counting only: no decision reads these figures.

Everything has a fixed number of series: enums, tiers and the store's fixed words for failures (bounded all the same: words
beyond ``MAX_WORDS`` are counted as "other"). Per token one histogram entry and two additions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

from kvalet.runtime.plan import StepResult
from kvalet.sched.histograms import LAG_MS, LATENCY_MS, Histogram, HistogramSnapshot
from kvalet.sched.turns import EndReason, Piece, Refusal, TurnReport

K = TypeVar("K")
V = TypeVar("V")

MAX_WORDS = 64
SUMMED = (
    "prompt_tokens", "completion_tokens", "computed_tokens", "resident_tokens", "ram_tokens", "disk_tokens",
    "recomputed_tokens", "preemptions", "bytes_from_ram", "bytes_from_disk", "queued_ms", "lookup_ms", "read_ms", "verify_ms",
    "copy_ms", "restore_ms", "prefill_ms",
)  # fmt: skip
"""Fields of ``TurnReport`` that are summed over all ended turns."""


class Tier(StrEnum):
    """The slowest tier that a turn's KV came from. ``COLD``: none, all of it was computed."""

    COLD = "cold"
    RESIDENT = "resident"
    RAM = "ram"
    DISK = "disk"


def slowest_tier(report: TurnReport) -> Tier:
    if report.disk_tokens:
        return Tier.DISK
    if report.ram_tokens:
        return Tier.RAM
    return Tier.RESIDENT if report.resident_tokens else Tier.COLD


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """One direction between two tiers. ``pages`` for copies, ``n_bytes`` for disk; ``ms`` summed, they overlap in time."""

    done: int = 0
    pages: int = 0
    n_bytes: int = 0
    ms: float = 0.0
    failed: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the start. Frozen: a copy that nobody changes any more.

    ``sums``: the fields named in ``SUMMED`` over all ended turns. ``ttft_ms``: time to first token by slowest tier, of turns
    that had one. ``gap_ms``: time between two pieces with tokens of one turn, as the scheduler handed them out; a pause
    that the reader caused is left out. ``forward_ms``, ``sample_ms``: per step. ``tick_ms``: Python time of one tick on
    the loop's thread. ``engine``: sums of ``StepResult.stats``. ``lost``: ``TurnReport.lost`` summed.
    """

    accepted: int
    refused: Mapping[Refusal, int]
    ended: Mapping[EndReason, int]
    tiers: Mapping[Tier, int]
    sums: Mapping[str, float]
    lost: Mapping[str, int]
    tokens_out: int
    pieces_out: int
    steps: int
    step_rows: int
    events: int
    ttft_ms: Mapping[Tier, HistogramSnapshot]
    gap_ms: HistogramSnapshot
    forward_ms: HistogramSnapshot
    sample_ms: HistogramSnapshot
    tick_ms: HistogramSnapshot
    engine: Mapping[str, float]
    transfers: Mapping[str, TransferCounts]


class TransferTotals:
    """A growing ``TransferCounts``."""

    def __init__(self) -> None:
        self.n_done = 0
        self.pages = 0
        self.n_bytes = 0
        self.ms = 0.0
        self._failed: dict[str, int] = {}

    def done(self, ms: float, *, pages: int = 0, n_bytes: int = 0) -> None:
        self.n_done += 1
        self.pages += pages
        self.n_bytes += n_bytes
        self.ms += ms

    def failed(self, reason: str) -> None:
        count(self._failed, reason)

    def snapshot(self) -> TransferCounts:
        return TransferCounts(self.n_done, self.pages, self.n_bytes, self.ms, frozen(self._failed))


def count(counts: dict[str, int], word: str, n: int = 1) -> None:
    """Add ``n`` to ``word``, or to "other" where MAX_WORDS other words are there already."""
    if word not in counts and len(counts) >= MAX_WORDS:
        word = "other"
    counts[word] = counts.get(word, 0) + n


def frozen(values: Mapping[K, V]) -> Mapping[K, V]:
    return MappingProxyType(dict(values))


class Stats:
    """A growing ``Totals``. Loop thread only."""

    def __init__(self) -> None:
        self.accepted = 0
        self.events = 0
        self.copies_out = TransferTotals()
        self.copies_in = TransferTotals()
        self.reads = TransferTotals()
        self.writes = TransferTotals()
        self.tick_ms = Histogram(LAG_MS)
        self._refused = dict.fromkeys(Refusal, 0)
        self._ended = dict.fromkeys(EndReason, 0)
        self._tiers = dict.fromkeys(Tier, 0)
        self._sums: dict[str, float] = dict.fromkeys(SUMMED, 0)
        self._lost: dict[str, int] = {}
        self._engine: dict[str, float] = {}
        self._ttft_ms = {tier: Histogram(LATENCY_MS) for tier in Tier}
        self._gap_ms = Histogram(LATENCY_MS)
        self._forward_ms = Histogram(LATENCY_MS)
        self._sample_ms = Histogram(LATENCY_MS)
        self._tokens_out = self._pieces_out = self._steps = self._step_rows = 0

    def emitted(self, piece: Piece, gap_ms: float | None) -> None:
        """``gap_ms``: since the turn's last piece with tokens; None for the first one and the first after a pause."""
        self._pieces_out += 1
        self._tokens_out += len(piece.ids)
        if gap_ms is not None:
            self._gap_ms.add(gap_ms)

    def refused(self, refusal: Refusal) -> None:
        self._refused[refusal] += 1

    def ended(self, reason: EndReason, report: TurnReport) -> None:
        self._ended[reason] += 1
        tier = slowest_tier(report)
        self._tiers[tier] += 1
        if report.completion_tokens:
            self._ttft_ms[tier].add(report.ttft_ms)
        for name in SUMMED:
            self._sums[name] += getattr(report, name)
        for word, n in report.lost.items():
            count(self._lost, word, n)

    def stepped(self, result: StepResult) -> None:
        self._steps += 1
        self._step_rows += len(result.rows)
        self._forward_ms.add(result.forward_ms)
        self._sample_ms.add(result.sample_ms)
        for name, value in result.stats.items():
            if name in self._engine or len(self._engine) < MAX_WORDS:
                self._engine[name] = self._engine.get(name, 0.0) + value

    def snapshot(self) -> Totals:
        return Totals(
            accepted=self.accepted,
            refused=frozen(self._refused),
            ended=frozen(self._ended),
            tiers=frozen(self._tiers),
            sums=frozen(self._sums),
            lost=frozen(self._lost),
            tokens_out=self._tokens_out,
            pieces_out=self._pieces_out,
            steps=self._steps,
            step_rows=self._step_rows,
            events=self.events,
            ttft_ms=frozen({tier: histogram.snapshot() for tier, histogram in self._ttft_ms.items()}),
            gap_ms=self._gap_ms.snapshot(),
            forward_ms=self._forward_ms.snapshot(),
            sample_ms=self._sample_ms.snapshot(),
            tick_ms=self.tick_ms.snapshot(),
            engine=frozen(self._engine),
            transfers=frozen(
                {
                    "device_to_ram": self.copies_out.snapshot(),
                    "ram_to_device": self.copies_in.snapshot(),
                    "disk_to_ram": self.reads.snapshot(),
                    "ram_to_disk": self.writes.snapshot(),
                }
            ),
        )
