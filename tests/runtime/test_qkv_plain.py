"""The plain twin of the GPU's QKV kernel against the CPU decoder's own norm and rotation: one arithmetic on both devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinymodel
import torch
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.gguf_tensors import GgufTensors
from kvalet.runtime.model import Decoder
from kvalet.runtime.qkv_plain import qkv_to_pages_plain, rotate_half
from kvalet.runtime.rope import Rope, rotate
from kvalet.runtime.rope_spec import RopeSpec
from kvalet.runtime.spec import read_spec
from kvalet.runtime.weights import load_weights
from tinymodel import Tiny
from torch import Tensor

P = 16


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gpu_table(rope: Rope) -> Tensor:
    """The GPU's table of the same angles: [positions, D], cosines, then sines, each D / 2."""
    half = rope.cos.shape[1] // 2
    return torch.cat((rope.cos[:, :half], rope.sin[:, half:]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_rotations_are_the_same_function(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    rope = Rope(16, RopeSpec(10_000.0), 300)
    positions = torch.tensor([0, 1, 7, 150, 299])
    x = torch.randn(5, 3, 16, generator=g).to(dtype)
    cos, sin = gpu_table(rope)[positions].unsqueeze(1).chunk(2, dim=-1)
    mine, theirs = rotate_half(x.float(), cos, sin).to(dtype), rotate(x, *rope.at(positions))
    torch.testing.assert_close(mine, theirs, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)
    assert torch.equal(mine[0], x[0]), "position 0 is not turned"
    assert not torch.allclose(mine[3].float(), x[3].float(), atol=0.1)
    torch.testing.assert_close(mine.float().norm(dim=-1), x.float().norm(dim=-1), atol=2e-2, rtol=1e-2)


def test_the_table_is_made_of_the_same_angles() -> None:
    """A rope written out by hand: pair i of position p turns by p * base ** (-2i / D)."""
    table = gpu_table(Rope(4, RopeSpec(100.0), 9))
    one = rotate_half(torch.tensor([[[1.0, 0.0, 0.0, 1.0]]]), *table[6].view(1, 1, 4).chunk(2, dim=-1))
    angles = torch.tensor([6.0, 0.6])
    expected = torch.stack((angles[0].cos(), -angles[1].sin(), angles[0].sin(), angles[1].cos()))
    torch.testing.assert_close(one[0, 0], expected)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("tiny", [Tiny(), Tiny(architecture="qwen3", qk_norm=True)], ids=["llama", "qwen3"])
def test_the_twin_gives_what_the_cpu_decoder_hands_to_attention(tmp_path: Path, tiny: Tiny, mode: str) -> None:
    """q returned, K and V in the pages: as the decoder of a real file computes them from the same projection."""
    path = tmp_path / "tiny.gguf"
    tinymodel.write(path, tiny)
    file = GgufFile(path)
    spec = read_spec(file)
    decoder = Decoder(spec, load_weights(GgufTensors(file, spec), spec, mode), 128)
    positions = torch.tensor([0, 1, 2, 40, 41, 99])
    places = torch.tensor([3 * P, 3 * P + 1, 3 * P + 2, 1 * P + 8, 1 * P + 9, 2 * P + 15])
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    pool = torch.full((5, spec.n_layers, 2, P, spec.n_kv_heads, spec.head_dim), torch.nan, dtype=dtype)
    x = torch.randn(6, spec.hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if mode == "fp32" else {"atol": 3e-2, "rtol": 2e-2}
    with torch.inference_mode():
        for number, layer in enumerate(decoder.weights.layers):
            q, k, v = decoder._qkv(layer, x, *decoder.rope.at(positions))
            qkv = layer.qkv(decoder._norm(x, layer.norm_in))
            norms = None if layer.q_norm is None or layer.k_norm is None else torch.stack((layer.q_norm, layer.k_norm))
            assert (norms is not None) == tiny.qk_norm
            table = gpu_table(decoder.rope)
            found = qkv_to_pages_plain(qkv, pool, number, places, positions.int(), table, spec.n_q_heads, norms, spec.eps)
            torch.testing.assert_close(found, q, **tolerance)
            page, offset = places // P, places % P
            torch.testing.assert_close(pool[page, number, 0, offset], k, **tolerance)
            assert torch.equal(pool[page, number, 1, offset], v), "V is moved, not computed"
    written = torch.zeros(5 * P, dtype=torch.bool)
    written[places] = True
    finite = pool.isfinite().permute(0, 3, 1, 2, 4, 5).flatten(2).all(dim=2)
    assert torch.equal(finite.flatten(), written), "nothing but the places is written"


def test_q_and_k_take_their_own_norm() -> None:
    """The norms' first row is q's, the second k's; a constant head of ones is its own RMS, so the weights show."""
    pool = torch.zeros(2, 1, 2, P, 1, 4)
    norms = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    still = torch.cat((torch.ones(1, 2), torch.zeros(1, 2)), dim=-1)  # cosine 1, sine 0: no rotation
    qkv = torch.full((1, 4 * 4), 7.0)
    q = qkv_to_pages_plain(qkv, pool, 0, torch.tensor([P + 3]), torch.tensor([0]), still, 2, norms, 0.0)
    torch.testing.assert_close(q, norms[0].expand(1, 2, 4))
    torch.testing.assert_close(pool[1, 0, 0, 3, 0], norms[1])
    torch.testing.assert_close(pool[1, 0, 1, 3, 0], torch.full((4,), 7.0))
