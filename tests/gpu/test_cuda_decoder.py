"""The GPU decoder against plain torch, on the device. Run by `make gpu-test` only; without a GPU they fail."""

from __future__ import annotations

import random

import pytest
import torch
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.dummy import DummyTensors
from kvalet.runtime.page_tables import page_tables
from kvalet.runtime.plain_weights import load_plain
from kvalet.runtime.rope_spec import RopeSpec
from kvalet.runtime.spec import ModelSpec
from torch.nn import functional

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    assert torch.cuda.is_available(), "a GPU test was asked for and there is no CUDA device"


def make_pool(pages: int, layers: int, kv_heads: int, dim: int, page_tokens: int = 16) -> torch.Tensor:
    """Random KV; every page that no row owns is poisoned with NaN by the caller."""
    return torch.randn(pages, layers, 2, page_tokens, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal_from: int) -> torch.Tensor:
    """fp32 reference for one row: q [n, Hq, D], k and v [len, Hkv, D]; query i sees positions <= causal_from + i."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) / q.shape[-1] ** 0.5
    seen = torch.arange(k.shape[0], device=DEVICE)[None, :] <= causal_from + torch.arange(q.shape[0], device=DEVICE)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def gather(pool: torch.Tensor, layer: int, pages: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    picked = pool[torch.tensor(pages, device=DEVICE), layer]
    flat = picked.transpose(0, 1).reshape(2, -1, *pool.shape[4:])
    return flat[0, :length], flat[1, :length]


def poisoned_rows(lengths: list[int], group: int, dim: int, seed: int) -> tuple[torch.Tensor, list[list[int]]]:
    """A pool in which all that no row may read is NaN: foreign pages, and the offsets behind a row's end."""
    rng = random.Random(seed)
    counts = [-(-length // 16) for length in lengths]
    pool = make_pool(sum(counts) + 8, 3, 2, dim)
    order = list(range(1, pool.shape[0]))
    rng.shuffle(order)
    tables, at = [], 0
    for count in counts:
        tables.append(order[at : at + count])
        at += count
    pool[torch.tensor([0, *order[at:]], device=DEVICE)] = float("nan")
    for table, length in zip(tables, lengths, strict=True):
        if length % 16:
            pool[table[-1], :, :, length % 16 :] = float("nan")
    return pool, tables


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("dim", [64, 128])
def test_decode_equals_dense_for_every_group_size(group: int, dim: int) -> None:
    """P26 and P49: page edges, poisoned surroundings, any ratio of query to KV heads, inside the graph wrapper."""
    from kvalet.runtime import attn_flashinfer as fi

    lengths = [1, 15, 16, 17, 31, 32, 33, 250]
    pool, tables = poisoned_rows(lengths, group, dim, seed=group)
    plan = fi.DecodePlan(pool, 2 * group, len(lengths), (0, 0, 0), {0: fi.make_workspace(DEVICE)})
    plan.plan(page_tables(tables, lengths, 16))
    q = torch.randn(len(lengths), 2 * group, dim, dtype=torch.bfloat16, device=DEVICE)
    for layer in range(3):
        out = plan.run(layer, q, torch.empty_like(q))
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            k, v = gather(pool, layer, table, length)
            torch.testing.assert_close(
                out[row : row + 1].float(), dense_attention(q[row : row + 1], k, v, length - 1), atol=2e-2, rtol=2e-2
            )


@pytest.mark.parametrize("group", [3, 4, 7])
def test_prefill_equals_dense(group: int) -> None:
    from kvalet.runtime import attn_flashinfer as fi

    lengths, new = [5, 16, 33, 300], [5, 7, 33, 129]
    pool, tables = poisoned_rows(lengths, group, 128, seed=group)
    plan = fi.PrefillPlan(pool, 2 * group, (0, 0, 0))
    plan.plan(page_tables(tables, lengths, 16), new)
    q = torch.randn(sum(new), 2 * group, 128, dtype=torch.bfloat16, device=DEVICE)
    out = plan.run(1, q, torch.empty_like(q))
    at = 0
    for table, length, n in zip(tables, lengths, new, strict=True):
        k, v = gather(pool, 1, table, length)
        expected = dense_attention(q[at : at + n], k, v, length - n)
        torch.testing.assert_close(out[at : at + n].float(), expected, atol=2e-2, rtol=2e-2)
        at += n


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_qkv_kernel_equals_its_plain_twin(norm: bool, dim: int) -> None:
    from kvalet.runtime.qkv_plain import qkv_to_pages_plain
    from kvalet.runtime.qkv_triton import qkv_to_pages

    n, n_q, n_kv = 37, 6, 2
    pool = make_pool(9, 3, n_kv, dim)
    twin = pool.clone()
    qkv = torch.randn(n, (n_q + 2 * n_kv) * dim, dtype=torch.bfloat16, device=DEVICE)
    dest = torch.randperm(9 * 16, device=DEVICE)[:n]
    positions = torch.randint(0, 500, (n,), device=DEVICE)
    angles = torch.outer(torch.arange(512.0), 1e5 ** (-torch.arange(0, dim, 2) / dim))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    norms = torch.randn(2, dim, dtype=torch.bfloat16, device=DEVICE) if norm else None
    q = torch.empty(n, n_q, dim, dtype=torch.bfloat16, device=DEVICE)
    qkv_to_pages(qkv, pool, 1, dest, positions, table, n_q, norms, 1e-6, q)
    expected = qkv_to_pages_plain(qkv, twin, 1, dest, positions, table, n_q, norms, 1e-6)
    torch.testing.assert_close(q.float(), expected.float(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(pool.float(), twin.float(), atol=1e-2, rtol=1e-2)


def test_decode_graph_continues_a_prefill_like_a_longer_prefill() -> None:
    """Prefill n tokens and decode three = prefill of n + 3, in logits; two rows of one bucket, the third row is padding."""
    from kvalet.runtime.cuda_graphs import DecodeGraph
    from kvalet.runtime.cuda_ops import CudaOps

    spec = ModelSpec(
        architecture="qwen3", name="small", n_layers=3, hidden=256, n_q_heads=6, n_kv_heads=2, head_dim=64, ffn=512,
        vocab=1000, context=500, eps=1e-6, rope=RopeSpec(1e6), qk_norm=True,
    )  # fmt: skip
    pool = torch.full((40, 3, 2, 16, 2, 64), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    pool[0] = 0
    ops = CudaOps(DEVICE)
    decoder = CudaDecoder(spec, load_plain(DummyTensors(spec), spec, torch.bfloat16, DEVICE), pool, 512, ops)
    last_ids = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    plan = ops.decode_attention(pool, 6, 3, spec.windows, alone=False)
    logits = torch.zeros(3, 1000, dtype=torch.bfloat16, device=DEVICE)
    graph = DecodeGraph(decoder, plan, last_ids, 16, logits)
    rng = random.Random(1)
    ids = [[rng.randrange(1000) for _ in range(n + 3)] for n in (30, 45)]
    tables = [[1 + i for i in range(4)], [10 + i for i in range(4)]]
    pre = ops.prefill_attention(pool, 6, spec.windows)

    def run_prefill(upto: list[int]) -> torch.Tensor:
        pre.plan(page_tables(tables, upto, 16), upto)
        flat = [t for row, n in zip(ids, upto, strict=True) for t in row[:n]]
        where = [(tab[p // 16] * 16 + p % 16, p) for tab, n in zip(tables, upto, strict=True) for p in range(n)]
        dest = torch.tensor([w[0] for w in where], device=DEVICE)
        positions = torch.tensor([w[1] for w in where], device=DEVICE)
        hidden = decoder.hidden(torch.tensor(flat, device=DEVICE), positions, dest, pre.run)
        ends = torch.tensor([upto[0] - 1, sum(upto) - 1], device=DEVICE)
        return decoder.logits(hidden[ends]).float()

    whole = run_prefill([33, 48])
    pool[1:] = float("nan")
    run_prefill([30, 45])
    for k in range(3):
        at = [30 + k, 45 + k]
        last_ids[1:3] = torch.tensor([ids[0][at[0]], ids[1][at[1]]], device=DEVICE)
        graph.set_rows(tables, at, [1, 2])
        graph.replay()
        assert last_ids[1:3].tolist() == graph.logits[:2].argmax(-1).tolist()
    assert not graph.logits[:2].isnan().any()
    similarity = functional.cosine_similarity(graph.logits[:2].float(), whole, dim=-1)
    assert similarity.min() > 0.999, similarity
