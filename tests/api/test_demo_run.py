"""Sizes of the demo's small machine, its table, its scrapes, and a server that does not come up."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from kvalet.api.demo import lag_ms, main, moved_bytes, requests
from kvalet.api.demo_run import DemoPlan, Life, common_prefix, sizes_for
from kvalet.api.demo_server import Scrape, ServerError, ServerProcess, serve_command
from kvalet.api.demo_table import AgentTable
from kvalet.loadtest.outcome import Outcome
from kvalet.loadtest.runner import Turn
from kvalet.loadtest.workload import Conversation, WorkloadSpec, make_agents
from kvalet.runtime.geometry import KVGeometry
from rich.console import Console

TEXT = """# TYPE kvalet_turns_ended_total counter
kvalet_turns_ended_total{reason="stop"} 2.0
kvalet_turns_ended_total{reason="length"} 1.0
kvalet_turns_ended_total{reason="cancelled"} 0.0
# TYPE kvalet_spilled_bytes_total counter
kvalet_spilled_bytes_total{tier="ram"} 10.0
kvalet_spilled_bytes_total{tier="disk"} 20.0
# TYPE kvalet_restored_bytes_total counter
kvalet_restored_bytes_total{tier="ram"} 3.0
kvalet_restored_bytes_total{tier="disk"} 4.0
# TYPE kvalet_loop_lag_seconds gauge
kvalet_loop_lag_seconds{quantile="0.5"} 0.001
kvalet_loop_lag_seconds{quantile="0.99"} 0.002
kvalet_loop_lag_seconds{quantile="1"} 0.003
"""


def turn(agent: str, number: int, prompt: int, output: int, ids: tuple[int, ...] = (), error: str = "") -> Turn:
    outcome = Outcome(0.0, 0.0, 1.0, 200, error, (0.5,), prompt_tokens=prompt, output_tokens=output, prompt_ids=ids)
    return Turn(agent, number, outcome, error)


def test_common_prefix() -> None:
    assert common_prefix([]) == 0
    assert common_prefix([(1, 2, 3)]) == 3
    assert common_prefix([(1, 2, 3), (1, 2), (1, 2, 9)]) == 2
    assert common_prefix([(1,), (2,)]) == 0


def test_the_small_machine_holds_a_third_and_another_third() -> None:
    """Two agents that share 100 tokens and end with 3000 each hold 5900 between them."""
    plan = DemoPlan(Path("x"), WorkloadSpec(agents=2, tool_turns=1))
    shared = tuple(range(100))
    reference = [turn(a, 0, 200, 5, (*shared, n)) for n, a in enumerate("ab", 500)]
    reference += [turn(a, 1, 2900, 100) for a in "ab"]
    reference += [turn(a, 2, 9999, 9) for a in "ab"]  # the turn after the restart does not count
    geometry = KVGeometry(30, 3, 64)
    sizes = sizes_for(plan, reference, geometry)
    assert (sizes.unique_tokens, sizes.shared_tokens) == (5900, 100)
    assert 5900 / 3 - 1 <= sizes.pool_tokens < 5900 / 3 + 16
    assert sizes.ram_bytes == (5900 // 3 // geometry.chunk_tokens) * geometry.slot_bytes


def test_a_scrape_gives_values_and_never_a_made_up_zero() -> None:
    scrape = Scrape.of(TEXT)
    assert scrape.value("kvalet_spilled_bytes_total", "ram") == 10
    assert scrape.by_label("kvalet_turns_ended_total") == {"stop": 2, "length": 1, "cancelled": 0}
    assert scrape.by_label("nothing") == {}
    with pytest.raises(ServerError, match="kvalet_spilled_bytes_total"):
        scrape.value("kvalet_spilled_bytes_total", "tape")


def test_figures_add_up_over_the_lives() -> None:
    scrape = Scrape.of(TEXT)
    lives = [Life(tuple(turn("a", n, 1, 1) for n in range(3)), (), scrape)] * 2
    assert moved_bytes(lives) == {
        "spilled_to_ram": 20,
        "spilled_to_disk": 40,
        "restored_from_ram": 6,
        "restored_from_disk": 8,
    }
    assert requests(lives) == {"sent": 6, "ended": {"stop": 4, "length": 2}, "ended_once": True}
    assert lag_ms([scrape]) == {"loop_lag_p50_ms": 1.0, "loop_lag_p99_ms": 2.0, "loop_lag_max_ms": 3.0}


@pytest.mark.parametrize(
    "turns", [[turn("a", 0, 1, 1)], [turn("a", n, 1, 1, error="no finish reason" if n else "") for n in range(3)]]
)
def test_a_request_that_ended_twice_or_never_is_seen(turns: list[Turn]) -> None:
    assert not requests([Life(tuple(turns), (), Scrape.of(TEXT))])["ended_once"]


def test_the_table_shows_a_turn() -> None:
    talk = Conversation(make_agents(WorkloadSpec(agents=1))[0], "m")
    out = io.StringIO()
    done = Turn(
        talk.script.name,
        0,
        Outcome(0.0, 0.0, 1.0, 200, "", (0.25,), prompt_tokens=9, record={"ram_tokens": 4, "computed_tokens": 5}),
        "",
    )
    with AgentTable([talk.script.name], "title", Console(file=out, width=200)) as table:
        table.waiting(talk, 1.0)
        assert table.rows[talk.script.name].state == "tool runs"
        table.sent(talk)
        table.content(talk, 0.0)
        table.finished(talk, done)
    assert "title" in out.getvalue()
    assert "agent-01 turn 1: 9 tokens = 0 resident + 4 from RAM + 0 from disk + 5 computed" in out.getvalue()
    assert "after 250 ms" in out.getvalue()
    Console(file=out, width=200).print(table.render())
    assert "TTFT ms" in out.getvalue()


def test_the_table_in_a_terminal_is_redrawn() -> None:
    out = io.StringIO()
    with AgentTable(["a"], "t", Console(file=out, force_terminal=True, width=120)):
        pass
    assert "TTFT ms" in out.getvalue()


@pytest.mark.anyio
async def test_a_server_that_does_not_come_up_is_an_error_with_its_words(tmp_path: Path) -> None:
    server = ServerProcess(serve_command([str(tmp_path / "nothing.gguf")]))
    with pytest.raises(ServerError, match="ended before it listened"):
        await server.__aenter__()
    assert "nothing.gguf" in server.log


def test_a_model_that_is_no_model_ends_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    assert main([str(bad), "--report", str(tmp_path / "r.json")]) == 1
    assert "kvalet demo:" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
