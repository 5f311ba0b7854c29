"""Random weights of a real shape: the same for one seed, of sane scale, another identity than any file's; and a tokenizer of
ids where the folder has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tinyfolder
import torch
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.dummy import DummyTensors, ids_tokenizer
from kvalet.runtime.engine import LoadedModel, load_model
from kvalet.runtime.errors import ModelError
from kvalet.runtime.loading import open_model
from kvalet.runtime.plain_weights import load_plain
from kvalet.runtime.teacher import forced_logits

CPU = torch.device("cpu")


def config_only(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tinyfolder.CONFIG | changes))
    return folder


def load(folder: Path, load_format: str = "dummy") -> LoadedModel:
    return load_model(EngineConfig(folder, n_pages=2, weights="fp32", threads=1, load_format=load_format))


def test_one_seed_is_one_model(tmp_path: Path) -> None:
    folder = config_only(tmp_path)
    ids = [*range(0, 300, 7), 0]
    first, second = load(folder), load(folder)
    said = [forced_logits(model.decoder, ids, 1, "fp32") for model in (first, second)]
    assert torch.equal(*said)
    assert first.identity == second.identity
    assert said[0].isfinite().all()
    assert 0.1 < said[0].std() < 10


def test_depth_keeps_activations_finite(tmp_path: Path) -> None:
    deep = load(config_only(tmp_path, num_hidden_layers=60))
    assert forced_logits(deep.decoder, [1, 2, 3, 4, 5], 1, "fp32").abs().max() < 100


def test_every_tensor_has_its_own_values_and_order_does_not_matter(tmp_path: Path) -> None:
    with open_model(config_only(tmp_path, model_type="qwen2", architectures=None), load_format="dummy") as files:
        spec = files.spec
        plain = load_plain(files.source, spec, torch.float32, CPU)
    one, other = DummyTensors(spec), DummyTensors(spec, seed=1)
    alone = torch.empty(96, 64)
    one.load("blk.1.ffn_up.weight", alone)
    assert torch.equal(alone, plain.layers[1].gate_up[96:])
    other.load("blk.1.ffn_up.weight", alone)
    assert not torch.equal(alone, plain.layers[1].gate_up[96:])
    assert not torch.equal(plain.layers[0].gate_up, plain.layers[1].gate_up)
    assert plain.layers[0].qkv.std() == pytest.approx(1 / 8, rel=0.05)
    assert torch.equal(plain.layers[0].norm_in, torch.ones(64))
    assert torch.equal(plain.layers[0].qkv_bias, torch.zeros(128))


def test_dummies_share_no_identity_with_files_nor_with_other_shapes(tmp_path: Path) -> None:
    tinyfolder.write(tmp_path / "real")
    real, dummy = load(tmp_path / "real", "auto").identity, load(tmp_path / "real").identity
    assert {field for field in real if real[field] != dummy[field]} == {"weights"}
    wider = load(config_only(tmp_path / "wider", intermediate_size=128)).identity
    narrow = load(config_only(tmp_path / "narrow")).identity
    assert wider != narrow


def test_the_folder_s_tokenizer_is_used_if_there_is_one(tmp_path: Path) -> None:
    tinyfolder.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path)
    assert not model.tokenizer.ids_only
    assert model.spec.chat_template is not None
    assert model.tokenizer.decode(model.tokenizer.encode("hello world", allow_special=False)) == "hello world"


def test_ids_are_their_own_text() -> None:
    tokenizer = ids_tokenizer(1000, frozenset({7}))
    assert tokenizer.ids_only
    assert (tokenizer.vocab_size, tokenizer.end_ids, tokenizer.bos_id, tokenizer.control_ids) == (1000, {7}, None, {})
    assert tokenizer.decode([0, 17, 999]) == "0 17 999 "
    assert tokenizer.encode("0 17 999", allow_special=True) == [0, 17, 999]
    assert len(tokenizer.digest) == 32
    assert tokenizer.digest != ids_tokenizer(1001, frozenset({7})).digest


def test_only_a_folder_has_a_shape(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"dummy weights need a folder with a config\.json"):
        load(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match="load_format must be one of auto, dummy"):
        EngineConfig(tmp_path, n_pages=2, load_format="pickle")
