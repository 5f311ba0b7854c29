"""config.json of a Hugging Face folder -> ``ModelSpec``. What the decoder would compute wrongly is refused, field and value.

A field that is missing has the default of the ``transformers`` package for its family; sizes must be there. Nothing is taken
from a file without bounds: a count that no model of these families has is refused before anything is sized by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from kvalet.runtime.errors import ModelError
from kvalet.runtime.hf_rope import read_rope
from kvalet.runtime.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW = 4096
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_WIDTH = 1024, 4096, 1024, 1 << 20
MAX_VOCAB, MAX_CONTEXT = 1 << 24, 1 << 24


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family apart. ``attention_bias``, ``mlp_bias``: it reads the fields of that name, the first of which covers
    q, k, v and, with ``out_bias``, the output; ``qkv_bias``: it always has those of q, k, v. ``window``: how it says which
    layers have one ("" = never). ``own_head_dim``: head_dim where the file has none (0: hidden / heads)."""

    architecture: str
    rope_base: float = 10_000.0
    tied: bool = False
    attention_bias: bool = False
    out_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: str = ""
    own_head_dim: int = 0


FAMILIES = {
    "llama": Family("LlamaForCausalLM", attention_bias=True, out_bias=True, mlp_bias=True),
    "mistral": Family("MistralForCausalLM", window="all"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, window="upper"),
    "qwen3": Family("Qwen3ForCausalLM", attention_bias=True, out_bias=True, qk_norm=True, window="upper", own_head_dim=128),
    "smollm3": Family(
        "SmolLM3ForCausalLM", 2_000_000.0, tied=True, attention_bias=True, out_bias=True, mlp_bias=True, window="nope"
    ),
}
"""``model_type`` -> family. SmolLM2 is of type llama."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


class ConfigReader:
    """Fields of one configuration, with errors that name file, field and value."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self.fields, self.where = fields, where

    def refuse(self, name: str, value: Any, why: str = "which is not supported") -> NoReturn:
        raise ModelError(f"{self.where} has {name} {_short(value)}, {why}")

    def integer(self, name: str, most: int, default: int | None = None, least: int = 1) -> int:
        """None in the file counts as missing. ModelError outside ``least`` .. ``most``, or missing without a default."""
        value = self.fields.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"{self.where} has no field {name}")
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(name, value, f"not a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(name, value, "which is no number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, value, "neither true nor false")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def spec_of_config(fields: dict[str, Any], where: str, name: str) -> ModelSpec:
    """``where``: how messages call the file; ``name``: of the model. Raises ModelError with one sentence."""
    read = ConfigReader(fields, where)
    kind = str(fields.get("model_type"))
    family = FAMILIES.get(kind)
    if family is None:
        read.refuse("model_type", kind, f"supported are {', '.join(FAMILIES)}")
    _refuse_unsupported(read, family)
    hidden = read.integer("hidden_size", MAX_WIDTH)
    n_layers = read.integer("num_hidden_layers", MAX_LAYERS)
    n_q_heads = read.integer("num_attention_heads", MAX_HEADS)
    n_kv_heads = read.integer("num_key_value_heads", MAX_HEADS, n_q_heads)
    if n_q_heads % n_kv_heads:
        read.refuse("num_key_value_heads", n_kv_heads, f"which does not divide the {n_q_heads} query heads")
    head_dim = read.integer("head_dim", MAX_HEAD_DIM, family.own_head_dim or hidden // n_q_heads)
    if head_dim % 2:
        read.refuse("head_dim", head_dim, "which is odd")
    trained = read.integer("max_position_embeddings", MAX_CONTEXT)
    rope, nope = read_rope(read, family.rope_base, trained), _nope_layers(read, kind, n_layers)
    window, window_layers = _window(read, family, n_layers, nope)
    most = min(MAX_CONTEXT, rope.most_context(trained))
    bias = family.attention_bias and read.flag("attention_bias")
    eps = read.number("rms_norm_eps", 1e-6)
    if not 0 < eps < 1:
        read.refuse("rms_norm_eps", eps)
    return ModelSpec(
        architecture=kind,
        name=name,
        n_layers=n_layers,
        hidden=hidden,
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=read.integer("intermediate_size", MAX_WIDTH),
        vocab=read.integer("vocab_size", MAX_VOCAB),
        context=most if rope.kind == "yarn" else trained,
        max_context=most,
        eps=eps,
        rope=rope,
        tied=read.flag("tie_word_embeddings", family.tied),
        qkv_bias=bias or family.qkv_bias,
        out_bias=bias and family.out_bias,
        mlp_bias=family.mlp_bias and read.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        window=window,
        window_layers=window_layers,
        nope_layers=nope,
    )


def _refuse_unsupported(read: ConfigReader, family: Family) -> None:
    fields = read.fields
    architectures = fields.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        read.refuse("architectures", architectures, f"supported for this model_type is {family.architecture}")
    if fields.get("quantization_config") is not None:
        method = fields["quantization_config"]
        read.refuse("quantization_config", method.get("quant_method", method) if isinstance(method, dict) else method)
    for name in EXPERTS:
        if fields.get(name):
            read.refuse(name, fields[name], "a mixture of experts, which is not supported")
    if fields.get("hidden_act", "silu") != "silu":
        read.refuse("hidden_act", fields["hidden_act"])
    if fields.get("is_causal") is False:
        read.refuse("is_causal", False)
    if isinstance(fields.get("auto_map"), dict) and "AutoModelForCausalLM" in fields["auto_map"]:
        read.refuse("auto_map", fields["auto_map"]["AutoModelForCausalLM"], "code of its own, which is not run")
    for name, known in (("attention_bias", family.attention_bias), ("mlp_bias", family.mlp_bias)):
        if fields.get(name) and not known:
            read.refuse(name, fields[name], "which this model_type does not have")


def _nope_layers(read: ConfigReader, kind: str, n_layers: int) -> frozenset[int]:
    """Layers without rotation: where ``no_rope_layers`` is 0, else every ``no_rope_layer_interval``-th."""
    listed = read.fields.get("no_rope_layers")
    if kind != "smollm3":
        if listed and not all(listed):
            read.refuse("no_rope_layers", listed, "which this model_type does not have")
        return frozenset()
    if listed is None:
        step = read.integer("no_rope_layer_interval", MAX_LAYERS, 4)
        return frozenset(layer for layer in range(n_layers) if (layer + 1) % step == 0)
    if not isinstance(listed, list) or len(listed) < n_layers or any(flag not in (0, 1) for flag in listed):
        read.refuse("no_rope_layers", listed, f"not a 0 or 1 for each of the {n_layers} layers")
    return frozenset(layer for layer in range(n_layers) if not listed[layer])


def _window(read: ConfigReader, family: Family, n_layers: int, nope: frozenset[int]) -> tuple[int, frozenset[int]]:
    """(tokens a token sees, layers in which it sees no more). ``layer_types`` decides where a family has it; else Mistral has
    its window in all layers, Qwen from layer ``max_window_layers`` on, SmolLM3 where there is no rotation."""
    listed = read.fields.get("layer_types")
    if listed is not None and (not isinstance(listed, list) or len(listed) != n_layers or set(listed) - {FULL, SLIDING}):
        read.refuse("layer_types", listed, f"not {FULL} or {SLIDING} for each of the {n_layers} layers")
    if family.window == "all":
        window = _window_tokens(read)
        if listed is not None and set(listed) != {SLIDING if window else FULL}:
            read.refuse("layer_types", listed, "which this model_type does not have")
        return window, frozenset(range(n_layers)) if window else frozenset()
    if not family.window:
        if read.fields.get("sliding_window") or (listed and SLIDING in listed):
            read.refuse("sliding_window", read.fields.get("sliding_window"), "which this model_type does not have")
        return 0, frozenset()
    if not read.flag("use_sliding_window"):
        if listed and SLIDING in listed:
            read.refuse("layer_types", listed, "but use_sliding_window is false")
        return 0, frozenset()
    window = _window_tokens(read) if family.window == "upper" or "sliding_window" in read.fields else 0
    if listed is not None:
        layers = frozenset(layer for layer, its_kind in enumerate(listed) if its_kind == SLIDING)
    elif family.window == "upper":
        layers = frozenset(range(read.integer("max_window_layers", MAX_LAYERS, 28, least=0), n_layers))
    else:
        layers = nope
    return (window, layers) if window and layers else (0, frozenset())


def _window_tokens(read: ConfigReader) -> int:
    """null is no window; no field at all is the default of transformers."""
    if "sliding_window" in read.fields and read.fields["sliding_window"] is None:
        return 0
    return read.integer("sliding_window", 1 << 30, DEFAULT_WINDOW, least=0)
