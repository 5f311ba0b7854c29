"""A model's sizes from the fields of its file: defaults, and by name everything the decoder would compute wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tinymodel
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.spec import ModelSpec, read_spec, read_tokenizer
from tinymodel import Tiny

ABSENT = object()


def write(path: Path, tiny: Tiny, tensors: dict[str, Any] | None = None, **fields: object) -> GgufFile:
    """A small file with fields set or, where ABSENT, left out. ``__`` in a name stands for a dot, ``arch`` for the
    architecture."""

    def change(writer: gguf.GGUFWriter, found: dict[str, Any]) -> None:
        for name, value in fields.items():
            key = name.replace("__", ".").replace("arch.", f"{tiny.architecture}.")
            writer.kv_data[0].pop(key, None)
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
        for name, values in (tensors or {}).items():
            found.pop(name, None)
            if values is not ABSENT:
                found[name] = values

    tinymodel.write(path, tiny, change)
    return GgufFile(path)


def spec_of(tmp_path: Path, tiny: Tiny | None = None, tensors: dict[str, Any] | None = None, **fields: object) -> ModelSpec:
    return read_spec(write(tmp_path / "tiny.gguf", tiny or Tiny(), tensors, **fields))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_sizes_are_the_file_s(tmp_path: Path, architecture: str) -> None:
    tiny = Tiny(architecture=architecture, n_layers=3, n_q_heads=6, n_kv_heads=2, ffn=32, context=77, rope_base=500.0)
    spec = spec_of(tmp_path, tiny)
    assert (spec.architecture, spec.n_layers, spec.hidden, spec.ffn) == (architecture, 3, 64, 32)
    assert (spec.n_q_heads, spec.n_kv_heads, spec.head_dim, spec.qkv_width) == (6, 2, 16, 160)
    assert (spec.context, spec.rope.base, spec.rope.kind) == (77, 500.0, "default")
    assert spec.eps == pytest.approx(1e-5)
    assert (spec.vocab, spec.tied) == (len(tinymodel.TOKENS), True)
    geometry = spec.geometry("fp32")
    assert (geometry.n_layers, geometry.n_kv_heads, geometry.head_dim, geometry.kv_dtype) == (3, 2, 16, "fp32")


def test_fields_that_may_be_missing_have_defaults(tmp_path: Path) -> None:
    """Heads of hidden / heads, as many KV heads as query heads, base 10000, the file's name, no template."""
    absent = ("attention__key_length", "attention__value_length", "rope__dimension_count", "rope__freq_base")
    spec = spec_of(
        tmp_path, Tiny(n_kv_heads=4), arch__attention__head_count_kv=ABSENT, **{f"arch__{n}": ABSENT for n in absent}
    )
    assert (spec.head_dim, spec.n_kv_heads, spec.rope.base) == (64 // 4, 4, 10_000.0)
    assert (spec.name, spec.chat_template) == ("tiny", None)


def test_name_template_and_own_head_are_taken(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, Tiny(own_head=True), general__name="Small One", tokenizer__chat_template="{{ x }}")
    assert (spec.name, spec.chat_template, spec.tied) == ("Small One", "{{ x }}", False)


def test_the_vocabulary_is_the_embedding_s_rows(tmp_path: Path) -> None:
    rows = len(tinymodel.TOKENS) + 13
    spec = spec_of(tmp_path, tensors={"token_embd.weight": np.zeros((rows, 64), dtype=np.float32)})
    assert spec.vocab == rows, "padded rows have no token, yet a logit each"


@pytest.mark.parametrize(("kind", "scale"), [("linear", 4.0), ("none", 1.0)])
def test_linear_scaling_divides_positions_and_none_ignores_the_factor(tmp_path: Path, kind: str, scale: float) -> None:
    assert spec_of(tmp_path, arch__rope__scaling__type=kind, arch__rope__scaling__factor=4.0).rope.factor == scale


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arch__rope__scaling__type": "longrope"}, r"rope\.scaling\.type 'longrope'"),
        ({"arch__rope__scaling__type": "linear", "arch__rope__scaling__factor": 0.0}, r"scaling\.factor 0\.0"),
        ({"arch__rope__scaling__type": "linear", "arch__rope__scaling__factor": float("nan")}, r"scaling\.factor nan"),
        ({"arch__rope__dimension_count": 8}, r"rope\.dimension_count 8 beside heads of 16"),
        ({"arch__attention__value_length": 32}, r"attention\.value_length 32 beside heads of 16"),
        ({"arch__attention__head_count_kv": 3}, r"4 query heads for 3 KV heads"),
        ({"arch__attention__head_count_kv": 8}, r"4 query heads for 8 KV heads"),
        ({"arch__expert_count": 8}, r"expert_count 8"),
        ({"arch__attention__head_count": 0}, r"attention\.head_count = 0"),
        ({"arch__feed_forward_length": 0}, r"feed_forward_length = 0"),
        ({"arch__context_length": 0}, r"context_length = 0"),
        ({"arch__context_length": ABSENT}, r"context_length"),
        ({"arch__attention__layer_norm_rms_epsilon": ABSENT}, r"layer_norm_rms_epsilon"),
        ({"arch__embedding_length": "wide"}, r"embedding_length"),
        ({"arch__attention__key_length": 15, "arch__attention__value_length": 15, "arch__rope__dimension_count": 15}, r"15"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        spec_of(tmp_path, **fields)
    assert "tiny.gguf" in str(caught.value), "and the file is named"
    assert "\n" not in str(caught.value)


def test_no_experts_are_no_experts(tmp_path: Path) -> None:
    assert spec_of(tmp_path, arch__expert_count=0).n_layers == 2


def test_without_an_embedding_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor token_embd\.weight"):
        spec_of(tmp_path, tensors={"token_embd.weight": ABSENT})


def test_tokenizer_arrays_and_what_they_default_to(tmp_path: Path) -> None:
    full = read_tokenizer(write(tmp_path / "full.gguf", Tiny(), tokenizer__ggml__bos_token_id=1))
    assert (full.model, full.pre, full.bos_token_id, full.eos_token_id) == ("gpt2", "gpt-2", 1, 2)
    assert full.tokens == tuple(tinymodel.TOKENS)
    assert full.token_type[:4] == (3, 3, 3, 1)
    names = ("token_type", "pre", "eos_token_id")
    bare = read_tokenizer(write(tmp_path / "bare.gguf", Tiny(), **{f"tokenizer__ggml__{name}": ABSENT for name in names}))
    assert (bare.pre, bare.merges, bare.add_bos_token, bare.bos_token_id, bare.eos_token_id) == ("", (), False, None, None)
    assert bare.token_type == (1,) * len(bare.tokens), "all ordinary"


@pytest.mark.parametrize("name", ["tokens", "model"])
def test_missing_tokenizer_arrays_are_named(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "bare.gguf", Tiny(), **{f"tokenizer__ggml__{name}": ABSENT})
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.{name}"):
        read_tokenizer(file)
