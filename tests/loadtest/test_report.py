"""Percentiles, failures apart, and the honesty of open-loop figures (case P55)."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvalet.loadtest.client import Call, Endpoint
from kvalet.loadtest.outcome import Outcome
from kvalet.loadtest.report import Spread, percentile, summarise
from kvalet.loadtest.runner import open_loop, sender
from stubserver import Step, delta, event, finish, stream, stub, usage


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1.0))
def test_percentile_is_the_least_value_that_covers_the_share(values: list[float], share: float) -> None:
    value = percentile(values, share)
    assert value in values
    assert sum(v <= value for v in values) >= share * len(values) - 1e-9
    assert sum(v < value for v in values) < share * len(values) + 1e-9


def test_percentile_of_known_values() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([7.0], 0.5) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_spread_is_in_milliseconds() -> None:
    assert Spread.of([0.001, 0.003]) == Spread(2, 1.0, 3.0, 3.0, 3.0)


def outcome(intended: float, sent: float, first: float, end: float) -> Outcome:
    return Outcome(intended, sent, end, 200, "", (first, end), finish_reasons=("stop",), output_tokens=3, prompt_tokens=5)


def test_latency_counts_from_the_intended_time() -> None:
    late = outcome(intended=10.0, sent=14.0, first=14.5, end=15.0)
    assert (late.queued_s, late.ttft_s, late.latency_s, late.s_per_token) == (4.0, 4.5, 5.0, 0.25)
    assert summarise([late]).valid


def test_a_late_client_makes_an_open_loop_run_invalid() -> None:
    outcomes = [outcome(k, k, k + 0.1, k + 0.2) for k in range(10)]
    assert summarise(outcomes, asked_rate=1.0).valid
    late = [*outcomes, outcome(10.0, 12.0, 12.1, 12.2)]
    summary = summarise(late, asked_rate=1.0)
    assert not summary.valid
    assert "2.00 s later" in summary.why_invalid
    assert "NOT VALID" in summary.table()


class StandStill:
    """Requests that arrive while the server stands still wait until it goes on."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()

    async def gate(self) -> None:
        await self.open.wait()

    async def halt(self, after_s: float, for_s: float) -> None:
        await asyncio.sleep(after_s)
        self.open.clear()
        await asyncio.sleep(for_s)
        self.open.set()


def answer(number: int, request: bytes) -> list[Step]:
    return stream((0.0, delta(content="x")), (0.0, finish()), (0.0, usage(1)), (0.0, event("[DONE]")))


@pytest.mark.alone
@pytest.mark.anyio
@pytest.mark.parametrize("limit", [0, 4])
async def test_a_server_that_stands_still_shows_in_the_tail(limit: int) -> None:
    """P55, scaled by 6 (case: 20 requests/s for 30 s, 5 s of standstill): the tail is seen with and without a limit."""
    still = StandStill()
    calls = [Call("/v1/completions", {"n": k}) for k in range(100)]
    async with stub(answer, still.gate) as url, asyncio.TaskGroup() as group:
        group.create_task(still.halt(2.0, 0.85))
        outcomes = await open_loop(sender(Endpoint.of(url)), calls, rate=20.0, limit=limit)
    summary = summarise(outcomes, asked_rate=20.0)
    assert summary.failures == {}
    assert summary.latency.p99_ms >= 0.8 * 850
    assert summary.ttft.p99_ms >= 0.8 * 850
    assert summary.asked_rate == 20.0
    assert summary.achieved_rate == pytest.approx(20.0, rel=0.15)
    if limit:
        assert summary.queued.p99_ms >= 300
        assert not summary.valid
    else:
        assert summary.queued.p90_ms < 300
