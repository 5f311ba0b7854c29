"""``kvalet doctor FOLDER``: what a model folder is, or why it cannot be served, without reading a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinyfolder
from kvalet.api.doctor import Subject, Verdict, check_model, place_of


def test_a_folder_is_told_by_its_shape(tmp_path: Path) -> None:
    tinyfolder.write(tmp_path, shards=2)
    found = check_model(Subject(tmp_path, False, ""))
    assert found.verdict is Verdict.OK, found
    assert "qwen3, 2 layers, 2,048 tokens of context, 0." in found.found


@pytest.mark.parametrize(
    ("changes", "missing", "words"),
    [
        ({"num_experts": 4}, "", "num_experts 4, a mixture of experts"),
        ({}, "model-00002-of-00002.safetensors", "lacks model-00002-of-00002.safetensors"),
        ({}, "config.json", "has no config.json"),
    ],
)
def test_why_a_folder_cannot_be_served(tmp_path: Path, changes: dict[str, object], missing: str, words: str) -> None:
    tinyfolder.write(tmp_path, changes, shards=2)
    if missing:
        (tmp_path / missing).unlink()
    found = check_model(Subject(tmp_path, False, ""))
    assert found.verdict is Verdict.WRONG
    assert words in found.found
    assert found.advice


def test_a_repository_that_was_not_pulled_is_a_path_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    path = place_of("owner/nothing", {})
    assert path == Path("owner/nothing")
    assert check_model(Subject(path, False, "")).verdict is Verdict.WRONG
