"""The identity's fields: whatever changes the meaning of stored bytes changes one of them, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import tinymodel
import torch
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import load_model
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.identity import ARITHMETIC, CACHE_ENTRIES, CACHE_NAME, cached_digest, numerics_family, weight_digest
from tinymodel import Tiny


def identity(path: Path, **changes: object) -> dict[str, str]:
    config = dataclasses.replace(EngineConfig(path, n_pages=4, weights="bf16", threads=1), **changes)  # type: ignore[arg-type]
    return load_model(config).identity


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "tiny.gguf"
    tinymodel.write(found, Tiny())
    return found


def differing(a: dict[str, str], b: dict[str, str]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if a[name] != b[name]}


def test_settings_that_change_bits_change_a_field(path: Path) -> None:
    base = identity(path)
    assert all(isinstance(value, str) and value for value in base.values())
    assert differing(base, identity(path, weights="fp32")) == {"weights_mode", "kv_dtype", "numerics", "page_stride_bytes"} - (
        {"page_stride_bytes"} if base["page_stride_bytes"] == identity(path, weights="fp32")["page_stride_bytes"] else set()
    )
    assert differing(base, identity(path, weights="int4")) == {"weights_mode", "numerics"}
    assert differing(base, identity(path, deterministic=True)) == {"numerics"}
    rows4, rows8 = (identity(path, deterministic=True, decode_rows=n) for n in (4, 8))
    assert differing(rows4, rows8) == {"numerics"}
    assert "rows4" in rows4["numerics"]


def test_settings_that_change_no_bits_change_nothing(path: Path) -> None:
    base = identity(path)
    for changes in ({"n_pages": 99}, {"context_tokens": 64}, {"arena_tokens": 0}, {"max_step_tokens": 64}, {"decode_rows": 2}):
        assert differing(base, identity(path, **changes)) == set(), changes


def test_another_model_changes_the_weights_digest(path: Path, tmp_path: Path) -> None:
    base = identity(path)
    other = tmp_path / "other.gguf"
    tinymodel.write(other, Tiny(seed=1))
    assert differing(base, identity(other)) == {"weights"}
    tinymodel.write(other, Tiny(rope_base=500.0))
    assert differing(base, identity(other)) == {"rope"}
    copied = tmp_path / "copy.gguf"
    copied.write_bytes(path.read_bytes())
    assert identity(copied) == base, "the file's name and age are not part of it"


def test_one_changed_byte_of_weights_is_seen(path: Path) -> None:
    file = GgufFile(path)
    before, info = weight_digest(file, None), file.tensors["blk.1.ffn_down.weight"]
    file.close()
    with path.open("r+b") as handle:
        handle.seek(info.start + info.n_bytes - 1)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))
    assert weight_digest(GgufFile(path), None) != before


def test_any_change_of_the_files_stat_computes_again(tmp_path: Path) -> None:
    """Device, inode, size, mtime in ns; also a clock that goes back, and another file of the same size and time."""
    path, calls = tmp_path / "weights", []

    def digest() -> str:
        return cached_digest(path, tmp_path, lambda: calls.append(1) or f"{len(calls):032x}")  # type: ignore[func-returns-value]

    path.write_bytes(b"12345678")
    os.utime(path, ns=(5, 10**18))
    assert digest() == digest() == f"{1:032x}"
    os.utime(path, ns=(5, 10**18 - 1))
    assert digest() == f"{2:032x}", "one nanosecond back"
    os.truncate(path, 7)
    os.utime(path, ns=(5, 10**18 - 1))
    assert digest() == f"{3:032x}", "one byte less, at the same time"
    other = tmp_path / "other"
    other.write_bytes(b"1234567")
    os.utime(other, ns=(5, 10**18 - 1))
    os.replace(other, path)
    assert digest() == f"{4:032x}", "another inode"
    assert digest() == f"{4:032x}"


def test_the_digest_is_cached_by_the_files_stat(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    file = GgufFile(path)
    digest = weight_digest(file, cache)
    entries = json.loads((cache / CACHE_NAME).read_text())
    assert list(entries.values()) == [digest]
    (key,) = entries
    (cache / CACHE_NAME).write_text(json.dumps({key: "0" * 32}))
    assert weight_digest(file, cache) == "0" * 32, "read from the cache"
    os.utime(path, ns=(1, 1))
    assert weight_digest(file, cache) == digest, "another mtime is another file"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "\x00\xff"])
def test_a_damaged_cache_is_no_error(path: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / CACHE_NAME).write_text(content)
    file = GgufFile(path)
    assert weight_digest(file, tmp_path) == weight_digest(file, None)
    assert len(json.loads((tmp_path / CACHE_NAME).read_text())) == 1


def test_the_cache_is_bounded_and_an_unwritable_folder_harmless(path: Path, tmp_path: Path) -> None:
    old = {f"0:{i}:0:0": "f" * 32 for i in range(CACHE_ENTRIES + 9)}
    (tmp_path / CACHE_NAME).write_text(json.dumps(old))
    file = GgufFile(path)
    digest = weight_digest(file, tmp_path)
    kept = json.loads((tmp_path / CACHE_NAME).read_text())
    assert len(kept) == CACHE_ENTRIES
    assert list(kept.values())[-1] == digest
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    assert weight_digest(file, blocked) == digest


def test_numerics_names_what_changes_bits_only_where_equal_bits_are_promised(path: Path) -> None:
    """Without ``deterministic`` KV of the same kind of arithmetic serves, whatever computed it; with it, nothing else does."""
    plain = EngineConfig(path, n_pages=4, decode_rows=7)
    strict = dataclasses.replace(plain, deterministic=True)
    assert [numerics_family(plain, mode) for mode in ("bf16", "int4")] == ["cpu-bf16", "cpu-int4"]
    family = numerics_family(strict, "bf16")
    assert family.startswith("cpu-bf16-deterministic-rows7-")
    for part in (f"-arithmetic{ARITHMETIC}-", f"-torch{torch.__version__}-", torch.backends.cpu.get_cpu_capability().lower()):
        assert part in family
    assert family != numerics_family(strict, "fp32")


def test_a_cache_that_could_not_be_written_leaves_nothing_behind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError("disk full")

    cache = tmp_path / "cache"
    monkeypatch.setattr(os, "replace", full)
    file = GgufFile(path)
    assert weight_digest(file, cache) == weight_digest(file, None)
    assert list(cache.iterdir()) == []
