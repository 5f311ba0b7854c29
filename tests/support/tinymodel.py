"""Small Llama-family GGUF files with random weights, for tests that need no real model. Written with the ``gguf`` package,
which is not what reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 127)), "Ġ", "Ċ"]


@dataclass(frozen=True)
class Tiny:
    """Sizes of the model; ``kind``: how its matrices are stored; ``own_head``: with an output.weight of its own."""

    architecture: str = "llama"
    n_layers: int = 2
    hidden: int = 64
    n_q_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    vocab: int = len(TOKENS)
    context: int = 4096
    kind: GGMLQuantizationType = GGMLQuantizationType.Q4_1
    own_head: bool = False
    biases: bool = False
    qk_norm: bool = False
    rope_base: float = 10_000.0
    seed: int = 0


def tensors(tiny: Tiny) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """All tensors in float32, in the file's order of rows."""
    rng = np.random.default_rng(tiny.seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, around: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (around + 0.1 * rng.standard_normal(size)).astype(np.float32)

    q, kv = tiny.n_q_heads * tiny.head_dim, tiny.n_kv_heads * tiny.head_dim
    found = {"token_embd.weight": matrix(tiny.vocab, tiny.hidden, 8.0), "output_norm.weight": vector(tiny.hidden)}
    if tiny.own_head:
        found["output.weight"] = matrix(tiny.vocab, tiny.hidden, 4.0)
    for layer in range(tiny.n_layers):
        at = f"blk.{layer}."
        shapes = {
            "attn_q": (q, tiny.hidden),
            "attn_k": (kv, tiny.hidden),
            "attn_v": (kv, tiny.hidden),
            "attn_output": (tiny.hidden, q),
            "ffn_gate": (tiny.ffn, tiny.hidden),
            "ffn_up": (tiny.ffn, tiny.hidden),
            "ffn_down": (tiny.hidden, tiny.ffn),
        }
        for name, (rows, columns) in shapes.items():
            found[f"{at}{name}.weight"] = matrix(rows, columns, 2.0)
        for name in ("attn_norm", "ffn_norm"):
            found[f"{at}{name}.weight"] = vector(tiny.hidden)
        if tiny.biases:
            for name, size in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
                found[f"{at}{name}.bias"] = vector(size, 0.0)
        if tiny.qk_norm:
            for name in ("attn_q_norm", "attn_k_norm"):
                found[f"{at}{name}.weight"] = vector(tiny.head_dim)
    return found


def write(path: Path, tiny: Tiny, change: Callable[[GGUFWriter, dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Write the file and return the tensors as float32 the way a reader must see them (after quantisation).

    ``change(writer, tensors)`` may add fields and add or remove tensors first."""
    writer = GGUFWriter(path, tiny.architecture)
    writer.add_block_count(tiny.n_layers)
    writer.add_context_length(tiny.context)
    writer.add_embedding_length(tiny.hidden)
    writer.add_feed_forward_length(tiny.ffn)
    writer.add_head_count(tiny.n_q_heads)
    writer.add_head_count_kv(tiny.n_kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_rope_dimension_count(tiny.head_dim)
    writer.add_rope_freq_base(tiny.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_eos_token_id(2)
    found: dict[str, Any] = dict(tensors(tiny))
    if change is not None:
        change(writer, found)
    seen = {}
    for name, values in found.items():
        kind = tiny.kind if values.ndim == 2 and name.startswith("blk.") else GGMLQuantizationType.F32
        if name == "token_embd.weight":
            kind = GGMLQuantizationType.Q8_0
        stored = quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        seen[name] = quants.dequantize(stored, kind).reshape(values.shape).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen
