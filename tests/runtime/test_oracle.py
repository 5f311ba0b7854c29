"""The reference of tests/oracles: fp32 equal, reduced modes within the thresholds that were measured for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kvalet.runtime.batch import Segment
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel, StepEngine, load_model
from kvalet.runtime.teacher import forced_logits
from stepping import Stepper

ORACLE = json.loads((Path(__file__).parent.parent / "oracles" / "smollm2_reference.json").read_text())
CASES: list[dict[str, Any]] = ORACLE["cases"]
AGREE, MARGIN = 300, 0.75


def load(model_path: Path, weights: str) -> tuple[EngineConfig, LoadedModel]:
    config = EngineConfig(model_path, n_pages=120, weights=weights, arena_tokens=8192, threads=1)
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


@pytest.mark.parametrize("weights", ["bf16", "int4", "auto"])
def test_reduced_weights_agree_on_the_decode_path(model_path: Path, weights: str) -> None:
    """The same threshold where it matters: one token a step over the contiguous copies, all cases in one batch."""
    engine = StepEngine(*load(model_path, weights))
    prompts = [case["prompt_ids"] for case in CASES]
    references = [case["greedy_ids_64_ignoring_eos"] for case in CASES]
    tables = [tuple(range(1 + 20 * i, 21 + 20 * i)) for i in range(len(CASES))]

    def feed(step: int) -> torch.Tensor:
        """Logits after the prompts (step 0), then after one more of the reference's tokens each."""
        segments = []
        for row, (prompt, reference, pages) in enumerate(zip(prompts, references, tables, strict=True)):
            start = len(prompt) + step - 1 if step else 0
            segments.append(Segment(row, start, (reference[step - 1],) if step else tuple(prompt), pages, step > 0, True))
        return engine.forward(segments)

    with torch.inference_mode():
        logits = torch.stack([feed(step) for step in range(64)], dim=1).float()
    results = [agreement(logits[i], reference) for i, reference in enumerate(references)]
    assert sum(equal for equal, _ in results) >= AGREE, results
    assert max(behind for _, behind in results) <= MARGIN, results
    assert engine.forward.arena.fills == len(CASES)
