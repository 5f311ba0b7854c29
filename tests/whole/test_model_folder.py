"""A Hugging Face folder behind the server: chat over HTTP, its KV found again after a restart, dummy weights, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tinyfolder
import torch
from kvalet.api.build import StartError, build
from kvalet.api.config import EngineConfig
from serverproc import Server
from wholekit import answered, chat, refused, streamed

SMALL = ("--pool-tokens", "4096", "--ram-bytes", "8MiB")
LONG = "hello world and another world " * 20


def test_chat_and_a_restart_that_finds_its_kv(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-1.5B"
    tinyfolder.write(folder, shards=2, dtype=torch.float32)
    store = ("--store", str(tmp_path / "store"), "--store-bytes", "64MiB", "--store-min-free-bytes", "0")
    with Server(*SMALL, *store, served=str(folder)) as server:
        assert server.model == "Tiny-1.5B", "the folder's name, dots and all"
        body = chat(server, LONG, max_tokens=12)
        first = answered(server, body)
        text = first["choices"][0]["message"]["content"]
        assert first["usage"]["prompt_tokens"] > 256
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        chunks = streamed(server, body)
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == text
        assert server.terminate() == 0
    with Server(*SMALL, *store, served=str(folder)) as server:
        again = answered(server, body)
        assert again["choices"][0]["message"]["content"] == text
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256, "from the disk"
        assert server.terminate() == 0


def test_a_shape_with_random_weights_speaks_in_ids(tmp_path: Path) -> None:
    """--load-format dummy on a folder that holds nothing but its config.json."""
    (tmp_path / "config.json").write_text(json.dumps(tinyfolder.CONFIG))
    with Server(*SMALL, "--load-format", "dummy", "--served-name", "shape", served=str(tmp_path)) as server:
        assert "no tokenizer: prompts are lists of token ids" in server.log
        first = server.complete([1, 2, 3, 319], max_tokens=6)
        ids = first["choices"][0]["token_ids"]
        assert first["choices"][0]["text"].split() == [str(token) for token in ids], "the ids as text"
        assert server.complete([1, 2, 3, 319], max_tokens=6)["choices"][0]["token_ids"] == ids
        assert "send token ids to /v1/completions" in refused(server, chat(server, "hello"))["message"]
        body = {"model": "shape", "prompt": "hello", "max_tokens": 2}
        assert "has no tokenizer" in refused(server, body, "/v1/completions")["message"]
        assert refused(server, {**body, "prompt": [320]}, "/v1/completions")["param"] == "prompt[0]"


def test_a_model_that_is_not_supported_ends_in_one_sentence(tmp_path: Path) -> None:
    tinyfolder.write(tmp_path, {"num_experts": 4})
    with pytest.raises(StartError, match="has num_experts 4, a mixture of experts") as caught:
        build(EngineConfig(model=str(tmp_path)))
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
