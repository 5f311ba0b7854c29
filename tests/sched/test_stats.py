"""What turns, steps and transfers report adds up."""

from __future__ import annotations

import dataclasses

import pytest
from kvalet.runtime.plan import RowId, RowResult, StepResult
from kvalet.sched.stats import MAX_WORDS, SUMMED, Stats, Tier, count, slowest_tier
from kvalet.sched.turns import EndReason, Piece, Refusal, TurnReport


@pytest.mark.parametrize(
    ("report", "tier"),
    [
        (TurnReport(computed_tokens=5), Tier.COLD),
        (TurnReport(resident_tokens=16), Tier.RESIDENT),
        (TurnReport(resident_tokens=16, ram_tokens=16), Tier.RAM),
        (TurnReport(resident_tokens=16, ram_tokens=16, disk_tokens=1), Tier.DISK),
        (TurnReport(disk_tokens=16), Tier.DISK),
    ],
)
def test_the_slowest_tier_names_the_turn(report: TurnReport, tier: Tier) -> None:
    assert slowest_tier(report) is tier


def test_every_number_of_a_report_but_its_ttft_and_divergence_is_summed() -> None:
    """A field added to TurnReport later must be added up, or left out here on purpose."""
    numbers = {field.name for field in dataclasses.fields(TurnReport)} - {"lost", "ttft_ms", "diverged_at"}
    assert set(SUMMED) == numbers


def test_ends_tiers_sums_and_ttft() -> None:
    stats = Stats()
    stats.ended(EndReason.STOP, TurnReport(prompt_tokens=10, completion_tokens=3, ram_tokens=8, ttft_ms=20.0, lost={"key": 1}))
    stats.ended(EndReason.STOP, TurnReport(prompt_tokens=5, completion_tokens=1, ttft_ms=200.0, lost={"key": 2, "io": 1}))
    stats.ended(EndReason.CANCELLED, TurnReport(prompt_tokens=7, disk_tokens=7))  # never had a token: no TTFT
    totals = stats.snapshot()
    assert totals.ended[EndReason.STOP] == 2
    assert totals.ended[EndReason.CANCELLED] == 1
    assert set(totals.ended) == set(EndReason)
    assert totals.tiers == {Tier.COLD: 1, Tier.RESIDENT: 0, Tier.RAM: 1, Tier.DISK: 1}
    assert totals.sums["prompt_tokens"] == 22
    assert totals.sums["completion_tokens"] == 4
    assert totals.ttft_ms[Tier.RAM].maximum == 20.0
    assert totals.ttft_ms[Tier.COLD].maximum == 200.0
    assert totals.ttft_ms[Tier.DISK].count == 0
    assert totals.lost == {"key": 3, "io": 1}


def test_pieces_gaps_steps_and_transfers() -> None:
    stats = Stats()
    stats.emitted(Piece((1,), "a"), None)
    stats.emitted(Piece((2, 3), "b"), 12.0)
    stats.emitted(Piece((), "late"), None)
    rows = (RowResult(RowId(1), 1), RowResult(RowId(2), 1))
    stats.stepped(StepResult(0, rows, forward_ms=5.0, sample_ms=1.0, stats={"gathered": 2.0}))
    stats.stepped(StepResult(1, (), forward_ms=7.0, stats={"gathered": 3.0}))
    stats.refused(Refusal.QUEUE_FULL)
    stats.copies_in.done(1.5, pages=4)
    stats.reads.done(2.0, n_bytes=100)
    stats.reads.failed("payload")
    totals = stats.snapshot()
    assert (totals.pieces_out, totals.tokens_out) == (3, 3)
    assert (totals.gap_ms.count, totals.gap_ms.maximum) == (1, 12.0)
    assert (totals.steps, totals.step_rows) == (2, 2)
    assert totals.forward_ms.total == 12.0
    assert totals.engine == {"gathered": 5.0}
    assert totals.refused[Refusal.QUEUE_FULL] == 1
    assert totals.transfers["ram_to_device"].pages == 4
    assert totals.transfers["disk_to_ram"].n_bytes == 100
    assert totals.transfers["disk_to_ram"].failed == {"payload": 1}
    assert totals.transfers["ram_to_disk"].done == 0


def test_a_snapshot_stays_as_it_was() -> None:
    stats = Stats()
    before = stats.snapshot()
    stats.ended(EndReason.STOP, TurnReport(prompt_tokens=1))
    stats.reads.failed("io")
    assert before.ended[EndReason.STOP] == 0
    assert before.transfers["disk_to_ram"].failed == {}
    with pytest.raises(TypeError):
        before.sums["prompt_tokens"] = 5  # type: ignore[index]


def test_unknown_words_are_bounded() -> None:
    counts: dict[str, int] = {}
    for i in range(1000):
        count(counts, f"word {i}")
        count(counts, "word 0")
    assert len(counts) == MAX_WORDS + 1
    assert counts["word 0"] == 1001
    assert sum(counts.values()) == 2000
    stats = Stats()
    for i in range(1000):
        stats.stepped(StepResult(i, (), stats={f"figure {i}": 1.0}))
    assert len(stats.snapshot().engine) == MAX_WORDS
