"""The decoder against an independent forward pass in float64 on small models of every supported kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tinymodel
import torch
from kvalet.runtime.attn_torch import PlainAttention
from kvalet.runtime.batch import Segment, make_batch
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.gguf_tensors import GgufTensors, rope_order
from kvalet.runtime.kvpool import KVPool
from kvalet.runtime.model import Decoder
from kvalet.runtime.rope import Rope, rotate
from kvalet.runtime.rope_spec import RopeSpec
from kvalet.runtime.spec import read_spec
from kvalet.runtime.weights import load_weights
from tinymodel import Tiny

IDS = [5, 17, 3, 42, 42, 8, 90, 11, 23, 61, 7, 0, 33, 70, 19, 2, 54, 28, 81, 36, 10, 9]


def reference(tiny: Tiny, found: dict[str, Any], ids: list[int], factors: np.ndarray | None = None) -> np.ndarray:
    """Logits float64 [len(ids), vocab], straight from the definitions, in the file's own order of q and k rows."""
    w = {name: values.astype(np.float64) for name, values in found.items()}
    n, dim, group = len(ids), tiny.head_dim, tiny.n_q_heads // tiny.n_kv_heads

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    frequencies = tiny.rope_base ** (-np.arange(0, dim, 2) / dim)
    angles = np.arange(n)[:, None] * (frequencies if factors is None else frequencies / factors)

    def rope(x: np.ndarray) -> np.ndarray:  # x [n, heads, dim]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        out = np.empty_like(x)
        first, second = (
            (slice(0, None, 2), slice(1, None, 2))
            if tiny.architecture == "llama"
            else (
                slice(0, dim // 2),
                slice(dim // 2, None),
            )
        )
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    x = w["token_embd.weight"][ids]
    for layer in range(tiny.n_layers):
        at = f"blk.{layer}."
        h = norm(x, w[at + "attn_norm.weight"])
        q, k, v = (h @ w[f"{at}attn_{p}.weight"].T + w.get(f"{at}attn_{p}.bias", 0.0) for p in "qkv")
        q, k, v = q.reshape(n, -1, dim), k.reshape(n, -1, dim), v.reshape(n, -1, dim)
        if tiny.qk_norm:
            q, k = norm(q, w[at + "attn_q_norm.weight"]), norm(k, w[at + "attn_k_norm.weight"])
        q, k = rope(q), rope(k)
        heads = []
        for head in range(tiny.n_q_heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(dim) + np.triu(np.full((n, n), -np.inf), 1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, head // group])
        x = x + np.concatenate(heads, -1) @ w[at + "attn_output.weight"].T
        h = norm(x, w[at + "ffn_norm.weight"])
        gate = h @ w[at + "ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[at + "ffn_up.weight"].T)) @ w[at + "ffn_down.weight"].T
    return norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T


def logits(path: Path, mode: str, ids: list[int]) -> np.ndarray:
    """The decoder's logits of all positions, float64."""
    file = GgufFile(path)
    spec = read_spec(file)
    decoder = Decoder(spec, load_weights(GgufTensors(file, spec), spec, mode), 256)
    pool = KVPool(spec.geometry("fp32" if mode == "fp32" else "bf16"), 8)
    new_kv = torch.empty(spec.n_layers, 2, 64, spec.n_kv_heads, spec.head_dim, dtype=pool.pages.dtype)
    batch = make_batch([Segment(1, 0, tuple(ids), (3, 1, 5), False, True)], 16, pad_to=len(ids))
    with torch.inference_mode():
        hidden = decoder.hidden(batch.ids, batch.positions, PlainAttention(pool, batch, new_kv), batch.keep)
        return decoder.logits(hidden).double().numpy()


KINDS = {
    "llama": Tiny(),
    "own head": Tiny(own_head=True),
    "one kv head, one layer": Tiny(n_kv_heads=1, n_layers=1),
    "no grouping": Tiny(n_kv_heads=4),
    "heads wider than hidden": Tiny(head_dim=32),
    "qwen2": Tiny(architecture="qwen2", biases=True),
    "llama with biases": Tiny(biases=True),
    "qwen3": Tiny(architecture="qwen3", qk_norm=True),
    "q4_0": Tiny(kind=gguf.GGMLQuantizationType.Q4_0),
    "q8_0": Tiny(kind=gguf.GGMLQuantizationType.Q8_0),
    "f16": Tiny(kind=gguf.GGMLQuantizationType.F16),
}


@pytest.mark.parametrize("name", KINDS)
def test_fp32_equals_the_definition(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    found = tinymodel.write(path, KINDS[name])
    expected = reference(KINDS[name], found, IDS)
    np.testing.assert_allclose(logits(path, "fp32", IDS), expected, atol=2e-4)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("mode", ["bf16", "int4", "auto"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_reduced_modes_are_near(tmp_path: Path, name: str, mode: str) -> None:
    path = tmp_path / "tiny.gguf"
    expected = reference(KINDS[name], tinymodel.write(path, KINDS[name]), IDS)
    error = np.abs(logits(path, mode, IDS) - expected)
    assert error.mean() < 0.03 * np.abs(expected).mean() + 0.05, error.mean()


def test_tied_exactly_when_output_weight_is_absent(tmp_path: Path) -> None:
    tied, own = tmp_path / "tied.gguf", tmp_path / "own.gguf"
    tinymodel.write(tied, Tiny())
    tinymodel.write(own, Tiny(own_head=True))
    assert read_spec(GgufFile(tied)).tied
    assert not read_spec(GgufFile(own)).tied
    assert np.abs(logits(tied, "fp32", IDS) - logits(own, "fp32", IDS)).max() > 1


def test_rope_factors_are_applied(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 2, 4, 4, 8, 8], dtype=np.float32)
    path = tmp_path / "scaled.gguf"
    found = tinymodel.write(path, Tiny(), lambda _, tensors: tensors.update({"rope_freqs.weight": factors}))
    np.testing.assert_allclose(logits(path, "fp32", IDS), reference(Tiny(), found, IDS, factors), atol=2e-4)
    assert np.abs(reference(Tiny(), found, IDS, factors) - reference(Tiny(), found, IDS)).max() > 0.01


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, t: t.pop("blk.1.ffn_up.weight"), r"no tensor blk\.1\.ffn_up\.weight"),
        (lambda w, t: t.update({"blk.0.surprise.weight": t["output_norm.weight"]}), r"blk\.0\.surprise\.weight"),
        (lambda w, t: t.update({"output_norm.weight": np.ones(7, dtype=np.float32)}), r"output_norm\.weight.*shape \[7\]"),
        (lambda w, t: t.update({"rope_freqs.weight": np.ones(5, dtype=np.float32)}), r"rope_freqs\.weight.*shape \[5\]"),
    ],
)
def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "bad.gguf"
    tinymodel.write(path, Tiny(), change)
    file = GgufFile(path)
    with pytest.raises(ModelError, match=words):
        load_weights(GgufTensors(file, read_spec(file)), read_spec(file), "fp32")


def test_int4_needs_nibbles_and_auto_does_without(tmp_path: Path) -> None:
    path = tmp_path / "f16.gguf"
    tinymodel.write(path, KINDS["f16"])
    file = GgufFile(path)
    with pytest.raises(ModelError, match="int4 is not possible"):
        load_weights(GgufTensors(file, read_spec(file)), read_spec(file), "int4")
    assert load_weights(GgufTensors(file, read_spec(file)), read_spec(file), "auto").path == "bf16"


def test_rope_order_and_rotation() -> None:
    assert rope_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert rope_order(4, 0).tolist() == [0, 1, 2, 3]
    rope = Rope(4, RopeSpec(100.0, "linear", 2.0), 8)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    turned = rotate(x, *rope.at(torch.tensor([6])))
    angle = np.array([3.0, 0.3])
    expected = [np.cos(angle[0]), -2 * np.sin(angle[1]), np.sin(angle[0]), 2 * np.cos(angle[1])]
    torch.testing.assert_close(turned[0, 0], torch.tensor(expected, dtype=torch.float32))
