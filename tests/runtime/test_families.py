"""Every family against the ``transformers`` package: random weights, its own saved folder, fp32, 1e-4 on logits.

Rows of several pages that lie apart, prompts in pieces of different lengths, several rows in one call, then decodes."""

from __future__ import annotations

from pathlib import Path

import hfmodels
import pytest
import torch
from hfmodels import Case
from kvalet.runtime.teacher import forced_logits

TOLERANCE = 1e-4
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 20}

CASES = {
    "llama 2, no grouping": Case("llama", heads=(4, 4)),
    "smollm2: tied, group 3": Case("llama", heads=(9, 3), hidden=72, config={"tie_word_embeddings": True}),
    "llama 3.1: scaled rope, group 4": Case(
        "llama",
        heads=(8, 2),
        config={"rope_parameters": {**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 32}},
    ),
    "llama, linear scaling, all biases": Case(
        "llama",
        heads=(6, 2),
        config={
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama, dynamic scaling, within its context": Case(
        "llama", config={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}
    ),
    "qwen2: biases, tied, group 7": Case("qwen2", heads=(7, 1), hidden=56, config={"tie_word_embeddings": True}),
    "qwen2.5, yarn beyond the original context": Case("qwen2", config={"rope_parameters": dict(YARN)}),
    "qwen2, window in the upper layers": Case("qwen2", config={**WINDOW, "max_window_layers": 1}),
    "qwen3: norms, wide heads, group 8": Case("qwen3", heads=(8, 1), config={"head_dim": 16}),
    "qwen3, window by layer types, biases": Case(
        "qwen3",
        config={
            **WINDOW,
            "head_dim": 12,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3, yarn with its own sharpness, not rounded": Case(
        "qwen3",
        config={"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16, "truncate": False}},
    ),
    "mistral, window shorter than a page": Case("mistral", heads=(8, 2), config={"sliding_window": 11}),
    "mistral, window over pages": Case("mistral", config={"sliding_window": 33}),
    "mistral, no window, own head_dim": Case("mistral", config={"sliding_window": None, "head_dim": 20}),
    "smollm3: layers without rotation": Case("smollm3", layers=5),
    "smollm3, own pattern and a window there": Case("smollm3", config={**WINDOW, "no_rope_layers": [0, 1, 0]}),
    "llama, yarn by two scales": Case("llama", config={"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1}}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = hfmodels.make(case, tmp_path)
    mine = hfmodels.loaded(tmp_path)
    rows = hfmodels.sequences(case)
    expected = [hfmodels.reference(model, ids) for ids in rows]
    whole = forced_logits(mine.decoder, [*rows[0], 0], 1, "fp32", piece=19)
    torch.testing.assert_close(whole, expected[0], atol=TOLERANCE, rtol=0)
    assert expected[0].abs().max() > 1
    for piece, arena_tokens in ((1000, 4096), (16, 4096), (7, 0)):
        found = hfmodels.driven(mine, rows, piece, decodes=6, arena_tokens=arena_tokens)
        for row, logits in enumerate(found):
            assert len(logits) >= 7, "the end of the prompt and six decodes"
            for position, said in logits.items():
                torch.testing.assert_close(
                    said,
                    expected[row][position],
                    atol=TOLERANCE,
                    rtol=0,
                    msg=lambda m, r=row, p=position: f"{name} {r} {p} {m}",
                )


@pytest.mark.parametrize("name", [name for name in CASES if "window" in name and "no window" not in name])
def test_the_windows_matter(tmp_path: Path, name: str) -> None:
    """The same weights without their window say something else from the first token on that it hides, and the same before."""
    case = CASES[name]
    hfmodels.make(case, tmp_path)
    mine = hfmodels.loaded(tmp_path)
    ids = hfmodels.sequences(case)[0]
    windowed = forced_logits(mine.decoder, [*ids, 0], 1, "fp32")
    window = mine.spec.window
    object.__setattr__(mine.spec, "window_layers", frozenset())
    open_ = forced_logits(mine.decoder, [*ids, 0], 1, "fp32")
    assert 0 < window < len(ids)
    torch.testing.assert_close(windowed[:window], open_[:window], atol=1e-5, rtol=0)
    assert (windowed[window:] - open_[window:]).abs().amax(dim=1).min() > 1e-3


@pytest.mark.parametrize(
    "name", ["llama 2, no grouping", "llama 3.1: scaled rope, group 4", "qwen2.5, yarn beyond the original context"]
)
def test_configurations_of_transformers_4_mean_the_same(tmp_path: Path, name: str) -> None:
    hfmodels.make(CASES[name], tmp_path)
    new = hfmodels.loaded(tmp_path)
    hfmodels.old_style(tmp_path)
    old = hfmodels.loaded(tmp_path)
    assert old.spec == new.spec
    assert old.identity == new.identity


def test_dynamic_scaling_has_one_base_for_the_served_context(tmp_path: Path) -> None:
    """Served at three times its context, a sequence of that length is what transformers makes of it in one pass. (It moves the
    base with the length; a page that others share cannot, so here the base is that of the whole served context.)"""
    case = Case(
        "llama",
        context=32,
        config={"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}},
        lengths=(96,),
    )
    model = hfmodels.make(case, tmp_path)
    ids = hfmodels.sequences(case)[0]
    stretched = hfmodels.loaded(tmp_path, context_tokens=96)
    assert stretched.context_tokens == 96
    expected = hfmodels.reference(model, ids)
    for piece in (16, 33):
        found = hfmodels.driven(stretched, [ids], piece, decodes=20, arena_tokens=4096)[0]
        for position, said in found.items():
            torch.testing.assert_close(said, expected[position], atol=TOLERANCE, rtol=0)
    own = hfmodels.loaded(tmp_path)
    assert own.context_tokens == 32
    assert own.identity["rope"] != stretched.identity["rope"], "KV of one base is never read with another"
    assert hfmodels.loaded(tmp_path, context_tokens=1000).context_tokens == 128, "at most factor times its context"


@pytest.mark.parametrize("mode", ["bf16", "auto"])
def test_reduced_precision_is_near(tmp_path: Path, mode: str) -> None:
    case = CASES["qwen3, window by layer types, biases"]
    model = hfmodels.make(case, tmp_path)
    mine = hfmodels.loaded(tmp_path, weights=mode)
    assert mine.decoder.weights.path == "bf16"
    ids = hfmodels.sequences(case)[0]
    expected = hfmodels.reference(model, ids)
    error = (forced_logits(mine.decoder, [*ids, 0], 1, "bf16", piece=40) - expected).abs()
    assert error.mean() < 0.05 * expected.abs().mean()
