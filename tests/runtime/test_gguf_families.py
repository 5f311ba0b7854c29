"""GGUF files of the families say the same as a folder with the same weights, which is compared with transformers: interleaved
rows, rope scalings, windows, biases, layers without rotation; and what their fields may not say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import hftokens
import numpy as np
import pytest
import tinymodel
import torch
from gguf import GGMLQuantizationType
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel, load_model
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.gguf_tensors import rope_order
from kvalet.runtime.safetensors_files import file_name_of
from kvalet.runtime.spec import read_spec
from kvalet.runtime.teacher import forced_logits
from safetensors.torch import save_file
from tinymodel import Tiny

IDS = [i * 7 % 97 for i in range(60)]
TINY = Tiny(kind=GGMLQuantizationType.F32, own_head=True)


def add(writer: gguf.GGUFWriter, **fields: Any) -> None:
    """``__`` stands for a dot, ``arch`` for the architecture."""
    for name, value in fields.items():
        key = name.replace("__", ".").replace("arch.", f"{writer.arch}.")
        writer.kv_data[0].pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def as_folder(tiny: Tiny, found: dict[str, np.ndarray[Any, Any]], interleaved: bool, folder: Path, **config: Any) -> None:
    """The same weights by their names in a checkpoint, q and k in rotate-half order."""
    tensors = {}
    for role, values in found.items():
        tensor = torch.from_numpy(values.copy())
        heads = {"attn_q": tiny.n_q_heads, "attn_k": tiny.n_kv_heads}.get(role.rpartition(".")[0].rpartition(".")[2], 0)
        if heads and interleaved:
            tensor = tensor[rope_order(tensor.shape[0], heads)]
        tensors[file_name_of(role)] = tensor.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    sizes = {
        "vocab_size": found["token_embd.weight"].shape[0],
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.ffn,
        "num_hidden_layers": tiny.n_layers,
        "num_attention_heads": tiny.n_q_heads,
        "num_key_value_heads": tiny.n_kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": tiny.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": tiny.rope_base,
        "tie_word_embeddings": not tiny.own_head,
    }
    (folder / "config.json").write_text(json.dumps(sizes | config))
    tokenizer = hftokens.Tokenizer(hftokens.models.BPE(vocab={"!": 0, '"': 1}, merges=[]))
    tokenizer.decoder = hftokens.decoders.ByteLevel()
    hftokens.save(tokenizer, folder)


YARN = {"arch__rope__scaling__type": "yarn", "arch__rope__scaling__factor": 4.0}
CASES: dict[str, tuple[Tiny, dict[str, Any], dict[str, Any]]] = {
    "llama": (TINY, {}, {"model_type": "llama"}),
    "mistral's window": (TINY, {"arch__attention__sliding_window": 20}, {"model_type": "mistral", "sliding_window": 20}),
    "smollm3": (
        dataclasses.replace(TINY, architecture="smollm3", n_layers=5),
        {},
        {"model_type": "smollm3"},
    ),
    "qwen2, biases and linear scaling": (
        dataclasses.replace(TINY, architecture="qwen2", biases=True),
        {"arch__rope__scaling__type": "linear", "arch__rope__scaling__factor": 2.0},
        {"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "qwen2, window in one layer": (
        dataclasses.replace(TINY, architecture="qwen2", biases=True),
        {"arch__attention__sliding_window": 20, "arch__attention__sliding_window_pattern": [False, True]},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3, yarn": (
        dataclasses.replace(TINY, architecture="qwen3", qk_norm=True),
        {**YARN, "arch__rope__scaling__original_context_length": 32},
        {
            "model_type": "qwen3",
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
    ),
    "llama, yarn with its own sharpness": (
        TINY,
        {**YARN, "arch__rope__scaling__original_context_length": 32, "arch__rope__scaling__attn_factor": 0.5},
        {
            "model_type": "llama",
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 0.5 * (0.1 * np.log(4.0) + 1.0),
            },
        },
    ),
}


def load(path: Path) -> LoadedModel:
    return load_model(EngineConfig(path, n_pages=2, weights="fp32", threads=1))


@pytest.mark.parametrize("name", CASES)
def test_file_and_folder_say_the_same(tmp_path: Path, name: str) -> None:
    tiny, fields, config = CASES[name]
    path = tmp_path / "tiny.gguf"
    found = tinymodel.write(path, tiny, lambda writer, _: add(writer, **fields))
    as_folder(tiny, found, tiny.architecture in ("llama", "smollm3"), tmp_path / "folder", **config)
    file, folder = load(path), load(tmp_path / "folder")
    said = [forced_logits(model.decoder, [*IDS, 0], 1, "fp32", piece=25) for model in (file, folder)]
    torch.testing.assert_close(said[0], said[1], atol=2e-5, rtol=0)
    for field in ("nope_layers", "windows", "qkv_bias", "out_bias", "qk_norm", "tied"):
        assert getattr(file.spec, field) == getattr(folder.spec, field), field
    if fields or "smollm3" in name:
        plain = tmp_path / "plain.gguf"
        tinymodel.write(plain, dataclasses.replace(tiny, architecture="llama" if "smollm3" in name else tiny.architecture))
        other = forced_logits(load(plain).decoder, [*IDS, 0], 1, "fp32")
        assert (other - said[0]).abs().max() > 0.01, "the fields matter"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arch__attention__sliding_window": 20}, r"qwen2\.attention\.sliding_window 20 with sliding_window_pattern None"),
        (
            {"arch__attention__sliding_window": 20, "arch__attention__sliding_window_pattern": 2},
            r"sliding_window_pattern 2, which is not supported",
        ),
        ({**YARN, "arch__rope__scaling__yarn_ext_factor": 0.5}, r"yarn_ext_factor 0\.5"),
        ({**YARN, "arch__rope__scaling__yarn_log_multiplier": 0.1}, r"yarn_log_multiplier 0\.1"),
        ({**YARN, "arch__rope__scaling__factor": 0.5}, r"factor 0\.5"),
        ({"arch__rope__freq_base": 0.0}, r"base 0\.0"),
    ],
)
def test_fields_that_are_not_understood_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    path = tmp_path / "tiny.gguf"
    tinymodel.write(path, dataclasses.replace(TINY, architecture="qwen2"), lambda writer, _: add(writer, **fields))
    with pytest.raises(ModelError, match=words) as caught:
        read_spec(GgufFile(path))
    assert "tiny.gguf" in str(caught.value)


def test_a_bias_that_only_some_layers_have_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny = dataclasses.replace(TINY, architecture="qwen2", biases=True)
    tinymodel.write(path, tiny, lambda _, found: found.pop("blk.1.attn_k.bias"))
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.attn_k\.bias"):
        load(path)


def test_yarn_serves_the_stretched_context(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    fields = {**YARN, "arch__rope__scaling__original_context_length": 4096}
    tinymodel.write(path, TINY, lambda writer, _: add(writer, **fields))
    spec = read_spec(GgufFile(path))
    assert (spec.context, spec.served_context(0), spec.served_context(10_000), spec.served_context(99_999)) == (
        4096,
        4096,
        10_000,
        16_384,
    )
