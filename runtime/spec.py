"""What a model is: sizes, rope, windows, context, chat template; read from the fields of its GGUF file here, from the
configuration of a folder in ``runtime.hf_config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvalet.runtime.errors import ModelError
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.rope_spec import RopeSpec, yarn_attention_factor
from kvalet.runtime.tokenizer import TokenizerArrays

INTERLEAVED_ROPE = {"llama": True, "qwen2": False, "qwen3": False, "smollm3": True}
"""The architectures of GGUF that are supported -> whether the file stores q and k for interleaved pairs (2i, 2i + 1). They are
brought to the rotate-half order (i, i + dim / 2) at loading."""

SMOLLM3_NOPE_STEP = 4
"""Every fourth layer of SmolLM3 does without rotation; its GGUF files have no field for that."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a Llama-family decoder. Tokens, elements.

    ``ffn``: width of the MLP. ``tied``: the head is the embedding. ``vocab``: rows of the embedding. ``context``: what is
    served if nobody asks for another length; ``max_context`` what may be asked for (0: the same), where rope scaling stretches
    further.
    ``qkv_bias``, ``out_bias``, ``mlp_bias``: where the products have biases. ``qk_norm``: RMSNorm of q and k per head.
    ``window``: in the layers of ``window_layers`` a token sees itself and the ``window`` - 1 tokens before it; its pages stay
    all the same. ``nope_layers``: layers whose q and k are not rotated. ``chat_template``: None where there is none;
    ``template_tokens``: what templates call "bos_token" and so on, where the model's files say it.
    """

    architecture: str
    name: str
    n_layers: int
    hidden: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    eps: float
    rope: RopeSpec
    max_context: int = 0
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    window_layers: frozenset[int] = frozenset()
    nope_layers: frozenset[int] = frozenset()
    chat_template: str | None = None
    template_tokens: dict[str, str] | None = field(default=None, hash=False)

    @property
    def qkv_width(self) -> int:
        return (self.n_q_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def windows(self) -> tuple[int, ...]:
        """Per layer: how many tokens a token sees, itself included; 0: all before it."""
        return tuple(self.window if layer in self.window_layers else 0 for layer in range(self.n_layers))

    def geometry(self, kv_dtype: str) -> KVGeometry:
        return KVGeometry(self.n_layers, self.n_kv_heads, self.head_dim, kv_dtype)

    def served_context(self, asked: int) -> int:
        """``asked`` (0: not asked) brought to what the model can do."""
        return min(asked or self.context, max(self.context, self.max_context))


def read_spec(file: GgufFile) -> ModelSpec:
    """The spec of an open file. Raises ModelError naming the field that is missing, contradictory or not supported."""
    architecture = file.field("general.architecture", str)
    if architecture not in INTERLEAVED_ROPE:
        known = ", ".join(INTERLEAVED_ROPE)
        raise ModelError(f"model file {file.path} is of architecture {architecture!r}; supported are {known}")

    def size(key: str, default: int | None = None) -> int:
        value: int = file.field(f"{architecture}.{key}", int, default)
        if value < 1:
            raise ModelError(f"model file {file.path} has {architecture}.{key} = {value}")
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"model file {file.path} has no tensor token_embd.weight")
    hidden, n_q_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // n_q_heads or 1)
    n_layers, context = size("block_count"), size("context_length")
    rope = _rope(file, architecture, context)
    window, window_layers = _window(file, architecture, n_layers)
    spec = ModelSpec(
        architecture=architecture,
        name=file.field("general.name", str, file.path.stem),
        n_layers=n_layers,
        hidden=hidden,
        n_q_heads=n_q_heads,
        n_kv_heads=size("attention.head_count_kv", n_q_heads),
        head_dim=head_dim,
        ffn=size("feed_forward_length"),
        vocab=embedding.shape[0],
        context=context,
        max_context=rope.most_context(context) if rope.kind == "yarn" else context,
        eps=file.field(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        rope=rope,
        tied="output.weight" not in file.tensors,
        qkv_bias=_has(file, "attn_q.bias", "attn_k.bias", "attn_v.bias"),
        out_bias=_has(file, "attn_output.bias"),
        mlp_bias=_has(file, "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
        qk_norm=_has(file, "attn_q_norm.weight", "attn_k_norm.weight"),
        window=window,
        window_layers=window_layers,
        nope_layers=frozenset(i for i in range(n_layers) if architecture == "smollm3" and (i + 1) % SMOLLM3_NOPE_STEP == 0),
        chat_template=file.fields.get("tokenizer.chat_template"),
    )
    _check(file, spec, size("rope.dimension_count", head_dim), size("attention.value_length", head_dim))
    return spec


def _has(file: GgufFile, *names: str) -> bool:
    """Whether the first layer has any of them: then every layer must have all."""
    return any(f"blk.0.{name}" in file.tensors for name in names)


def _rope(file: GgufFile, architecture: str, context: int) -> RopeSpec:
    """llama3's scaling is no field: its factors are the tensor ``rope_freqs.weight``."""

    def number(key: str, default: float) -> float:
        value: float = file.field(f"{architecture}.rope.{key}", float, default)
        return value

    base = number("freq_base", 10_000.0)
    kind = file.field(f"{architecture}.rope.scaling.type", str, "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"model file {file.path} has {architecture}.rope.scaling.type {kind!r}, which is not supported")
    if kind == "none":
        rope = RopeSpec(base)
    elif kind == "linear":
        rope = RopeSpec(base, "linear", number("scaling.factor", 1.0))
    else:
        rope = _yarn(file, architecture, base, context)
    fault = rope.fault()
    if fault:
        raise ModelError(f"model file {file.path} has {architecture}.rope.scaling.{fault}, which is not supported")
    return rope


def _yarn(file: GgufFile, architecture: str, base: float, context: int) -> RopeSpec:
    """With the meaning that llama.cpp gives the fields."""

    def number(key: str, default: float) -> float:
        value: float = file.field(f"{architecture}.rope.scaling.{key}", float, default)
        return value

    for key, usual in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if number(key, usual) not in (usual, -1.0):
            raise ModelError(
                f"model file {file.path} has {architecture}.rope.scaling.{key} {number(key, usual):g}, which is not supported"
            )
    factor = number("factor", 1.0)
    sharpness = number("attn_factor", 1.0) * number("yarn_attn_factor", 1.0)
    return RopeSpec(
        base,
        "yarn",
        factor,
        original_context=int(number("original_context_length", float(context))),
        beta_fast=number("yarn_beta_fast", 32.0),
        beta_slow=number("yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor(factor) * sharpness,
    )


def _window(file: GgufFile, architecture: str, n_layers: int) -> tuple[int, frozenset[int]]:
    """(tokens a token sees, layers in which it sees no more). Which layers: the pattern; Mistral's files are of architecture
    llama and have none: all. A window of another architecture without its pattern is refused."""
    window: int = file.field(f"{architecture}.attention.sliding_window", int, 0)
    if window <= 0:
        return 0, frozenset()
    pattern: Any = file.fields.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and len(pattern) == n_layers and all(isinstance(flag, bool) for flag in pattern):
        return window, frozenset(layer for layer, flag in enumerate(pattern) if flag)
    if pattern is None and architecture == "llama":
        return window, frozenset(range(n_layers))
    raise ModelError(
        f"model file {file.path} has {architecture}.attention.sliding_window {window} with sliding_window_pattern"
        f" {str(pattern)[:40]}, which is not supported"
    )


def _check(file: GgufFile, spec: ModelSpec, rope_dim: int, value_dim: int) -> None:
    """Refuse what the decoder would compute wrongly."""
    for what, wrong in (
        (f"rope.dimension_count {rope_dim} beside heads of {spec.head_dim}", rope_dim != spec.head_dim or rope_dim % 2 == 1),
        (f"attention.value_length {value_dim} beside heads of {spec.head_dim}", value_dim != spec.head_dim),
        (f"{spec.n_q_heads} query heads for {spec.n_kv_heads} KV heads", spec.n_q_heads % spec.n_kv_heads != 0),
        (f"expert_count {file.fields.get(spec.architecture + '.expert_count')}", _is_moe(file, spec.architecture)),
    ):
        if wrong:
            raise ModelError(f"model file {file.path} has {what}, which is not supported")


def _is_moe(file: GgufFile, architecture: str) -> bool:
    return bool(file.fields.get(f"{architecture}.expert_count", 0))


def read_tokenizer(file: GgufFile) -> TokenizerArrays:
    """The arrays ``tokenizer.ggml.*``. Raises ModelError for missing ones; whether they can be used is the tokenizer's say."""

    def optional_id(name: str) -> int | None:
        value = file.fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if value is None else int(value)

    tokens, model = file.field("tokenizer.ggml.tokens", tuple), file.field("tokenizer.ggml.model", str)
    return TokenizerArrays(
        model=model,
        pre=file.field("tokenizer.ggml.pre", str, ""),
        tokens=tokens,
        token_type=file.field("tokenizer.ggml.token_type", tuple, (1,) * len(tokens)),
        merges=file.field("tokenizer.ggml.merges", tuple, ()),
        add_bos_token=file.field("tokenizer.ggml.add_bos_token", bool, model == "llama"),
        bos_token_id=optional_id("bos"),
        eos_token_id=optional_id("eos"),
        scores=file.field("tokenizer.ggml.scores", tuple, ()) if model == "llama" else (),
        add_space_prefix=file.field("tokenizer.ggml.add_space_prefix", bool, True),
    )
