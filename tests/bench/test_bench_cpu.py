"""The CPU benchmark's own arithmetic, and one real round of it against kvalet with short prompts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_cpu", Path(__file__).parent / "bench_cpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load()


def result(steady: float, cold_ms: float) -> dict[str, Any]:
    batch = {"steady": steady, "gap_ms": 10.0, "end_to_end": steady / 2, "ttft_ms": 5.0, "window_s": 1.0}
    return {
        "batches": {str(n): {"steady": batch, "cold": batch} for n in bench.SESSIONS},
        "ttft_2048_ms": {"cold": cold_ms, "warm": cold_ms / 10},
        "peak_mb": 900.0,
    }


def test_ratios_are_ours_over_the_peers() -> None:
    ratios = bench.ratios({"kvalet": result(200.0, 100.0), "xllamacpp": result(100.0, 1000.0)})
    assert ratios == {"steady_1": 2.0, "steady_4": 2.0, "steady_16": 2.0, "ttft_2048_cold": 0.1, "ttft_2048_warm": 0.1}


def test_the_table_has_a_line_per_engine() -> None:
    text = bench.table({"kvalet": result(200.0, 100.0), "xllamacpp": result(100.0, 1000.0)})
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["kvalet", "xllamacpp"]
    assert "200.0" in lines[2]
    assert "100 / 10" in lines[2]


def test_prompts_are_the_same_for_every_engine() -> None:
    first, again = (bench.prompt(bench.random.Random("bench/1"), 256) for _ in range(2))
    assert first == again
    assert len(first) == 256
    assert all(bench.FIRST_ID <= token < bench.LAST_ID for token in first)


def test_commands_take_more_settings_for_kvalet_only() -> None:
    commands = bench.commands(bench.parser().parse_args(["--serve", "weights=int4", "deterministic"]), Path("m.gguf"))
    assert [w for w in commands["kvalet"] if w.startswith(("--w", "int4", "--det"))] == ["--weights", "int4", "--deterministic"]
    assert "--weights" not in commands["xllamacpp"]
    only = bench.parser().parse_args(["--only", "kvalet"])
    assert list(bench.commands(only, Path("m.gguf"))) == ["kvalet"]


def test_one_real_round(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole benchmark, small. It must end with 0 and its JSON must hold what docs/numbers.md is made from."""
    for name, value in {"PROMPT_TOKENS": 24, "NEW_TOKENS": 6, "LONG_TOKENS": 64, "SESSIONS": (1, 2)}.items():
        monkeypatch.setattr(bench, name, value)
    target = tmp_path / "bench.json"
    words = ["--model", str(model_path), "--only", "kvalet", "--repeats", "1", "--json", str(target)]
    assert bench.main(words) == 0, capsys.readouterr().err
    report = json.loads(target.read_bytes())
    engine = report["engines"]["kvalet"]
    assert set(engine["batches"]) == {"1", "2"}
    assert engine["batches"]["2"]["cold"]["end_to_end"] > 0
    assert engine["ttft_2048_ms"]["cold"] > 0
    assert engine["peak_mb"] > 100
    assert "kvalet" in capsys.readouterr().out


def test_a_server_that_fails_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no model")
    assert bench.main(["--model", str(bad), "--only", "kvalet", "--json", str(tmp_path / "b.json")]) == 1
    assert "bench-cpu:" in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()
