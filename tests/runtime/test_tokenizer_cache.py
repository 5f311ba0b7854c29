"""The tokenizer cache: read instead of built, never trusted, never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvalet.runtime.tokenizer import CONTROL, NORMAL, Tokenizer, TokenizerArrays
from kvalet.runtime.tokenizer_cache import load_tokenizer

ARRAYS = TokenizerArrays(
    model="gpt2",
    pre="smollm",
    tokens=("<s>", "<|im_end|>", "a", "b", "ab", "é"),
    token_type=(CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, NORMAL),
    merges=("a b",),
    add_bos_token=True,
    bos_token_id=0,
    eos_token_id=1,
)


class Source:
    """Arrays that count how often they were read."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> TokenizerArrays:
        self.reads += 1
        return ARRAYS


def same(one: Tokenizer, other: Tokenizer) -> bool:
    facts = [(t.tokenizer_json, t.digest, t.bos_id, t.end_ids, t.encode("abba", allow_special=True)) for t in (one, other)]
    return facts[0] == facts[1]


def test_the_second_start_reads_no_arrays(tmp_path: Path) -> None:
    source = Source()
    first = load_tokenizer(b"key", source, tmp_path)
    second = load_tokenizer(b"key", source, tmp_path)
    assert source.reads == 1
    assert same(first, second)
    assert [path.suffix for path in tmp_path.iterdir()] == [".cache"]


def test_another_key_is_another_tokenizer(tmp_path: Path) -> None:
    source = Source()
    load_tokenizer(b"key", source, tmp_path)
    load_tokenizer(b"other", source, tmp_path)
    assert source.reads == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_folder_nothing_is_kept() -> None:
    source = Source()
    assert same(load_tokenizer(b"key", source, None), load_tokenizer(b"key", source, None))
    assert source.reads == 2


def test_every_damaged_byte_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flip anywhere, a cut anywhere, an empty file: built again, the same tokenizer, and the file is whole again."""
    source = Source()
    good = load_tokenizer(b"key", source, tmp_path)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    damaged = [data[:i] + bytes([data[i] ^ 0x40]) + data[i + 1 :] for i in range(0, len(data), 7)]
    damaged += [data[:i] for i in range(0, len(data), 101)] + [data + b"x", b"\n\n\n", b"\xff" * 100]
    for reads, bad in enumerate(damaged, start=2):
        path.write_bytes(bad)
        assert same(load_tokenizer(b"key", source, tmp_path), good)
        assert source.reads == reads
        assert path.read_bytes() == data
    assert "building it again" in caplog.text


def test_a_folder_that_cannot_be_made_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    source = Source()
    assert load_tokenizer(b"key", source, file / "below").vocab_size == 6
    assert source.reads == 1
    assert "cannot be written" in caplog.text


def test_a_failed_rename_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    load_tokenizer(b"key", Source(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text
