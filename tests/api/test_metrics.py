"""/metrics: the page parses, figures are those of the engine, and a defect in one never costs an answer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
from asgi import CHAT, CHAT_PATH, client, error_of, whole
from kvalet.api.engine_metrics import engine_families
from kvalet.api.memory_plan import MemoryPlan
from kvalet.api.metrics import ServerMetrics
from kvalet.api.tier_metrics import CORE_COUNTERS, REASONS
from kvalet.runtime.plan import StepResult
from kvalet.sched.counters import CoreStatistics, Counters
from kvalet.sched.histograms import LAG_MS, Histogram
from kvalet.sched.lag_meter import LagStatistics
from kvalet.sched.pages import PageStatistics
from kvalet.sched.stats import Stats
from kvalet.sched.status import SchedulerStatistics
from kvalet.sched.turns import EndReason, Piece, TurnReport
from kvalet.store.ram import RamStatistics
from kvalet.store.stats import StoreStatistics
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import Model, ScriptedEngine

PAGE_BYTES = 1000


@dataclass(frozen=True)
class Statistics:
    """As ``api.engine.EngineStatistics``."""

    scheduler: SchedulerStatistics
    memory: MemoryPlan | None = None
    store: StoreStatistics | None = None


def scheduler(stats: Stats, core: Any = None) -> SchedulerStatistics:
    lag = Histogram(LAG_MS)
    for lag_ms in (1.0, 2.0, 50.0):
        lag.add(lag_ms)
    return SchedulerStatistics(
        open_turns=2, blocked_turns=1, waiting_postings=0, steps_in_flight=1, transfers_in_flight=3, duplicate_answers=0,
        closing=False, device_lost=None, violation=None, totals=stats.snapshot(),
        lag=LagStatistics(lag.snapshot(), lag.snapshot()), stalled_s=0.0, core=core,
    )  # fmt: skip


def a_day() -> Stats:
    stats = Stats()
    stats.accepted = 3
    report = TurnReport(
        prompt_tokens=100, completion_tokens=7, computed_tokens=20, resident_tokens=30, ram_tokens=10, disk_tokens=40,
        bytes_from_ram=10, bytes_from_disk=40, queued_ms=500.0, ttft_ms=250.0, lost={"digest": 2},
    )  # fmt: skip
    stats.ended(EndReason.STOP, report)
    stats.ended(EndReason.CANCELLED, TurnReport(prompt_tokens=5, computed_tokens=5))
    stats.emitted(Piece((1, 2), "x"), 20.0)
    stats.stepped(StepResult(1, (), 30.0, 1.0))
    stats.copies_out.done(1.0, pages=4)
    stats.writes.done(1.0, n_bytes=5000)
    stats.writes.failed("enospc")
    return stats


def core() -> CoreStatistics:
    counters = {item.name: getattr(Counters(), item.name) for item in fields(Counters)}
    counters.update({name: {} for name in REASONS})
    counters.update(spilled_chunks=6, write_failures={"enospc": 1}, ended={})
    return CoreStatistics(
        turns={"queued": 3, "decoding": 2, "paused": 1}, queue_length=3, steps_in_flight=1,
        pages=PageStatistics(100, 40, 55, 5), idle_pages=20, ram=RamStatistics(10, 1, 2, 3, 4),
        staging=RamStatistics(3, 3, 0, 0, 0), chunks=9, sessions=4, transfers={"spill": 1}, counters=counters,
        draining=False, device_lost=False,
    )  # fmt: skip


def store() -> StoreStatistics:
    values: dict[str, Any] = {item.name: index for index, item in enumerate(fields(StoreStatistics))}
    values.update(
        refusals=(("digest", "payload", 2),), failures=(("enospc", 1),), direct=True, why_buffered="", write_breaker="",
        read_breaker_open=False,
    )  # fmt: skip
    return StoreStatistics(**values)


def plan() -> MemoryPlan:
    values: dict[str, Any] = {item.name: 0 for item in fields(MemoryPlan)}
    values.update(n_pages=101, pool_tokens=1600, pool_bytes=101 * PAGE_BYTES, notes=())
    return MemoryPlan(**values)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def rendered(statistics: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    _, text = ServerMetrics(ScriptedEngine(statistics_value=statistics)).render()
    return samples(text.decode())


def test_figures_of_the_engine() -> None:
    found = rendered(Statistics(scheduler(a_day(), core()), plan(), store()))
    model = ("model_name", "m")
    for name, labels, value in (
        ("kvalet_turns_ended_total", (("reason", "stop"),), 1),
        ("kvalet_turns_ended_total", (("reason", "internal"),), 0),
        ("kvalet_turns_by_tier_total", (("tier", "disk"),), 1),
        ("kvalet_prompt_tokens_total", (("source", "computed"),), 25),
        ("kvalet_prompt_tokens_total", (("source", "disk"),), 40),
        ("kvalet_restored_bytes_total", (("tier", "ram"),), 10),
        ("kvalet_spilled_bytes_total", (("tier", "ram"),), 4 * PAGE_BYTES),
        ("kvalet_spilled_bytes_total", (("tier", "disk"),), 5000),
        ("kvalet_stage_seconds_total", (("stage", "queued"),), 0.5),
        ("kvalet_kv_lost_total", (("reason", "digest"),), 2),
        ("kvalet_time_to_first_token_seconds_sum", (("tier", "disk"),), 0.25),
        ("kvalet_token_gap_seconds_count", (), 1),
        ("kvalet_loop_lag_seconds", (("quantile", "1"),), 0.05),
        ("kvalet_transfer_failures_total", (("direction", "ram_to_disk"), ("reason", "enospc")), 1),
        ("kvalet_open_turns", (), 2),
        ("kvalet_streamed_tokens_total", (), 2),
        ("kvalet_turns", (("state", "paused"),), 1),
        ("kvalet_pages", (("state", "leased"),), 5),
        ("kvalet_ram_slots", (("state", "dirty"),), 4),
        ("kvalet_write_failures_total", (("reason", "enospc"),), 1),
        ("kvalet_disk_files", (), 0),
        ("kvalet_disk_refusals_total", (("field", "payload"), ("reason", "digest")), 2),
        ("vllm:num_requests_running", (model,), 3),
        ("vllm:num_requests_waiting", (model,), 3),
        ("vllm:kv_cache_usage_perc", (model,), 0.4),
        ("vllm:prefix_cache_queries_total", (model,), 105),
        ("vllm:prefix_cache_hits_total", (model,), 30),
        ("vllm:external_prefix_cache_queries_total", (model,), 75),
        ("vllm:external_prefix_cache_hits_total", (model,), 50),
        ("vllm:request_success_total", (("finished_reason", "stop"), model), 1),
        ("vllm:cache_config_info", (("block_size", "16"), model, ("num_gpu_blocks", "100")), 1),
    ):
        assert found[(name, tuple(sorted(labels)))] == pytest.approx(value), name


def test_names_are_not_given_twice() -> None:
    names = [family.name for family in engine_families(Statistics(scheduler(a_day(), core()), plan(), store()), Model())]
    assert len(names) == len(set(names))


def test_every_core_counter_is_shown() -> None:
    """Those without a line of their own here are shown by other families, or are inner figures."""
    elsewhere = {"events", "steps", "accepted", "refused", "ended", "preemptions", "written_bytes", "read_bytes",
                 "stale_results"}  # fmt: skip
    assert {item.name for item in fields(Counters)} == set(CORE_COUNTERS) | set(REASONS) | elsewhere


def test_histograms_are_cumulative_and_in_seconds() -> None:
    found = rendered(Statistics(scheduler(a_day())))
    buckets = [
        (float(dict(labels)["le"]), value)
        for (name, labels), value in found.items()
        if name == "kvalet_time_to_first_token_seconds_bucket" and dict(labels)["tier"] == "disk"
    ]
    buckets.sort()
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    assert next(bound for bound, value in buckets if value == 1) == pytest.approx(0.25, rel=0.31)
    assert buckets[-1][1] == 1


def test_counters_never_fall() -> None:
    """P42: also when the engine once reports nonsense."""
    stats = a_day()
    engine = ScriptedEngine(statistics_value=Statistics(scheduler(stats)))
    metrics = ServerMetrics(engine)
    before = samples(metrics.render()[1].decode())
    stats.ended(EndReason.STOP, TurnReport(prompt_tokens=10, computed_tokens=-5))
    engine.statistics_value = Statistics(scheduler(stats))
    after = samples(metrics.render()[1].decode())
    for key, value in before.items():
        if key[0].endswith(("_total", "_count", "_bucket")):
            assert after[key] >= value, key
    assert after[("kvalet_prompt_tokens_total", (("source", "computed"),))] == 25
    assert after[("kvalet_turns_ended_total", (("reason", "stop"),))] == 2


def test_an_idle_pool_is_unused() -> None:
    """P42: cached pages that nobody stands on are no use of the pool."""
    idle = CoreStatistics(**{**{f.name: getattr(core(), f.name) for f in fields(CoreStatistics)}, "turns": {}, "idle_pages": 60,
                             "pages": PageStatistics(100, 40, 60, 0)})  # fmt: skip
    found = rendered(Statistics(scheduler(a_day(), idle)))
    assert found[("vllm:kv_cache_usage_perc", (("model_name", "m"),))] == 0.0
    assert found[("vllm:num_requests_running", (("model_name", "m"),))] == 0


def test_a_defect_leaves_the_rest_of_the_page(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(statistics_value=RuntimeError("defect"))
    metrics = ServerMetrics(engine)
    content_type, text = metrics.render()
    assert content_type.startswith("text/plain")
    assert b"kvalet_http_requests" in text
    assert "figures are missing" in caplog.text


@pytest.mark.anyio
async def test_requests_are_counted_by_path_and_status() -> None:
    async with client(ScriptedEngine()) as http:
        await whole(http, CHAT_PATH, CHAT)
        await http.post(CHAT_PATH, json={})
        for name in ("/a", "/b", "/c"):
            await http.request("BREW", name)
        found = samples((await http.get("/metrics")).text)
    requests = {labels: value for (name, labels), value in found.items() if name == "kvalet_http_requests_total"}
    assert requests[(("method", "POST"), ("path", CHAT_PATH), ("status", "200"))] == 1
    assert requests[(("method", "POST"), ("path", CHAT_PATH), ("status", "400"))] == 1
    assert requests[(("method", "other"), ("path", "other"), ("status", "404"))] == 3


@pytest.mark.anyio
async def test_counting_that_fails_touches_no_answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(self: object, exchange: object) -> None:
        raise ValueError("no counting today")

    monkeypatch.setattr(ServerMetrics, "observe", fails)
    async with client(ScriptedEngine()) as http:
        await whole(http, CHAT_PATH, CHAT)
        reply = await http.post(CHAT_PATH, json={})
    assert error_of(reply)["param"] == "model"
    assert "could not be counted" in caplog.text
