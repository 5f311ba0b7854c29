"""The forward pass over segments: bounds, order of the logits, calls under ``deterministic``; teacher forcing against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kvalet.runtime.batch import Segment
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel
from kvalet.runtime.errors import EngineError
from kvalet.runtime.forward import Forward
from kvalet.runtime.kvpool import KVPool
from kvalet.runtime.teacher import forced_logits
from stepping import tiny_model
from torch import Tensor

RNG = np.random.default_rng(11)
IDS = [RNG.integers(3, 99, 60).tolist() for _ in range(5)]
PAGES = [tuple(range(1 + 5 * k, 6 + 5 * k))[::-1] for k in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, LoadedModel]:
    return tiny_model(tmp_path_factory.mktemp("model"))


def forward_of(model: tuple[EngineConfig, LoadedModel], **changes: object) -> tuple[Forward, KVPool]:
    """A forward pass over 26 pages of NaN, so that whatever is read before it was written shows."""
    config, loaded = dataclasses.replace(model[0], **changes), model[1]  # type: ignore[arg-type]
    pool = KVPool(loaded.spec.geometry(config.kv_dtype), 26)
    pool.poison(range(26))
    return Forward(config, loaded.decoder, pool), pool


def part(row: int, begin: int, end: int, sample: bool = True) -> Segment:
    """Tokens [begin, end) of row ``row``: a decode where it is one token after others."""
    return Segment(row, begin, tuple(IDS[row][begin:end]), PAGES[row], end - begin == 1 and begin > 0, sample)


def said(model: tuple[EngineConfig, LoadedModel], row: int, end: int) -> Tensor:
    """What the model says after the row's first ``end`` tokens, by teacher forcing."""
    return forced_logits(model[1].decoder, [*IDS[row][:end], 0], end, "fp32")[0]


@torch.inference_mode()
def run(forward: Forward, segments: Sequence[Segment]) -> Tensor:
    return forward(segments)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arena_tokens", [0, 1024, 8192])
def test_logits_are_those_of_the_sampling_segments_in_order(
    model: tuple[EngineConfig, LoadedModel], deterministic: bool, arena_tokens: int
) -> None:
    """Decodes, pieces that sample and pieces that do not, mixed; the arena has room for none, some or all of the decodes."""
    forward, _ = forward_of(model, deterministic=deterministic, arena_tokens=arena_tokens, decode_rows=2)
    first = run(forward, [part(k, 0, 20 + k, sample=False) for k in range(4)])
    assert tuple(first.shape) == (0, model[1].spec.vocab)
    mixed = [part(2, 22, 23), part(4, 0, 30), part(0, 20, 21), part(3, 23, 40, sample=False), part(1, 21, 22)]
    logits = run(forward, mixed)
    for found, (row, end) in zip(logits, [(2, 23), (4, 30), (0, 21), (1, 22)], strict=True):
        torch.testing.assert_close(found, said(model, row, end), atol=2e-4, rtol=1e-4)
    again = run(forward, [part(3, 40, 41), part(1, 22, 23), part(2, 23, 24), part(0, 21, 22), part(4, 30, 31)])
    for found, (row, end) in zip(again, [(3, 41), (1, 23), (2, 24), (0, 22), (4, 31)], strict=True):
        torch.testing.assert_close(found, said(model, row, end), atol=2e-4, rtol=1e-4)


def test_only_the_fed_places_are_written(model: tuple[EngineConfig, LoadedModel]) -> None:
    """Padding of a deterministic call goes to the scratch page, everything else to the row's own places."""
    forward, pool = forward_of(model, deterministic=True, decode_rows=4)
    run(forward, [part(0, 0, 17, sample=False)])
    run(forward, [part(0, 17, 18)])
    written = {
        (page, token) for page in range(26) for token in range(16) if bool(pool.pages[page, :, :, token].isfinite().all())
    }
    assert {place for place in written if place[0]} == {(PAGES[0][i // 16], i % 16) for i in range(18)}


@pytest.mark.parametrize(("deterministic", "calls"), [(False, 1), (True, 2 + 2)])
def test_calls_of_one_step(model: tuple[EngineConfig, LoadedModel], deterministic: bool, calls: int) -> None:
    """Everything in one call; or, where bits may depend on nothing else, decodes by ``decode_rows`` and each piece alone."""
    forward, _ = forward_of(model, deterministic=deterministic, decode_rows=2)
    for row in range(3):
        run(forward, [part(row, 0, 9, sample=False)])
    before = forward.stats()["calls"]
    assert before == 3
    run(forward, [part(0, 9, 10), part(3, 0, 5), part(1, 9, 10), part(4, 0, 5, sample=False), part(2, 9, 10)])
    assert forward.stats()["calls"] - before == calls


def test_no_segments_are_no_logits_and_no_call(model: tuple[EngineConfig, LoadedModel]) -> None:
    forward, _ = forward_of(model)
    assert tuple(run(forward, []).shape) == (0, model[1].spec.vocab)
    assert forward.stats()["calls"] == 0


def test_the_bound_on_tokens_is_kept_before_anything_is_written(model: tuple[EngineConfig, LoadedModel]) -> None:
    forward, pool = forward_of(model, max_step_tokens=20, decode_rows=4)
    with pytest.raises(EngineError, match=r"21 tokens in one step; the engine was made for 20"):
        run(forward, [part(0, 0, 15), part(1, 0, 6)])
    assert bool(pool.pages.isnan().all())
    assert run(forward, [part(0, 0, 15), part(1, 0, 5)]).shape[0] == 2
    wide, _ = forward_of(model, max_step_tokens=2, decode_rows=16)
    assert run(wide, [part(0, 0, 16)]).shape[0] == 1, "never less than one decode call takes"


def test_deterministic_decodes_are_single_tokens(model: tuple[EngineConfig, LoadedModel]) -> None:
    forced = Segment(0, 0, tuple(IDS[0][:2]), PAGES[0], True, True)
    with pytest.raises(EngineError, match="one token at a time"):
        run(forward_of(model, deterministic=True)[0], [forced])
    assert run(forward_of(model)[0], [forced]).shape[0] == 1


def test_a_released_row_loses_its_copy_and_fills_it_again(model: tuple[EngineConfig, LoadedModel]) -> None:
    forward, _ = forward_of(model)
    run(forward, [part(0, 0, 9, sample=False)])
    fills = []
    for position in (9, 10, 11, 12):
        if position == 11:
            forward.release(0)
            forward.release(0)
            assert forward.arena.lengths([0]) == {}
        found = run(forward, [part(0, position, position + 1)])
        torch.testing.assert_close(found[0], said(model, 0, position + 1), atol=2e-4, rtol=1e-4)
        fills.append(forward.stats()["arena_fills"])
    assert fills == [1, 1, 2, 2]
    assert forward.arena.lengths([0]) == {0: 13}


@pytest.mark.parametrize("piece", [1, 7, 16, 33, 256])
def test_teacher_forcing_is_the_same_in_any_pieces(model: tuple[EngineConfig, LoadedModel], piece: int) -> None:
    decoder, vocab = model[1].decoder, model[1].spec.vocab
    whole = forced_logits(decoder, IDS[0], 1, "fp32")
    assert tuple(whole.shape) == (59, vocab)
    assert whole.dtype == torch.float32
    for first in (1, 2, 16, 33, 34, 59):
        found = forced_logits(decoder, IDS[0], first, "fp32", piece)
        assert tuple(found.shape) == (60 - first, vocab)
        torch.testing.assert_close(found, whole[first - 1 :], atol=2e-4, rtol=1e-4)


def test_teacher_forcing_reads_no_further_than_the_row(model: tuple[EngineConfig, LoadedModel]) -> None:
    decoder = model[1].decoder
    other = [*IDS[0][:30], *IDS[1][30:]]
    assert torch.equal(forced_logits(decoder, IDS[0], 1, "fp32", 1)[:29], forced_logits(decoder, other, 1, "fp32", 1)[:29])
    assert not torch.allclose(forced_logits(decoder, IDS[0], 31, "fp32"), forced_logits(decoder, other, 31, "fp32"), atol=0.1)


@pytest.mark.parametrize("first", [0, -1, 61])
def test_teacher_forcing_needs_something_read_first(model: tuple[EngineConfig, LoadedModel], first: int) -> None:
    with pytest.raises(ValueError, match=r"first must be in 1\.\.60"):
        forced_logits(model[1].decoder, IDS[0], first, "fp32")
    assert forced_logits(model[1].decoder, IDS[0], 60, "fp32").shape[0] == 0
