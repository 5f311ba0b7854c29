"""Small Hugging Face folders with random weights, written without the ``transformers`` package: config.json, safetensors in one
file or in shards, a tokenizer, a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hftokens
import torch
from safetensors.torch import save_file
from torch import Tensor

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def tensors(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    """Everything that such a model has, by the names of its checkpoints."""
    generator = torch.Generator().manual_seed(seed)
    hidden, dim, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int, scale: float = 1.5) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale / columns**0.5).to(dtype)

    def vector(size: int, around: float = 1.0) -> Tensor:
        return (around + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    found = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 4.0), "model.norm.weight": vector(hidden)}
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = matrix(config["vocab_size"], hidden, 3.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, (rows, columns) in shapes.items():
            found[f"{at}{name}.weight"] = matrix(rows, columns)
            if config["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                found[f"{at}{name}.bias"] = vector(rows, 0.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = vector(hidden)
        if config["model_type"] == "qwen3":
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                found[f"{at}{name}.weight"] = vector(dim)
    return found


def write(
    folder: Path,
    changes: dict[str, Any] | None = None,
    *,
    shards: int = 1,
    tokenizer: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    change: Change | None = None,
) -> dict[str, Tensor]:
    """``changes``: fields of config.json (None values are written as null). ``change(config, tensors)`` may alter what is
    written. Returns the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | (changes or {})
    config["architectures"] = [
        {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}.get(
            config["model_type"], "Other"
        )
        + "ForCausalLM"
    ]
    found = tensors(config, dtype, seed)
    if change is not None:
        change(config, found)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [_control(2), _control(0)]}))
    if tokenizer:
        made = hftokens.byte_level(CONTROLS, ("<think>", "</think>"))
        hftokens.save(made, folder, eos_token="<|im_end|>", chat_template=CHATML)
        assert [made.token_to_id(name) for name in CONTROLS] == [_control(i) for i in range(3)]
    save_shards(folder, found, shards)
    return found


def _control(number: int) -> int:
    """Ids of the control tokens of ``hftokens.byte_level``: behind letters and merges."""
    made = hftokens.byte_level(CONTROLS)
    token_id: int = made.token_to_id(CONTROLS[number])
    return token_id


def save_shards(folder: Path, found: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(found, folder / "model.safetensors")
        return
    where = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(found)}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in found.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
