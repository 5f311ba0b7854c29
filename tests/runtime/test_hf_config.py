"""config.json: sizes, defaults, rope of both spellings, windows; and by field and value everything that is not supported."""

from __future__ import annotations

import math
from typing import Any

import pytest
from kvalet.runtime.errors import ModelError
from kvalet.runtime.hf_config import FAMILIES, spec_of_config
from kvalet.runtime.rope_spec import RopeSpec
from kvalet.runtime.spec import ModelSpec
from tinyfolder import CONFIG

ABSENT = object()


def spec(family: str = "qwen3", **changes: Any) -> ModelSpec:
    fields = {**CONFIG, "architectures": [FAMILIES[family].architecture], "model_type": family, **changes}
    return spec_of_config({k: v for k, v in fields.items() if v is not ABSENT}, "config.json of x", "x")


def test_sizes_are_the_file_s() -> None:
    found = spec(num_attention_heads=6, num_key_value_heads=3, rms_norm_eps=1e-5, max_position_embeddings=777)
    assert (found.architecture, found.name, found.n_layers, found.hidden, found.ffn) == ("qwen3", "x", 2, 64, 96)
    assert (found.n_q_heads, found.n_kv_heads, found.head_dim, found.vocab) == (6, 3, 16, 320)
    assert (found.eps, found.context, found.max_context, found.rope) == (1e-5, 777, 777, RopeSpec(10_000.0))
    assert (found.qk_norm, found.qkv_bias, found.out_bias, found.mlp_bias, found.tied) == (True, False, False, False, False)


@pytest.mark.parametrize(
    ("family", "head_dim", "tied", "base", "qk_norm", "qkv_bias"),
    [
        ("llama", 16, False, 1e4, False, False),
        ("mistral", 16, False, 1e4, False, False),
        ("qwen2", 16, False, 1e4, False, True),
        ("qwen3", 128, False, 1e4, True, False),
        ("smollm3", 16, True, 2e6, False, False),
    ],
)
def test_missing_fields_have_the_family_s_defaults(
    family: str, head_dim: int, tied: bool, base: float, qk_norm: bool, qkv_bias: bool
) -> None:
    absent = dict.fromkeys(
        ("head_dim", "tie_word_embeddings", "rope_theta", "rms_norm_eps", "hidden_act", "architectures"), ABSENT
    )
    found = spec(family, **absent)
    assert (found.head_dim, found.tied, found.rope.base, found.eps) == (head_dim, tied, base, 1e-6)
    assert (found.qk_norm, found.qkv_bias) == (qk_norm, qkv_bias)
    assert spec(family, num_key_value_heads=None).n_kv_heads == 4, "as many as query heads"


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_attention_bias_is_of_four_matrices(family: str) -> None:
    found = spec(family, attention_bias=True)
    assert (found.qkv_bias, found.out_bias, found.mlp_bias) == (True, True, False)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_both_spellings_of_rope(spelling: str) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    if spelling == "rope_parameters":
        found = spec("llama", rope_theta=ABSENT, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **scaling})
    else:
        found = spec("llama", rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert found.rope == RopeSpec(5e5, "llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0)
    assert (found.context, found.max_context) == (2048, 2048), "llama3's files say the stretched context"


def test_scalings_say_how_far_they_stretch() -> None:
    linear = spec("llama", rope_scaling={"type": "linear", "factor": 4})
    assert (linear.context, linear.max_context, linear.served_context(0)) == (2048, 8192, 2048)
    assert (linear.served_context(5000), linear.served_context(99_999)) == (5000, 8192)
    yarn = spec("qwen2", rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024})
    assert (yarn.context, yarn.rope.original_context) == (4096, 1024)
    assert yarn.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    own = spec("qwen2", rope_scaling={"type": "yarn", "original_max_position_embeddings": 1024, "attention_factor": 1.0})
    assert (own.rope.factor, own.rope.attention_factor) == (2.0, 1.0), "the factor is that of the contexts"
    dynamic = spec("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert (dynamic.context, dynamic.max_context, dynamic.rope.original_context) == (2048, 4096, 2048)


@pytest.mark.parametrize(
    ("family", "fields", "window", "layers"),
    [
        ("mistral", {}, 4096, {0, 1}),
        ("mistral", {"sliding_window": 0}, 0, set()),
        ("smollm3", {"use_sliding_window": True}, 0, set()),
        ("mistral", {"sliding_window": None}, 0, set()),
        ("mistral", {"sliding_window": 100}, 100, {0, 1}),
        ("qwen2", {"sliding_window": 100}, 0, set()),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True}, 0, set()),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}, 100, {1}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096, {0, 1}),
        (
            "qwen3",
            {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            7,
            {0},
        ),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, 0, set()),
        ("smollm3", {"sliding_window": 5, "use_sliding_window": True, "no_rope_layers": [1, 0]}, 5, {1}),
        ("llama", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, 0, set()),
    ],
)
def test_windows(family: str, fields: dict[str, Any], window: int, layers: set[int]) -> None:
    found = spec(family, **fields)
    assert (found.window, found.window_layers) == (window, layers)
    assert found.windows == tuple(window if layer in layers else 0 for layer in range(2))


def test_layers_without_rotation() -> None:
    assert spec("smollm3", num_hidden_layers=9).nope_layers == {3, 7}
    assert spec("smollm3", num_hidden_layers=9, no_rope_layer_interval=3).nope_layers == {2, 5, 8}
    assert spec("smollm3", no_rope_layers=[0, 1]).nope_layers == {0}
    assert spec("llama").nope_layers == set()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another family": ("qwen3", {"model_type": "gemma3"}, r"model_type 'gemma3', supported are llama, mistral"),
    "no family": ("qwen3", {"model_type": ABSENT}, r"model_type 'None'"),
    "another head": ("llama", {"architectures": ["LlamaForSequenceClassification"]}, r"architectures \['LlamaForSeq"),
    "experts": ("qwen3", {"num_experts": 8}, r"num_experts 8, a mixture of experts"),
    "mixtral's experts": ("mistral", {"num_local_experts": 8}, r"num_local_experts 8"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantization_config 'awq'"),
    "activation": ("llama", {"hidden_act": "gelu"}, r"hidden_act 'gelu'"),
    "biases it has not": ("mistral", {"attention_bias": True}, r"attention_bias True, which this model_type does not have"),
    "mlp biases it has not": ("qwen2", {"mlp_bias": True}, r"mlp_bias True"),
    "code of its own": ("qwen2", {"auto_map": {"AutoModelForCausalLM": "m.M"}}, r"auto_map 'm\.M', code of its own"),
    "not causal": ("qwen2", {"is_causal": False}, r"is_causal False"),
    "rope type": ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, r"rope_scaling\.rope_type 'longrope'"),
    "multimodal rope": ("qwen2", {"rope_scaling": {"type": "mrope"}}, r"'mrope', supported are default, linear"),
    "rope without factor": ("llama", {"rope_scaling": {"type": "linear"}}, r"rope_scaling .*factor 0\.0"),
    "rope factor": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": "4"}},
        r"rope_scaling has factor '4', which is no number",
    ),
    "nan factor": ("llama", {"rope_scaling": {"type": "linear", "factor": math.nan}}, r"factor nan"),
    "shrinking": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 0.5}}, r"factor 0\.5 for type 'dynamic'"),
    "llama3's borders": ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, r"low_freq_factor 0\.0"),
    "rope per layer type": ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"one per layer type"),
    "rope of another kind": ("llama", {"rope_scaling": "linear"}, r"rope_scaling 'linear', which is no object"),
    "base": ("llama", {"rope_theta": 0.5}, r"base 0\.5"),
    "partial rotation": ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
    "window it has not": ("llama", {"sliding_window": 4096}, r"sliding_window 4096"),
    "unknown layer type": ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, r"layer_types \["),
    "layer types of another length": ("qwen3", {"layer_types": ["full_attention"]}, r"for each of the 2 layers"),
    "window switched off": ("qwen3", {"layer_types": ["sliding_attention"] * 2}, r"but use_sliding_window is false"),
    "mistral's mixture": (
        "mistral",
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types",
    ),
    "no layer without rotation there": ("llama", {"no_rope_layers": [1, 0]}, r"no_rope_layers"),
    "too few flags": ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers \[1\]"),
    "groups": ("llama", {"num_key_value_heads": 3}, r"num_key_value_heads 3, which does not divide the 4 query heads"),
    "odd heads": ("llama", {"head_dim": 15}, r"head_dim 15, which is odd"),
    "no size": ("llama", {"hidden_size": ABSENT}, r"has no field hidden_size"),
    "no context": ("llama", {"max_position_embeddings": None}, r"no field max_position_embeddings"),
    "size of another kind": ("llama", {"hidden_size": "64"}, r"hidden_size '64', not a whole number"),
    "flag as size": ("llama", {"num_hidden_layers": True}, r"num_hidden_layers True"),
    "endless layers": (
        "llama",
        {"num_hidden_layers": 10**9},
        r"num_hidden_layers 1000000000, not a whole number from 1 to 1024",
    ),
    "endless context": ("llama", {"max_position_embeddings": 10**12}, r"max_position_embeddings 1000000000000"),
    "endless vocabulary": ("llama", {"vocab_size": 1 << 40}, r"vocab_size"),
    "no heads": ("llama", {"num_attention_heads": 0}, r"num_attention_heads 0"),
    "eps": ("llama", {"rms_norm_eps": 0}, r"rms_norm_eps 0\.0"),
    "number as flag": ("llama", {"tie_word_embeddings": 1}, r"tie_word_embeddings 1, neither true nor false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_field_and_value(name: str) -> None:
    family, fields, words = REFUSED[name]
    with pytest.raises(ModelError, match=words) as caught:
        spec(family, **fields)
    assert str(caught.value).startswith("config.json of x")
    assert "\n" not in str(caught.value)
