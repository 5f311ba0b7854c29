"""The shape that the GPU is measured with: Qwen3-8B, bf16, random weights; a decoder in process, a folder for a server."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.device_ops import DeviceOps
from kvalet.runtime.dummy import DummyTensors
from kvalet.runtime.plain_weights import load_plain
from kvalet.runtime.rope_spec import RopeSpec
from kvalet.runtime.spec import ModelSpec
from torch import Tensor

CONTEXT = 40_960
SPEC = ModelSpec(
    architecture="qwen3", name="qwen3-8b-shape", n_layers=36, hidden=4096, n_q_heads=32, n_kv_heads=8, head_dim=128, ffn=12288,
    vocab=151_936, context=CONTEXT, max_context=CONTEXT, eps=1e-6, rope=RopeSpec(1_000_000.0), qk_norm=True,
)  # fmt: skip
FOLDER_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": SPEC.n_layers,
    "hidden_size": SPEC.hidden, "num_attention_heads": SPEC.n_q_heads, "num_key_value_heads": SPEC.n_kv_heads,
    "head_dim": SPEC.head_dim, "intermediate_size": SPEC.ffn, "vocab_size": SPEC.vocab, "max_position_embeddings": CONTEXT,
    "rms_norm_eps": SPEC.eps, "rope_theta": SPEC.rope.base, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip


def decoder(pool: Tensor, ops: DeviceOps, spec: ModelSpec = SPEC, positions: int = CONTEXT + 1) -> CudaDecoder:
    """Random weights on the pool's device, in its dtype."""
    return CudaDecoder(spec, load_plain(DummyTensors(spec), spec, pool.dtype, ops.device), pool, positions, ops)


def write_folder(folder: Path) -> Path:
    """What ``kvalet serve FOLDER --load-format dummy`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FOLDER_CONFIG))
    return folder


def cuda_device() -> torch.device:
    assert torch.cuda.is_available(), "this needs a CUDA device"
    return torch.device("cuda", torch.cuda.current_device())
