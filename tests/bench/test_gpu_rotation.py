"""The GPU's rotation, small and without a GPU: in process on plain torch, all tiers; its HTTP side against a CPU server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "api"))

import bars
import http_turns
import qwen3
import rotation
from test_build_cuda import PlainKit

JOB = rotation.Job(sessions=5, context=300, new_prompt=20, new=8, rounds=1, at_a_time=2, pool_sessions=2, ids=(10, 400))
OPTIONS = {"ram_gib": 0.1, "disk_gib": 0.25, "store": "", "piece": 256, "http": False}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = qwen3.write_folder(tmp_path / "tiny")
    small = {
        "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 128, "vocab_size": 500, "max_position_embeddings": 2048,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(qwen3.FOLDER_CONFIG | small))
    return path


def options(tier: str, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{**OPTIONS, "tier": tier, **changes})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("tier", "source"),
    [("ram", "ram_tokens"), ("all", "resident_tokens"), ("disk", "disk_tokens"), ("none", "computed_tokens")],
)
async def test_each_tier_gives_back_what_it_should(folder: Path, tmp_path: Path, tier: str, source: str) -> None:
    asked = rotation.engine_config(options(tier, store=str(tmp_path / "kv")), JOB, folder)
    asked = replace(asked, store_min_free_bytes=0)
    async with rotation.in_process(asked, PlainKit()) as side:
        rounds = await rotation.rotate(side, JOB)
    assert rounds[0]["computed_tokens"] >= 5 * 299
    assert rounds[1]["prompt_tokens"] == 5 * 328
    assert rounds[1][source] >= 2 * 256, rounds[1]
    assert rounds[1]["sessions_per_s"] > 0


@pytest.mark.anyio
async def test_over_http(folder: Path) -> None:
    asked = replace(rotation.engine_config(options("ram"), JOB, folder), device="cpu")
    async with http_turns.served(asked) as side:
        rounds = await rotation.rotate(side, JOB)
    assert rounds[1]["prompt_tokens"] == 5 * 328
    assert rounds[1]["ram_tokens"] >= 2 * 256


def test_the_folder_is_the_shape(tmp_path: Path) -> None:
    """What a server reads is what the decoder in process is made of."""
    from kvalet.runtime.loading import open_model

    with open_model(qwen3.write_folder(tmp_path), load_format="dummy") as files:
        named = replace(files.spec, name=qwen3.SPEC.name, architecture=qwen3.SPEC.architecture, template_tokens=None)
        assert named == qwen3.SPEC


def rotation_result(tier: str, gap: float, **row: float) -> dict[str, object]:
    last = {"sessions_per_s": 6.0, "ttft_p50": 0.2, "gap_p99_ms": gap, "lag_p99_ms": 1.0, **row}
    return {"options": {"tier": tier, "http": False}, "rounds": [{}, last]}


def test_bars_are_kept_or_named() -> None:
    decode = {
        "decode": [{"rows": 64, "context": 1024, "of_floor": 0.79}],
        "prefill": [{"prefill_tokens": 4096, "tokens_per_s": 39_000}],
    }
    floor, prefill = bars.bars_of(decode)
    assert (floor.kept, prefill.kept) == (False, True)
    slower_machine, faster_machine = (list(bars.bars_of(decode, rate * bars.REFERENCE_COPY))[1] for rate in (0.9, 1.1))
    assert slower_machine.bar < prefill.bar < faster_machine.bar
    assert not faster_machine.kept
    made = list(bars.bars_of(rotation_result("ram", 20.0, ttft_p50=0.31)))
    assert [bar.kept for bar in made] == [True, False, True]
    (gap,) = bars.gap_bars([rotation_result("ram", 23.1), rotation_result("all", 20.0)])
    assert not gap.kept
    assert list(bars.gap_bars([rotation_result("ram", 1.0)])) == []
    assert "MISSED" in bars.table([gap])
    through = {"options": {"tier": "decode"}, "rounds": [{"rows": 256, "context": 1024, "tokens_per_s": 14_409}]}
    assert [bar.kept for bar in bars.bars_of(through)] == [True]


def test_missed_bars_end_with_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(rotation_result("ram", 1.0)))
    bad.write_text(json.dumps(rotation_result("ram", 1.0, sessions_per_s=4.9)))
    assert bars.main([str(good)]) == 0
    assert bars.main([str(good), str(bad)]) == 1
    assert capsys.readouterr().out.count("MISSED") == 1
