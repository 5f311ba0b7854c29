"""What a model is, read from the fields of its GGUF file: sizes, rope, context, chat template, tokenizer arrays."""

from __future__ import annotations

from dataclasses import dataclass

from kvalet.runtime.errors import ModelError
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.tokenizer import TokenizerArrays

INTERLEAVED_ROPE = {"llama": True, "qwen2": False, "qwen3": False}
"""The architectures that are supported -> whether the file stores q and k for interleaved pairs (2i, 2i + 1). They are
brought to the rotate-half order (i, i + dim / 2) at loading."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a Llama-family decoder. Tokens, elements; ``rope_scale`` divides positions (linear scaling; 1.0 = none).

    ``ffn``: width of the MLP. ``rope_dim``: dimensions of a head that are rotated (all of them). ``tied``: the head is the
    embedding. ``vocab``: rows of the embedding. ``chat_template``: None where the file has none.
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
    rope_base: float
    rope_scale: float = 1.0
    tied: bool = False
    chat_template: str | None = None

    @property
    def qkv_width(self) -> int:
        return (self.n_q_heads + 2 * self.n_kv_heads) * self.head_dim

    def geometry(self, kv_dtype: str) -> KVGeometry:
        return KVGeometry(self.n_layers, self.n_kv_heads, self.head_dim, kv_dtype)


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
    spec = ModelSpec(
        architecture=architecture,
        name=file.field("general.name", str, file.path.stem),
        n_layers=size("block_count"),
        hidden=hidden,
        n_q_heads=n_q_heads,
        n_kv_heads=size("attention.head_count_kv", n_q_heads),
        head_dim=head_dim,
        ffn=size("feed_forward_length"),
        vocab=embedding.shape[0],
        context=size("context_length"),
        eps=file.field(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        rope_base=file.field(f"{architecture}.rope.freq_base", float, 10_000.0),
        rope_scale=_rope_scale(file, architecture),
        tied="output.weight" not in file.tensors,
        chat_template=file.fields.get("tokenizer.chat_template"),
    )
    _check(file, spec, size("rope.dimension_count", head_dim), size("attention.value_length", head_dim))
    return spec


def _rope_scale(file: GgufFile, architecture: str) -> float:
    kind = file.field(f"{architecture}.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"model file {file.path} has {architecture}.rope.scaling.type {kind!r}, which is not supported")
    factor: float = file.field(f"{architecture}.rope.scaling.factor", float, 1.0)
    if kind == "linear" and not factor > 0:
        raise ModelError(f"model file {file.path} has {architecture}.rope.scaling.factor {factor}")
    return factor if kind == "linear" else 1.0


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

    tokens = file.field("tokenizer.ggml.tokens", tuple)
    return TokenizerArrays(
        model=file.field("tokenizer.ggml.model", str),
        pre=file.field("tokenizer.ggml.pre", str, ""),
        tokens=tokens,
        token_type=file.field("tokenizer.ggml.token_type", tuple, (1,) * len(tokens)),
        merges=file.field("tokenizer.ggml.merges", tuple, ()),
        add_bos_token=file.field("tokenizer.ggml.add_bos_token", bool, False),
        bos_token_id=optional_id("bos"),
        eos_token_id=optional_id("eos"),
    )
