"""``deterministic``: a row's KV bits and tokens depend on the row alone, wherever its pages lie and whoever runs beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel, StepEngine, load_model
from stepping import Driven, Stepper, tiny_model

PIECE = 256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, LoadedModel]:
    return tiny_model(tmp_path_factory.mktemp("model"), "bf16", deterministic=True)


@pytest.fixture(scope="module")
def real(model_path: Path) -> tuple[EngineConfig, LoadedModel]:
    config = EngineConfig(model_path, n_pages=240, deterministic=True, decode_rows=4, arena_tokens=16_384, threads=1)
    return config, load_model(config)


def prefill(stepper: Stepper, row: Driven, beside: list[Driven]) -> None:
    """Piece by piece from multiple to multiple, neighbours decoding in the same steps."""
    while row.kv_len < row.n_prompt:
        n = min(PIECE - row.kv_len % PIECE, row.n_prompt - row.kv_len)
        stepper.step((row, n), *[(other, 1) for other in beside])


def run(engine: StepEngine, ids: list[int], seed: int, neighbours: int, pause: int, steps: int) -> tuple[list[int], str]:
    """Answer ``ids`` between random neighbours; after ``pause`` steps the row is closed, moved to other, once poisoned pages
    and opened again. Returns its tokens and the digest of its KV bits."""
    rng = np.random.default_rng(seed)
    stepper = Stepper(engine, rng.permutation(np.arange(1, engine.config.n_pages)).tolist())
    beside = [stepper.turn(rng.integers(3, 90, rng.integers(1, 60)).tolist()) for _ in range(neighbours)]
    for other in beside:
        stepper.prefill(other)
    row = stepper.turn(ids)
    prefill(stepper, row, beside)
    accepted: list[int] = []
    for step in range(steps):
        if step == pause:
            stepper.close(row, keep_pages=True)
            accepted += row.accepted
            row = dataclasses.replace(row, row=stepper.turn([1]).row, accepted=[], opened=False)
            stepper.move(row)
        members = [row, *beside]
        order = rng.permutation(len(members)).tolist()
        stepper.step(*[(members[i], 1) for i in order if i == 0 or rng.random() < 0.8])
        if beside and rng.random() < 0.3:
            stepper.close(beside.pop(0))
        engine.forward.arena.check()
    accepted += row.accepted
    digest = stepper.digest(row, row.kv_len)
    for open_row in [row, *beside]:
        stepper.close(open_row)
    return accepted, digest


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("arena_tokens", [0, 2048, 32_768])
def test_bits_of_a_row_depend_on_nothing_else(tiny: tuple[EngineConfig, LoadedModel], arena_tokens: int, seed: int) -> None:
    """Whether a row has a contiguous copy or not, alone or between neighbours, moved or not: the same bits."""
    ids = np.random.default_rng(seed).integers(3, 90, 280 + 61 * seed).tolist()
    engine = StepEngine(dataclasses.replace(tiny[0], arena_tokens=arena_tokens), tiny[1])
    expected = run(StepEngine(tiny[0], tiny[1]), ids, 0, 0, -1, 24)
    assert run(engine, ids, seed, neighbours=6, pause=9, steps=24) == expected, f"seed {seed}"


def test_bits_of_the_real_model(real: tuple[EngineConfig, LoadedModel]) -> None:
    engine = StepEngine(*real)
    ids = np.random.default_rng(3).integers(100, 40_000, 300).tolist()
    expected = run(engine, ids, 0, 0, -1, 10)
    for seed in (1, 2):
        assert run(engine, ids, seed, neighbours=3, pause=4, steps=10) == expected, f"seed {seed}"


def test_other_cuts_of_a_prompt_change_bits(real: tuple[EngineConfig, LoadedModel]) -> None:
    """Why pieces must end at multiples of 256: this shows that the tests above can fail."""
    engine = StepEngine(*real)
    ids = np.random.default_rng(3).integers(100, 40_000, 300).tolist()
    digests = set()
    for piece in (256, 10):  # 240, say, changes bits with AMX only
        stepper = Stepper(engine)
        row = stepper.prefill(stepper.turn(ids), piece)
        digests.add(stepper.digest(row, 300))
        stepper.close(row)
    assert len(digests) == 2


def test_auto_is_one_path_and_the_family_says_so(real: tuple[EngineConfig, LoadedModel]) -> None:
    family = real[1].identity["numerics"]
    assert real[1].decoder.weights.path == "bf16"
    assert "deterministic-rows4" in family
    assert torch.__version__ in family


def test_decodes_of_more_than_one_token_are_refused(tiny: tuple[EngineConfig, LoadedModel]) -> None:
    engine = StepEngine(*tiny)
    stepper = Stepper(engine)
    row = stepper.turn([5, 6, 7])
    with pytest.raises(Exception, match="one token at a time"):
        stepper.step((row, 3), decode=True)
