"""The demo's figures: kinds of turns, gaps while KV moved, and a verdict that can say no."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvalet.api.demo_report import (
    Comparison,
    Moment,
    by_kind,
    figures,
    kind_of,
    longest_gap_s,
    moving_windows,
    summary,
    verdict,
)
from kvalet.loadtest.outcome import Outcome
from kvalet.loadtest.runner import Turn


def turn(agent: str = "a", number: int = 0, chunks: tuple[float, ...] = (0.1, 0.2), fault: str = "", **record: int) -> Turn:
    return Turn(agent, number, Outcome(0.0, 0.0, 1.0, 200, "", chunks, record=record), fault)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({}, "cold"),
        ({"computed_tokens": 9}, "cold"),
        ({"resident_tokens": 9}, "resident"),
        ({"resident_tokens": 9, "ram_tokens": 1}, "ram"),
        ({"ram_tokens": 9, "disk_tokens": 1}, "disk"),
    ],
)
def test_the_slowest_tier_names_the_kind(record: dict[str, int], kind: str) -> None:
    assert kind_of(record) == kind


def test_each_turn_is_in_one_kind() -> None:
    before = [turn(resident_tokens=5, computed_tokens=2), turn(ram_tokens=3, resident_tokens=1), turn(disk_tokens=7), turn()]
    after = [turn(disk_tokens=4, computed_tokens=6), turn(computed_tokens=8)]
    kinds = by_kind(before, after)
    assert {kind: f["count"] for kind, f in kinds.items()} == {"resident": 1, "ram": 1, "disk": 1, "restart": 2, "cold": 1}
    assert kinds["ram"]["tokens_restored"] == 3
    assert kinds["ram"]["tokens_resident"] == 1
    assert kinds["restart"]["tokens_restored"] == 4
    assert kinds["restart"]["tokens_computed"] == 14


def test_figures_of_nothing_are_null_and_json() -> None:
    assert json.loads(json.dumps(figures([])))["ttft_p50_ms"] is None


def test_figures_take_nearest_ranks() -> None:
    f = figures([turn(chunks=(k / 10, 9.0)) for k in range(1, 11)])
    assert (f["ttft_p50_ms"], f["ttft_p90_ms"]) == (500.0, 900.0)


def test_windows_are_where_chunks_moved() -> None:
    moments = [Moment(0.0, 0), Moment(1.0, 0), Moment(2.0, 5), Moment(3.0, 5), Moment(4.0, 6)]
    assert moving_windows(moments) == [(1.0, 2.0), (3.0, 4.0)]
    assert moving_windows(moments[:1]) == []


def test_the_longest_gap_counts_only_while_chunks_moved() -> None:
    turns = [turn(chunks=(0.0, 0.9)), turn(chunks=(1.0, 1.1, 1.4)), turn(chunks=(2.5, 2.9))]
    windows = [(1.0, 2.0)]
    assert longest_gap_s(turns, windows) == pytest.approx(0.3)
    assert longest_gap_s(turns, []) == 0.0
    assert longest_gap_s([turn(chunks=(0.5, 2.5))], windows) == 2.0


def good_report() -> dict[str, Any]:
    before = [turn(resident_tokens=5), turn(ram_tokens=3), turn(disk_tokens=7)]
    return {
        **by_kind(before, [turn(disk_tokens=4)]),
        "bytes": {"spilled_to_ram": 1, "spilled_to_disk": 2, "restored_from_ram": 3, "restored_from_disk": 4},
        "longest_gap_ms_while_moving": 12.0,
        "loop_lag_p50_ms": 0.1,
        "loop_lag_p99_ms": 1.0,
        "loop_lag_max_ms": 2.0,
        "requests": {"sent": 4, "ended": {"stop": 4}, "ended_once": True},
        "answers_equal": True,
        "compared": Comparison(token_for_token=4).as_json(),
        "faults": [],
    }


def test_a_good_report_has_no_fault_and_can_be_read() -> None:
    report = good_report()
    assert verdict(report) == []
    text = summary(report)
    assert "answers equal: True (4 turns token for token" in text
    assert "cold" in text


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("answers_equal",), False, "answers differ"),
        (("ram", "tokens_restored"), 0, "from RAM"),
        (("disk", "tokens_restored"), 0, "from disk"),
        (("restart", "tokens_restored"), 0, "after the restart"),
        (("requests", "ended_once"), False, "exactly once"),
        (("faults",), ["agent-01 turn 2: status 500"], "status 500"),
    ],
)
def test_each_condition_can_fail_the_demo(path: tuple[str, ...], value: object, word: str) -> None:
    report = good_report()
    place: Any = report
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert [word in why for why in verdict(report)] == [True]


def test_nothing_compared_is_not_equal() -> None:
    assert not Comparison().equal
    assert Comparison(token_for_token=1).equal
    assert not Comparison(token_for_token=1, differences=("x",)).equal
