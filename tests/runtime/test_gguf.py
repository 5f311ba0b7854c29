"""The GGUF reader against the ``gguf`` package's own, and against damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import tinymodel
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.spec import read_spec, read_tokenizer


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    tinymodel.write(path, tinymodel.Tiny())
    return path


def test_fields_and_tensors_equal_the_packages(tiny: Path) -> None:
    ours, theirs = GgufFile(tiny), gguf.GGUFReader(tiny)
    assert {name for name in theirs.fields if not name.startswith("GGUF.")} == set(ours.fields)
    for name, value in ours.fields.items():
        expected = theirs.fields[name].contents()
        assert (list(value) if isinstance(value, tuple) else value) == expected, name
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed([int(n) for n in tensor.shape]))
        assert info.kind == tensor.tensor_type
        assert ours.data(tensor.name).tobytes() == tensor.data.tobytes(), tensor.name


def test_the_shipped_model_reads_as_described(model_path: Path) -> None:
    """P48: 272 tensors, no output.weight, token_embd Q8_0, matrices Q4_1, 9/3 heads, rope base 100000."""
    file = GgufFile(model_path)
    spec, tokenizer = read_spec(file), read_tokenizer(file)
    assert len(file.tensors) == 272
    assert spec.tied
    assert file.tensors["token_embd.weight"].kind.name == "Q8_0"
    assert {i.kind.name for i in file.tensors.values() if len(i.shape) == 2} == {"Q4_1", "Q8_0"}
    assert (spec.n_layers, spec.n_q_heads, spec.n_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.rope.base, spec.context, spec.vocab) == (100_000.0, 8192, 49_152)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.add_bos_token) == (1, 2, False)
    assert tokenizer.pre == "smollm"
    assert tokenizer.tokens[1:3] == ("<|im_start|>", "<|im_end|>")
    assert spec.chat_template is not None
    assert "im_start" in spec.chat_template
    assert spec.geometry("bf16").page_bytes == 360 * 1024


def test_missing_empty_and_foreign_files_are_one_sentence(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "empty").touch()
    for name, words in (
        ("nowhere", "no model file"),
        ("empty", "is empty"),
        ("foreign", "not a GGUF"),
        (".", "cannot be read"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            GgufFile(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_every_cut_of_a_file_is_refused(tiny: Path) -> None:
    whole = tiny.read_bytes()
    rng = np.random.default_rng(7)
    cuts = sorted({1, 3, 4, 8, 23, 24, len(whole) - 1, *rng.integers(1, len(whole), 60).tolist()})
    for cut in cuts:
        tiny.write_bytes(whole[:cut])
        with pytest.raises(ModelError):
            GgufFile(tiny)


def test_damaged_heads_never_escape_as_other_errors(tiny: Path) -> None:
    """Any byte of the head overwritten: the file opens or is refused in one sentence, nothing else, and nothing is huge."""
    whole = tiny.read_bytes()
    head = len(GgufFile(tiny).head_bytes)
    rng = np.random.default_rng(11)
    refused = []
    for place in rng.integers(0, head, 400).tolist():
        broken = bytearray(whole)
        broken[place] ^= int(rng.integers(1, 256))
        tiny.write_bytes(broken)
        try:
            read_spec(GgufFile(tiny))
        except ModelError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert max(map(len, refused)) < 600
    assert all(sentence.isprintable() for sentence in refused)


def test_unknown_tensor_type_and_version_are_named(tiny: Path) -> None:
    whole = tiny.read_bytes()
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    broken = bytearray(whole)
    broken[at : at + 4] = (201).to_bytes(4, "little")
    tiny.write_bytes(broken)
    with pytest.raises(ModelError, match=r"output_norm\.weight.*unknown type 201"):
        GgufFile(tiny)
    broken = bytearray(whole)
    broken[4:8] = (9).to_bytes(4, "little")
    tiny.write_bytes(broken)
    with pytest.raises(ModelError, match="version 9"):
        GgufFile(tiny)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.expert_count", 4, "expert_count 4"),
        ("llama.block_count", 0, "block_count = 0"),
    ],
)
def test_unsupported_fields_are_refused_by_name(tmp_path: Path, field: str, value: str | int, words: str) -> None:
    def change(writer: gguf.GGUFWriter, _: object) -> None:
        writer.kv_data[0].pop(field, None)
        if isinstance(value, str):
            writer.add_string(field, value)
        else:
            writer.add_uint32(field, value)

    path = tmp_path / "changed.gguf"
    tinymodel.write(path, tinymodel.Tiny(), change)
    with pytest.raises(ModelError, match=words):
        read_spec(GgufFile(path))


def test_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mamba.gguf"
    tinymodel.write(path, tinymodel.Tiny(architecture="mamba"))
    with pytest.raises(ModelError, match="mamba"):
        read_spec(GgufFile(path))


def test_without_chat_template_and_pre(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    tinymodel.write(path, tinymodel.Tiny(), lambda writer, _: writer.kv_data[0].pop("tokenizer.ggml.pre"))
    file = GgufFile(path)
    assert read_spec(file).chat_template is None
    assert read_tokenizer(file).pre == ""
