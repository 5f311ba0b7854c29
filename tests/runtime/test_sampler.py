"""The sampler against a plain twin: a textbook implementation over the sorted row (cases P18, P20, P44)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kvalet.runtime.noise import gumbel, row_uniform
from kvalet.runtime.plan import SamplingParams
from kvalet.runtime.sampler import HEAD_TOKENS, NO_TOKEN, WIDE_HEAD_TOKENS, Choice, RowSampling, apply_bitmask, sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0)


def row(
    params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), accepted: Sequence[int] = (), vocab: int = VOCAB
) -> RowSampling:
    made = RowSampling(params, params.seed if params.seed is not None else 0, vocab, prompt)
    for token_id in accepted:
        made.accept(token_id)
    return made


def logits_of(n: int, vocab: int = VOCAB, seed: int = 0, scale: float = 4.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """bf16 by default: many equal logits, as the model has them."""
    return (torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def plain_edit(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], accepted: Sequence[int]) -> list[float]:
    out = [float(x) for x in logits]
    for i in {*prompt, *accepted}:
        out[i] = out[i] / params.repetition_penalty if out[i] > 0 else out[i] * params.repetition_penalty
    for i in set(accepted):
        out[i] -= params.presence_penalty + params.frequency_penalty * list(accepted).count(i)
    for i, bias in params.logit_bias:
        out[i] += bias
    return out


def plain_kept(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """The ids that pass min_p, top_k and top_p, from the whole sorted row."""
    order = sorted((i for i, x in enumerate(logits) if x > -math.inf), key=lambda i: (-logits[i], i))
    scaled = {i: (logits[i] - logits[order[0]]) / params.temperature for i in order}
    if params.min_p > 0:
        order = [i for i in order if scaled[i] >= math.log(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass = sum(math.exp(scaled[i]) for i in order)
        reached, kept = 0.0, []
        for i in order:
            kept.append(i)
            reached += math.exp(scaled[i])
            if reached >= params.top_p * mass:
                break
        order = kept
    return order


def plain_choice(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), accepted: Sequence[int] = ()
) -> int:
    edited = plain_edit(logits, params, prompt, accepted)
    if params.temperature < 1e-5:
        return max(range(len(edited)), key=lambda i: (edited[i], -i))
    noise = gumbel(row_uniform(params.seed or 0, len(prompt) + len(accepted), len(edited)))
    return max(plain_kept(edited, params), key=lambda i: edited[i] / params.temperature + float(noise[i]))


PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2, top_k=1),
    SamplingParams(temperature=0.7, seed=3, top_k=40),
    SamplingParams(temperature=0.7, seed=4, top_k=HEAD_TOKENS),
    SamplingParams(temperature=2.0, seed=5, top_k=HEAD_TOKENS + 100),
    SamplingParams(temperature=0.8, seed=6, top_p=0.9),
    SamplingParams(temperature=50.0, seed=7, top_p=0.95),
    SamplingParams(temperature=1.0, seed=8, top_p=1e-9),
    SamplingParams(temperature=1.5, seed=9, min_p=0.05),
    SamplingParams(temperature=20.0, seed=10, min_p=0.5, top_p=0.9),
    SamplingParams(temperature=1.2, seed=11, top_k=50, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.0, seed=12, top_k=5, logit_bias=((7, 30.0), (9, -100.0))),
    SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.5, logit_bias=((4, 3.0),)),
    SamplingParams(temperature=1.0, seed=13, repetition_penalty=1.3, presence_penalty=-1.0),
    SamplingParams(temperature=1e-3, seed=14, top_p=0.5),
    SamplingParams(temperature=1e9, seed=15),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("params", PARAMS, ids=lambda params: f"seed{params.seed}")
def test_equal_to_the_plain_twin(params: SamplingParams, dtype: torch.dtype) -> None:
    for case in range(25):
        logits = logits_of(1, seed=case, dtype=dtype)
        accepted = [random.Random(case).randrange(VOCAB) for _ in range(case)] + [4, 4]
        (chosen,) = sample(logits, [row(params, accepted=accepted)])
        assert chosen.token_id == plain_choice(logits[0].tolist(), params, accepted=accepted), (case, params)


@pytest.mark.parametrize("vocab", [1, 2, HEAD_TOKENS, HEAD_TOKENS + 1, WIDE_HEAD_TOKENS + 1, 3 * WIDE_HEAD_TOKENS])
def test_equal_to_the_plain_twin_at_every_size(vocab: int) -> None:
    """Vocabularies around the sizes of the heads, and distributions that end inside, at and beyond them."""
    for case, (scale, top_p, top_k) in enumerate(
        [(0.01, 0.9, 0), (1.0, 0.5, 0), (1.0, 0.99, 0), (0.1, 1.0, 5000), (4.0, 0.9, 200)]
    ):
        logits = logits_of(1, vocab=vocab, seed=case, scale=scale)
        params = SamplingParams(temperature=1.0, seed=case, top_p=top_p, top_k=top_k)
        (chosen,) = sample(logits, [row(params, prompt=(0,), vocab=vocab)])
        assert chosen.token_id == plain_choice(logits[0].tolist(), params, prompt=(0,)), (vocab, case)


def test_the_parameters_reach_every_way_of_choosing() -> None:
    """Rows that the head decides, rows that it cannot, and the race over the whole row are all among ``PARAMS``."""
    logits = logits_of(1, seed=0)[0].tolist()
    filtered = [params for params in PARAMS if params.temperature >= 1e-5 and (params.top_k or params.top_p < 1.0)]
    kept = [len(plain_kept(logits, params)) for params in filtered]
    assert min(kept) == 1
    assert sum(1 < n < HEAD_TOKENS for n in kept) >= 3
    assert sum(n > HEAD_TOKENS for n in kept) >= 2
    assert any(params.top_k == 0 and params.top_p == 1.0 and params.min_p > 0 for params in PARAMS)


def test_a_row_gets_the_same_token_in_every_batch() -> None:
    """Each parameter set alone, and all of them in one batch in several orders; the logits are not changed."""
    logits = logits_of(len(PARAMS), seed=99)
    before = logits.clone()
    alone = [sample(logits[i : i + 1], [row(params)])[0] for i, params in enumerate(PARAMS)]
    for shuffle in range(5):
        order = list(range(len(PARAMS)))
        random.Random(shuffle).shuffle(order)
        together = sample(logits[order], [row(PARAMS[i]) for i in order])
        assert together == [alone[i] for i in order]
    assert torch.equal(logits, before)


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    logits[0, [400, 20, 900]] = 5.0
    kinds = [GREEDY, SamplingParams(temperature=1.0, seed=1, top_k=1), SamplingParams(temperature=1.0, seed=2, top_p=1e-9)]
    assert [c.token_id for c in sample(logits, [row(params) for params in kinds])] == [20, 0, 0]
    assert [c.token_id for c in sample(logits[:1].expand(3, -1), [row(params) for params in kinds])] == [20, 20, 20]


def test_top_k_among_equals_keeps_the_lowest_ids() -> None:
    """All logits equal, more of them than the head sees: the cut must not depend on which ones the head happened to hold."""
    logits = torch.zeros(1, VOCAB)
    seen = {sample(logits, [row(SamplingParams(temperature=1.0, seed=seed, top_k=3))])[0].token_id for seed in range(200)}
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 9e-6])
def test_tiny_temperatures_act_greedy(temperature: float) -> None:
    logits = logits_of(8, seed=3) * 1e4
    chosen = sample(logits, [row(SamplingParams(temperature=temperature, seed=i)) for i in range(8)])
    assert [c.token_id for c in chosen] == logits.float().argmax(dim=1).tolist()


def test_a_neighbour_s_parameters_change_nothing() -> None:
    logits = logits_of(2, seed=4)
    expected = sample(logits[:1], [row(GREEDY)])[0]
    for params in PARAMS:
        assert sample(logits, [row(GREEDY), row(params)])[0] == expected


def test_noise_depends_on_seed_and_position_only() -> None:
    """A preempted row is built again from prompt + accepted: same position, same token."""
    params = SamplingParams(temperature=1.0, seed=42)
    logits = logits_of(1, seed=5, scale=0.5)

    def drawn(seed: int, n_prompt: int, n_accepted: int) -> int:
        one = row(replace(params, seed=seed), prompt=range(n_prompt), accepted=range(n_accepted))
        return sample(logits, [one])[0].token_id

    tokens = [drawn(42, n, 0) for n in range(50)]
    assert len(set(tokens)) > 40, "positions must differ"
    assert tokens == [drawn(42, n // 3, n - n // 3) for n in range(50)]
    assert len({drawn(seed, 3, 0) for seed in (0, -1, 2**63, 2**64 - 2, 41)}) > 3, "seeds must differ"


def counts_of(params: SamplingParams, logits: Tensor, draws: int) -> np.ndarray:
    """How often each token is drawn over positions 0..draws-1."""
    chosen = []
    for start in range(0, draws, 500):
        rows = [row(params, prompt=range(position), vocab=logits.shape[1]) for position in range(start, start + 500)]
        chosen += [c.token_id for c in sample(logits.expand(500, -1), rows)]
    return np.bincount(chosen, minlength=logits.shape[1])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=17),
        SamplingParams(temperature=0.6, seed=18),
        SamplingParams(temperature=1.0, seed=19, top_k=6),
        SamplingParams(temperature=1.3, seed=20, top_p=0.8),
        SamplingParams(temperature=1.0, seed=21, min_p=0.1),
    ],
    ids=["plain", "cold", "top_k", "top_p", "min_p"],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square against the exact probabilities, with fixed seeds; the bound is above the 99.99 % point."""
    draws, vocab = 8000, 16
    logits = torch.linspace(2.0, -2.0, vocab).unsqueeze(0)[:, torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    counts = counts_of(params, logits, draws)
    kept = plain_kept(logits[0].tolist(), params)
    assert set(np.flatnonzero(counts)) <= set(kept)
    weights = np.array([math.exp(float(logits[0, i]) / params.temperature) for i in kept])
    expected = draws * weights / weights.sum()
    chi2 = float((((counts[kept] - expected) ** 2) / expected).sum())
    freedom = len(kept) - 1
    assert chi2 < freedom + 3.72 * math.sqrt(2 * freedom) + 8, (params.seed, chi2, freedom)


def bitmask_of(allowed: Sequence[int], vocab: int) -> np.ndarray:
    bits = np.zeros((vocab + 31) // 32 * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("params", PARAMS[:12], ids=lambda params: f"seed{params.seed}")
def test_the_mask_is_obeyed(params: SamplingParams) -> None:
    logits = logits_of(1, seed=6)
    for allowed in ([5], [31, 32, 63], list(range(0, VOCAB, 3))):
        masked = row(params)
        masked.bitmask = bitmask_of(allowed, VOCAB)
        (chosen,) = sample(logits, [masked])
        forbidden = [float(x) if i in allowed else -math.inf for i, x in enumerate(logits[0].tolist())]
        assert chosen.token_id == plain_choice(forbidden, params)


def test_a_dead_end_is_no_token_and_harms_nobody() -> None:
    logits = logits_of(3, seed=7)
    dead = [row(params) for params in (GREEDY, SamplingParams(seed=1), SamplingParams(seed=1, top_k=3, logprobs=2))]
    for one in dead:
        one.bitmask = bitmask_of([], VOCAB)
        assert sample(logits[:1], [one]) == [Choice(NO_TOKEN)]
    chosen = sample(logits, [row(GREEDY), dead[1], row(GREEDY)])
    assert [c.token_id for c in chosen] == [int(logits[0].float().argmax()), NO_TOKEN, int(logits[2].float().argmax())]


def test_bits_of_the_mask() -> None:
    """Bit i of word w is token 32 * w + i, the sign bit too; tokens beyond the mask are forbidden."""
    for vocab, words in ((70, 3), (64, 2), (100, 2), (20, 1)):
        for token_id in range(min(vocab, 32 * words)):
            logits = torch.zeros(vocab)
            apply_bitmask(logits, torch.from_numpy(bitmask_of([token_id], 32 * words)))
            assert torch.nonzero(logits == 0).view(-1).tolist() == [token_id]


def test_banned_ids_are_not_chosen() -> None:
    logits = logits_of(1, seed=8)
    best = logits[0].float().topk(3).indices.tolist()
    banning = row(GREEDY)
    banning.banned = tuple(best[:2])
    assert sample(logits, [banning])[0].token_id == best[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_are_the_model_s_own(k: int, temperature: float) -> None:
    """Before temperature, bias and mask; natural log; never above 0; exactly k alternatives."""
    params = SamplingParams(temperature=temperature, seed=3, logprobs=k, logit_bias=((11, 60.0),))
    logits = logits_of(2, seed=9)
    plain, asked = sample(logits, [row(GREEDY), row(params)])
    assert plain.logprob is None
    assert asked.token_id == 11
    assert asked.logprob is not None
    exact = torch.log_softmax(logits[1].double(), dim=0)
    assert asked.logprob.token_id == 11
    assert asked.logprob.logprob == pytest.approx(float(exact[11]), abs=1e-4)
    assert len(asked.logprob.top) == k
    assert [p for _, p in asked.logprob.top] == pytest.approx(exact.topk(k).values.tolist(), abs=1e-4)
    assert all(p <= 0.0 for _, p in asked.logprob.top)


def test_a_certain_token_has_logprob_zero() -> None:
    logits = torch.full((1, VOCAB), -1e4)
    logits[0, 3] = 1e4
    (chosen,) = sample(logits, [row(SamplingParams(temperature=0.0, logprobs=1))])
    assert chosen.logprob is not None
    assert (chosen.logprob.logprob, chosen.logprob.top) == (0.0, ((3, 0.0),))


def test_shapes_are_checked() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(1, VOCAB), [row(GREEDY), row(GREEDY)])


class CountOps(TorchDispatchMode):
    """Counts the tensor operations that are carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_plain_greedy_rows_cost_one_pass_for_the_whole_batch() -> None:
    """The fast path by its operations, not by a clock: as many for 16 rows as for one."""
    counts = []
    for n in (1, 16):
        logits, rows = logits_of(n), [row(GREEDY) for _ in range(n)]
        with CountOps() as ops:
            sample(logits, rows)
        counts.append(ops.count)
    assert counts[0] == counts[1] <= 4
