"""Choosing one token per row from its logits.

Order of the edits, as in other servers: repetition, presence and frequency penalties; logit_bias; banned ids (min_tokens);
grammar mask; temperature; min_p; top_k; top_p; then the seeded Gumbel race. The tokens of a row are ordered by (logit
descending, id ascending); each of the three filters keeps a prefix of that order, so ties are decided the same everywhere.

Speed (CPU, 49k vocabulary): plain greedy rows are one ``topk(1)`` for the whole batch; a row without top_k and top_p needs no
order at all; otherwise the first ``HEAD_TOKENS`` decide, and only where they do not is more of the row put in order.
Log-probabilities are of the logits as they came in: the model's own distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kvalet.runtime.noise import gumbel, ids_uniform, row_uniform
from kvalet.runtime.plan import SamplingParams, TokenLogprob
from numpy.typing import NDArray
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this act greedy: a logit divided by them overflows before the noise could matter."""

HEAD_TOKENS = 80
"""How many of the most likely tokens are looked at before a row is sorted (above 64, the usual largest top_k)."""

WIDE_HEAD_TOKENS = 4096
"""How many are looked at next, before the whole row is put in order."""

NO_TOKEN = -1
"""The choice of a row that may choose nothing: its grammar is at a dead end."""

_NEG_INF = -math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """The token of one row; ``token_id`` is NO_TOKEN at a dead end. ``logprob`` only where the row asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class RowSampling:
    """What the sampler keeps of one row: parameters, seed, position and penalty counters.

    ``position``: index in the sequence of the token to be sampled next. ``banned`` and ``bitmask`` are set by the row before
    each sample: ids that may not be chosen, and the grammar's mask (int32 [ceil(vocab / 32)], bit i of word w allows token
    32 * w + i; ids beyond the mask are not allowed), None without a grammar.
    """

    __slots__ = ("_bias", "_counts", "_seen", "banned", "bitmask", "greedy", "params", "plain", "position", "seed")

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int, prompt_ids: Sequence[int]) -> None:
        self.params = params
        self.seed = seed
        self.position = len(prompt_ids)
        self.greedy = params.temperature < GREEDY_BELOW
        self.banned: tuple[int, ...] = ()
        self.bitmask: NDArray[np.int32] | None = None
        self._bias: tuple[Tensor, Tensor] | None = None
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self._bias = (torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32)
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(list(prompt_ids), dtype=torch.int64)] = True
        self.plain = self._bias is None and self._counts is None and self._seen is None
        """True: only ``banned`` and ``bitmask`` can change the logits."""

    def accept(self, token_id: int) -> None:
        """Count one accepted token (sampled, forced or replayed)."""
        self.position += 1
        if self._counts is not None:
            self._counts[token_id] += 1.0
        if self._seen is not None:
            self._seen[token_id] = True

    @property
    def edits(self) -> bool:
        """Whether ``edit`` would change anything."""
        return not self.plain or self.bitmask is not None or bool(self.banned)

    def edit(self, row: Tensor) -> None:
        """Apply everything up to the mask to one row of float32 logits [vocab], in place."""
        params = self.params
        if self._seen is not None:
            penalised = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            row.copy_(torch.where(self._seen, penalised, row))
        if self._counts is not None:
            row.sub_(self._counts, alpha=params.frequency_penalty)
            row.sub_((self._counts > 0).to(torch.float32), alpha=params.presence_penalty)
        if self._bias is not None:
            row.index_add_(0, *self._bias)
        if self.banned:
            row[list(self.banned)] = _NEG_INF
        if self.bitmask is not None:
            apply_bitmask(row, torch.from_numpy(self.bitmask))


def apply_bitmask(row: Tensor, bitmask: Tensor) -> None:
    """Set the logits of ``row`` [vocab] that ``bitmask`` forbids to -inf, in place.

    ``bitmask``: int32 [words], bit i of word w allows token 32 * w + i. Tokens beyond its last bit are forbidden as well."""
    bits = torch.arange(32, dtype=torch.int32, device=row.device)
    forbidden = ((bitmask.unsqueeze(1) >> bits) & 1).view(-1) == 0
    covered = min(row.numel(), forbidden.numel())
    row[:covered].masked_fill_(forbidden[:covered], _NEG_INF)
    row[covered:] = _NEG_INF


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> list[Choice]:
    """One choice per row of ``logits`` (bf16 or float32, [len(rows), vocab], not changed).

    A row whose mask, bans and biases leave nothing gets NO_TOKEN. Raises ValueError if the shapes do not agree.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"{len(rows)} rows need logits [{len(rows)}, vocab], not {list(logits.shape)}")
    if not rows:
        return []
    slow = [i for i, row in enumerate(rows) if not row.greedy or row.edits]
    if len(slow) < len(rows):
        ids: list[int] = logits.topk(1).indices.view(-1).tolist()
    else:
        ids = [NO_TOKEN] * len(rows)
    if slow:
        work = logits[slow].to(torch.float32)
        for work_row, i in zip(work, slow, strict=True):
            if rows[i].edits:
                rows[i].edit(work_row)
        for i, token_id in zip(slow, _choose_edited(work, [rows[i] for i in slow]), strict=True):
            ids[i] = token_id
    logprobs = _logprobs(logits, rows, ids)
    return [Choice(token_id, logprobs.get(i)) for i, token_id in enumerate(ids)]


def _choose_edited(work: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """Ids for float32 logits after their edits; ``work`` [len(rows), vocab] may be overwritten."""
    ids = [NO_TOKEN] * len(rows)
    best = work.max(dim=1).values
    alive = (best > _NEG_INF).tolist()
    kinds: dict[str, list[int]] = {"greedy": [], "race": [], "head": []}
    for i, row in enumerate(rows):
        if alive[i]:
            kinds[_kind(row)].append(i)
    for kind, members in kinds.items():
        if not members:
            continue
        part = work if len(members) == len(rows) else work[members]
        if kind == "greedy":
            chosen: list[int] = part.topk(1).indices.view(-1).tolist()
        elif kind == "race":
            chosen = _race(part, best[members], [rows[i] for i in members])
        else:
            chosen = _head(part, [rows[i] for i in members])
        for i, token_id in zip(members, chosen, strict=True):
            ids[i] = token_id
    return ids


def _kind(row: RowSampling) -> str:
    if row.greedy:
        return "greedy"
    return "race" if row.params.top_k == 0 and row.params.top_p >= 1.0 else "head"


def _race(work: Tensor, best: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """Whole-row Gumbel race of rows without top_k and top_p; min_p is a threshold and needs no order."""
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32).unsqueeze(1)
    scores = work.sub_(best.unsqueeze(1)).div_(temperatures)
    uniform = torch.empty_like(scores)
    for score, draws, row in zip(scores, uniform, rows, strict=True):
        if row.params.min_p > 0.0:
            score.masked_fill_(score < math.log(row.params.min_p), _NEG_INF)
        draws.copy_(torch.from_numpy(row_uniform(row.seed, row.position, score.numel())))
    scores.sub_(uniform.neg_().log1p_().neg_().log_())
    ids: list[int] = scores.topk(1).indices.view(-1).tolist()
    return ids


def _head(work: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """Rows with top_k or top_p: decided by the head where it can be, by more of the row where not."""
    vocab = work.shape[1]
    values, indices = work.topk(min(HEAD_TOKENS, vocab))
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32).unsqueeze(1)
    best = values[:, :1].clone()
    masses = ((work - best) / temperatures).exp_().sum(dim=1, dtype=torch.float64).tolist()
    chosen = []
    for i, row in enumerate(rows):
        head_values, head_ids = _ordered(values[i], indices[i])
        kept = _kept_prefix(head_values, row.params, masses[i], complete=head_values.size == vocab)
        if kept is None and vocab > WIDE_HEAD_TOKENS:
            head_values, head_ids = _ordered(*work[i].topk(WIDE_HEAD_TOKENS))
            kept = _kept_prefix(head_values, row.params, masses[i], complete=False)
        if kept is None:
            full = work[i].sort(descending=True, stable=True)
            head_values, head_ids = full.values.numpy().astype(np.float64), full.indices.numpy()
            kept = _kept_prefix(head_values, row.params, masses[i], complete=True)
        assert kept is not None
        scores = (head_values[:kept] - head_values[0]) / row.params.temperature
        scores += gumbel(ids_uniform(row.seed, row.position, head_ids[:kept]))
        chosen.append(int(head_ids[int(scores.argmax())]))
    return chosen


def _ordered(values: Tensor, indices: Tensor) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What ``topk`` gave, in the order (logit descending, id ascending)."""
    head_values, head_ids = values.numpy().astype(np.float64), indices.numpy()
    order = np.lexsort((head_ids, -head_values))
    return head_values[order], head_ids[order]


def _kept_prefix(values: NDArray[np.float64], params: SamplingParams, whole_mass: float, *, complete: bool) -> int | None:
    """How many tokens pass min_p, top_k and top_p, from the head of the order; None: the head cannot tell.

    ``values``: logits in order, the first one finite. ``whole_mass``: the sum over the whole row of exp((logit - first) /
    temperature). ``complete``: the head is the row (also assumed where its last entry is forbidden: the rest is, too).
    """
    n = values.size
    complete = complete or values[-1] == _NEG_INF
    n_finite = int(np.count_nonzero(values > _NEG_INF))
    scaled = (values[:n_finite] - values[0]) / params.temperature
    limit, decided = n_finite, complete
    if params.min_p > 0.0:
        limit = min(limit, int(np.count_nonzero(scaled >= math.log(params.min_p))))
        decided = decided or limit < n
    if 0 < params.top_k <= limit:
        limit, decided = params.top_k, True
    if params.top_p < 1.0:
        weights = np.exp(scaled[:limit])
        mass = float(weights.sum()) if decided else whole_mass
        reached = np.cumsum(weights) >= params.top_p * mass
        if reached.any():
            limit, decided = int(reached.argmax()) + 1, True
    # A cut among equal logits may miss equals with a lower id outside of the head.
    if not complete and (not decided or values[limit - 1] == values[-1]):
        return None
    return limit


def _logprobs(logits: Tensor, rows: Sequence[RowSampling], ids: Sequence[int]) -> dict[int, TokenLogprob]:
    """Log-probabilities by row number, for the rows that asked and got a token."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and ids[i] != NO_TOKEN]
    if not asked:
        return {}
    work = logits[asked].to(torch.float32)
    work -= torch.logsumexp(work, dim=1, keepdim=True)
    result = {}
    for log_p, i in zip(work, asked, strict=True):
        k = min(rows[i].params.logprobs or 0, log_p.numel())
        result[i] = TokenLogprob(ids[i], min(0.0, float(log_p[ids[i]])), _most_likely(log_p, k))
    return result


def _most_likely(log_p: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    """The ``k`` most likely (id, logprob), best first, equal ones by id; which of several equal ones get the last places is the
    choice of ``topk``, the same in every batch."""
    if k == 0:
        return ()
    values, indices = log_p.topk(k)
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    return tuple((token_id, min(0.0, value)) for token_id, value in sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
