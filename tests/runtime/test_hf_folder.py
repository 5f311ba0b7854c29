"""Folders of safetensors: what is loaded is what was saved, in shards or not; and what is refused, never filled with zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tinyfolder
import torch
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel, load_model
from kvalet.runtime.errors import ModelError
from kvalet.runtime.identity import CACHE_NAME
from kvalet.runtime.loading import open_model
from kvalet.runtime.plain_weights import load_plain
from kvalet.runtime.teacher import forced_logits
from safetensors.torch import save_file
from torch import Tensor

IDS = [5, 17, 3, 42, 42, 8, 90, 11, 23, 61, 7, 0, 33, 70, 19, 2, 54, 28]
CPU = torch.device("cpu")


def load(folder: Path, **changes: Any) -> LoadedModel:
    return load_model(EngineConfig(folder, n_pages=2, threads=1, **({"weights": "fp32"} | changes)))


def said(model: LoadedModel) -> Tensor:
    return forced_logits(model.decoder, [*IDS, 0], 1, model.spec.geometry("fp32").kv_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_are_the_saved_ones_stacked(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = tinyfolder.write(tmp_path, shards=2, dtype=dtype)
    with open_model(tmp_path) as files:
        plain = load_plain(files.source, files.spec, torch.float32, CPU)
    at = "model.layers.1."
    attn = [saved[f"{at}self_attn.{name}_proj.weight"].float() for name in "qkv"]
    assert torch.equal(plain.layers[1].qkv, torch.cat(attn))
    assert torch.equal(plain.layers[1].gate_up[96:], saved[at + "mlp.up_proj.weight"].float())
    assert torch.equal(plain.layers[0].q_norm, saved["model.layers.0.self_attn.q_norm.weight"].float())
    assert torch.equal(plain.head, saved["lm_head.weight"].float())
    assert torch.equal(plain.embed, saved["model.embed_tokens.weight"].float())
    assert plain.layers[0].qkv_bias is None
    assert plain.rope_factors is None


def test_biases_are_stacked_and_tied_heads_shared(tmp_path: Path) -> None:
    saved = tinyfolder.write(tmp_path, {"model_type": "qwen2", "tie_word_embeddings": True})
    with open_model(tmp_path) as files:
        plain = load_plain(files.source, files.spec, torch.bfloat16, CPU)
    expected = torch.cat([saved[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv"])
    assert torch.equal(plain.layers[0].qkv_bias, expected)
    assert plain.head is plain.embed
    assert plain.layers[0].out_bias is None


def test_shards_change_nothing_not_even_the_identity(tmp_path: Path) -> None:
    one, three = tmp_path / "one", tmp_path / "three"
    tinyfolder.write(one)
    tinyfolder.write(three, shards=3)
    a, b = load(one), load(three)
    assert a.identity == b.identity
    assert torch.equal(said(a), said(b))


def test_other_weights_configurations_and_tokenizers_are_other_identities(tmp_path: Path) -> None:
    def differing(name: str, expected: set[str], **kwargs: Any) -> None:
        tinyfolder.write(tmp_path / name, **kwargs)
        other = load(tmp_path / name).identity
        assert {field for field in other if other[field] != base[field]} == expected, name

    tinyfolder.write(tmp_path / "base")
    base = load(tmp_path / "base").identity
    differing("same", set())
    differing("weights", {"weights"}, seed=1)
    differing("eps", {"decoder"}, changes={"rms_norm_eps": 1e-5})
    differing("rope", {"rope"}, changes={"rope_theta": 5e5})
    differing("window", {"decoder"}, changes={"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1})
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    differing("yarn", {"rope"}, changes={"rope_scaling": scaling})
    differing("sharper", {"rope"}, changes={"rope_scaling": {**scaling, "attention_factor": 1.5}})
    path = tmp_path / "same" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 7}))
    assert load(tmp_path / "same").identity["tokenizer"] != base["tokenizer"], "other ends of turns"


def test_each_shard_s_digest_is_cached_by_its_own_stat(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tinyfolder.write(folder, shards=2)
    base = load(folder, cache_dir=cache).identity
    entries = json.loads((cache / CACHE_NAME).read_text())
    assert len(entries) == 2
    (cache / CACHE_NAME).write_text(json.dumps(dict.fromkeys(entries, f"{1:032x}")))
    assert load(folder, cache_dir=cache).identity["weights"] == f"{2:032x}", "the sum of what the cache says"
    tinyfolder.write(folder, shards=2)
    assert load(folder, cache_dir=cache).identity == base, "other files, same bytes: computed again"


def change_tensor(name: str, **kinds: Any) -> tinyfolder.Change:
    def change(_: dict[str, Any], found: dict[str, Tensor]) -> None:
        tensor = found.pop(name)
        if "shape" in kinds:
            found[name] = torch.zeros(kinds["shape"], dtype=tensor.dtype)
        if "dtype" in kinds:
            found[name] = tensor.to(kinds["dtype"])

    return change


def extra(name: str, *shape: int) -> tinyfolder.Change:
    return lambda config, found: found.update({name: torch.ones(*shape)})


UP = "model.layers.1.mlp.up_proj.weight"
BROKEN: dict[str, tuple[tinyfolder.Change, str]] = {
    "missing": (change_tensor(UP), rf"has no tensor {UP}"),
    "missing norm": (change_tensor("model.layers.0.self_attn.k_norm.weight"), r"no tensor model\.layers\.0\.self_attn\.k_norm"),
    "missing head": (change_tensor("lm_head.weight"), r"no tensor lm_head\.weight"),
    "shape": (change_tensor(UP, shape=(95, 64)), r"up_proj\.weight in .* has shape \[95, 64\], not \[96, 64\]"),
    "transposed": (change_tensor(UP, shape=(64, 96)), r"has shape \[64, 96\], not \[96, 64\]"),
    "fewer rows of the vocabulary": (change_tensor("model.embed_tokens.weight", shape=(319, 64)), r"shape \[319, 64\]"),
    "whole numbers": (change_tensor(UP, dtype=torch.int8), r"is of type I8; supported are BF16, F16, F32"),
    "eight bits": (change_tensor(UP, dtype=torch.float8_e4m3fn), r"is of type F8_E4M3"),
    "a layer too many": (
        extra("model.layers.2.input_layernorm.weight", 64),
        r"tensor model\.layers\.2\.input_layernorm.*\(1 such\)",
    ),
    "a bias nobody adds": (extra("model.layers.0.self_attn.q_proj.bias", 64), r"self_attn\.q_proj\.bias"),
    "an adapter": (extra("model.layers.0.mlp.up_proj.lora_A", 4, 64), r"lora_A"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("shards", [1, 3])
def test_broken_tensors_are_refused_by_name(tmp_path: Path, name: str, shards: int) -> None:
    change, words = BROKEN[name]
    tinyfolder.write(tmp_path, shards=shards, change=change)
    with pytest.raises(ModelError, match=words) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_known_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    plain, old, twice = tmp_path / "plain", tmp_path / "old", tmp_path / "twice"
    tinyfolder.write(plain, {"tie_word_embeddings": True})
    tinyfolder.write(old, {"tie_word_embeddings": True}, change=extra("model.layers.0.self_attn.rotary_emb.inv_freq", 8))

    def again(_: dict[str, Any], found: dict[str, Tensor]) -> None:
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()

    tinyfolder.write(twice, {"tie_word_embeddings": True}, change=again)
    expected = said(load(plain))
    for folder in (old, twice):
        assert torch.equal(said(load(folder)), expected)


def test_a_tied_head_that_is_another_is_refused(tmp_path: Path) -> None:
    tinyfolder.write(tmp_path, {"tie_word_embeddings": True}, change=extra("lm_head.weight", 320, 64))
    with pytest.raises(ModelError, match=r"tie_word_embeddings true, but its lm_head\.weight is not its embedding"):
        load(tmp_path)


SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
@pytest.mark.parametrize("shards", [1, 3])
def test_short_files_are_refused(tmp_path: Path, shards: int, cut: int) -> None:
    tinyfolder.write(tmp_path, shards=shards)
    path = tmp_path / ("model.safetensors" if shards == 1 else SHARD)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=rf"{path.name} is damaged or cut short"):
        load(tmp_path)


def test_a_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    tinyfolder.write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(ModelError, match="damaged"):
        load(tmp_path)


def break_index(change: Any) -> Any:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        found = change(index["weight_map"])
        path.write_text(json.dumps(index if found is None else found))

    return apply


def other_home(where: dict[str, str]) -> None:
    where[UP] = next(file for file in where.values() if file != where[UP])


FOLDERS: dict[str, tuple[Any, str]] = {
    "no shard": (lambda f: (f / SHARD).unlink(), rf"lacks {SHARD}, one of 3 files"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), r"neither model\.safetensors nor"),
    "index without tensors": (break_index(lambda where: {"weight_map": {}}), r"no weight_map"),
    "index of another kind": (break_index(lambda where: []), r"index\.json cannot be read"),
    "a path in the index": (
        break_index(lambda where: where.update({UP: "../x.safetensors"})),
        r"'\.\./x\.safetensors', which is no",
    ),
    "a pickle in the index": (break_index(lambda where: where.update({UP: "x.bin"})), r"'x\.bin', which is no safetensors"),
    "index that is wrong": (break_index(other_home), rf"tensor {UP} is not in .* although"),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "config of another kind": (lambda f: (f / "config.json").write_text("[]"), r"config\.json holds no JSON object"),
    "config cut short": (lambda f: (f / "config.json").write_text('{"a": '), r"config\.json is no valid JSON"),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 200_000), r"config\.json is no valid JSON"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
    "tokenizer of nothing": (lambda f: (f / "tokenizer.json").write_text("{}"), r"tokenizer\.json"),
    "ends that are no token": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [0, 310]}'),
        r"eos_token_id 310, which is none of its \d+ tokens",
    ),
    "ends of another kind": (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'), r"eos_token_id 'x'"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_not_whole_are_refused(tmp_path: Path, name: str) -> None:
    tinyfolder.write(tmp_path, shards=3)
    change, words = FOLDERS[name]
    change(tmp_path)
    with pytest.raises((ModelError, ValueError), match=words) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    saved = tinyfolder.write(tmp_path, shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    names = [name for name, file in index.items() if file == SHARD] + [n for n in saved if index[n] != SHARD][:1]
    save_file({name: saved[name] for name in names}, tmp_path / SHARD)
    with pytest.raises(ModelError, match=r"has tensor .* in .* and in"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    tinyfolder.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelError, match=rf"{name}, a pickle, which is never loaded .* use a revision with safetensors"):
        load(tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter, not a model"):
        load(tmp_path)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    tinyfolder.write(tmp_path, {"vocab_size": 270})
    with pytest.raises(ModelError, match=r"token ids up to \d+ in its tokenizer\.json, but vocab_size 270"):
        load(tmp_path)


def test_int4_needs_blocks(tmp_path: Path) -> None:
    tinyfolder.write(tmp_path)
    with pytest.raises(ModelError, match=r"holds no Q4_0 or Q4_1 matrices"):
        load(tmp_path, weights="int4")
    assert load(tmp_path, weights="auto").decoder.weights.path == "bf16"
