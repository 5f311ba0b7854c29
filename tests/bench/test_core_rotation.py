"""The modelled rotation runs, restores what it says, and its machine keeps the rules that its figures rest on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the benchmarks import each other by name

from core_rotation import NEW, NEW_PROMPT, Rotation
from rotation_model import Costs, Machine, runs_of

CALM = replace(Costs(), cpu_scale=0.0)
"""The loop's CPU time does not count: what is left is the same on every machine."""


def run(sessions: int, pool: int) -> dict[str, Any]:
    return Rotation(sessions, pool, CALM, context=512).run()


def test_sessions_come_back_from_ram_and_only_what_is_new_is_computed() -> None:
    result = run(10, 2)
    returns = result["rounds"][1:]
    for row in returns:
        assert row["computed"] + row["ram"] > 0
        assert row["computed"] < 10 * (NEW_PROMPT + NEW)
        assert row["ttft_p99"] >= row["ttft_p50"] > 0
        assert row["gap_p99_ms"] >= row["gap_p50_ms"] >= 5.0
    assert sum(row["ram"] for row in returns) > 10 * 256
    assert {"CopyDone", "StepDone", "Submit", "decide", "plan"} <= set(result["core_us"])


def test_a_pool_that_holds_all_moves_nothing() -> None:
    result = run(4, 4)
    assert all(row["ram"] == 0 for row in result["rounds"])
    assert "CopyDone" not in result["core_us"]


def test_a_thread_gets_the_lock_when_the_loop_waits_or_after_the_switch_interval() -> None:
    machine = Machine(CALM)
    said: list[tuple[str, float]] = []
    machine.with_lock(1.0, 0.5, lambda at: said.append(("forced", at)))
    machine.catch_up(1.0 + CALM.switch_s / 2)
    assert said == []
    machine.catch_up(2.0)
    assert said == [("forced", pytest.approx(1.0 + CALM.switch_s + 0.5))]
    machine.with_lock(machine.now(), 0.25, lambda at: said.append(("idle", at)))
    began = machine.now()
    machine.pause(3.0, lambda: len(said) == 2)
    assert said[1][0] == "idle"
    assert said[1][1] <= max(began, 1.0 + CALM.switch_s + 0.5) + 0.25 + 1e-9


def test_runs_of_neighbours() -> None:
    assert [runs_of(pages) for pages in ((), (4,), (4, 5, 6), (4, 6, 5), (1, 2, 4, 5))] == [0, 1, 1, 3, 2]
