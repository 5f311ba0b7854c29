"""A CUDA device that really fails under `kvalet serve`: one error to the client, status 70, a restart from what RAM held."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from faultyproc import FaultyServer

pytestmark = pytest.mark.gpu
SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 5000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    assert torch.cuda.is_available(), "a GPU test was asked for and there is no CUDA device"


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(10, 5000), k=1200)


def test_a_device_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    sizes = ["--device", "cuda", "--load-format", "dummy", "--pool-tokens", "4096", "--ram-bytes", "1GiB", "--max-rows", "8"]
    sizes += ["--store", str(tmp_path / "kv"), "--store-bytes", "4GiB", "--store-min-free-bytes", "0"]
    with FaultyServer(folder, "device", tmp_path / "now", *sizes) as server:
        for number in range(6):
            server.complete(prompt(number), 8, f"s{number}")
        assert server.metric("kvalet_spilled_bytes_total", tier="ram") > 0
        body = {"model": server.model, "prompt": prompt(90), "max_tokens": 8}
        server.trigger.touch()
        status, reply = server.request("/v1/completions", body)
        assert status == 503
        assert reply["error"]["code"] in ("device_error", "device_lost", "shutdown"), reply
        assert server.process is not None
        assert server.process.wait(120) == 70
        assert "drained: nothing is left to do" in server.log
        server.trigger.unlink()
        server.start()
        back = [server.complete(prompt(number), 8, f"s{number}")["kvalet"] for number in range(6)]
        assert sum(report["disk_tokens"] for report in back) >= 1024
        assert server.terminate() == 0
