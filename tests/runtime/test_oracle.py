"""The reference of tests/oracles: fp32 equal, reduced modes within the thresholds that were measured for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel, StepEngine, load_model
from kvalet.runtime.teacher import forced_logits
from stepping import Stepper

ORACLE = json.loads((Path(__file__).parent.parent / "oracles" / "smollm2_reference.json").read_text())
CASES: list[dict[str, Any]] = ORACLE["cases"]
AGREE, MARGIN = 300, 0.75


def load(model_path: Path, weights: str) -> tuple[EngineConfig, LoadedModel]:
    config = EngineConfig(model_path, n_pages=120, weights=weights, arena_tokens=8192)
    return config, load_model(config)


@pytest.fixture(scope="module")
def fp32(model_path: Path) -> tuple[EngineConfig, LoadedModel]:
    return load(model_path, "fp32")


def test_fp32_ids_are_the_references_in_one_batch(fp32: tuple[EngineConfig, LoadedModel]) -> None:
    """All cases at once through the engine: mixed steps, contiguous copies, page borders, poisoned free pages."""
    stepper = Stepper(StepEngine(*fp32))
    rows = [stepper.turn(case["prompt_ids"]) for case in CASES]
    stepper.step(*[(row, row.n_prompt) for row in rows])
    stepper.decode(rows, 63)
    for row, case in zip(rows, CASES, strict=True):
        assert row.accepted == case["greedy_ids_64_ignoring_eos"]


def test_fp32_first_logits_are_the_references(fp32: tuple[EngineConfig, LoadedModel]) -> None:
    for case in CASES:
        (logits,) = forced_logits(fp32[1].decoder, [*case["prompt_ids"], 0], len(case["prompt_ids"]), "fp32")
        for token_id, value, _ in case["first_step_top5"]:
            assert abs(float(logits[token_id]) - value) < 1e-3, (token_id, value)
        assert int(logits.argmax()) == case["first_step_top5"][0][0]


def agreement(logits: torch.Tensor, reference: list[int]) -> tuple[int, float]:
    """How often the reference's token is the largest, and how far below the largest it is at worst."""
    ids = torch.tensor(reference)
    behind = logits.max(dim=-1).values - logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    return int((logits.argmax(-1) == ids).sum()), float(behind.max())


@pytest.mark.parametrize("weights", ["bf16", "int4", "auto"])
def test_reduced_weights_agree_when_teacher_forced(model_path: Path, weights: str) -> None:
    _, model = load(model_path, weights)
    results = []
    for case in CASES:
        prompt, reference = case["prompt_ids"], case["greedy_ids_64_ignoring_eos"]
        results.append(agreement(forced_logits(model.decoder, prompt + reference, len(prompt), "bf16"), reference))
    assert sum(equal for equal, _ in results) >= AGREE, results
    assert max(behind for _, behind in results) <= MARGIN, results


@pytest.mark.parametrize("weights", ["bf16", "auto"])
def test_reduced_weights_agree_on_the_decode_path(model_path: Path, weights: str) -> None:
    """The same threshold where it matters: one token a step over the contiguous copies (auto: int4 weights)."""
    engine = StepEngine(*load(model_path, weights))
    equal, behind = 0, 0.0
    for case in CASES:
        stepper = Stepper(engine)
        reference = case["greedy_ids_64_ignoring_eos"]
        row = stepper.turn([*case["prompt_ids"], *reference])
        n_prompt = len(case["prompt_ids"])
        stepper.step((row, n_prompt), decode=False)
        logits = []
        with torch.inference_mode():
            for at in range(n_prompt, n_prompt + 63):
                logits.append(fed(engine, stepper, row, at))
        found = agreement(torch.cat(logits).float(), reference[1:])
        equal, behind = equal + found[0], max(behind, found[1])
        stepper.close(row)
    assert equal >= AGREE - len(CASES), equal
    assert behind <= MARGIN


def fed(engine: StepEngine, stepper: Stepper, row: Any, at: int) -> torch.Tensor:
    """Logits [1, vocab] after the row's known token at position ``at`` went through a decode call."""
    from kvalet.runtime.batch import Segment

    stepper._grow(row, at + 1)
    return engine.forward([Segment(int(row.row), at, (row.ids[at],), tuple(row.pages), True, True)])
