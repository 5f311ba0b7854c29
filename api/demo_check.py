"""Are the answers right? Token for token where that can be asked, by teacher forcing in plain arithmetic where it cannot.

Two runs with the same numerics give the same tokens as long as they computed the same things. Where one of them had to compute
history again that the other had kept (after a SIGKILL, say), bits may differ, and greedy decoding turns the smallest margin
into another word. Such an answer is fed to the model in this process, in one piece with its prompt and without any of the
server's machinery: each of its tokens must be, nearly, the model's own choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from kvalet.api.demo_report import Comparison, computed_tokens
from kvalet.api.schema_bounds import string_bound
from kvalet.api.tool_grammar import grammar_for, rules_for
from kvalet.api.tools import parse_tools
from kvalet.loadtest.runner import Turn
from kvalet.loadtest.workload import TOOLS
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.gguf_tensors import GgufTensors
from kvalet.runtime.grammar import GrammarCache, Matcher
from kvalet.runtime.model import Decoder
from kvalet.runtime.plan import GrammarSpec
from kvalet.runtime.spec import read_spec, read_tokenizer
from kvalet.runtime.tokenizer import build_tokenizer
from kvalet.runtime.weights import load_weights
from torch import Tensor
from torch.nn import functional

AGREEMENT = 0.9375
"""Least share of teacher-forced tokens that are the model's first choice (bf16 against float32: 300 of 320)."""
MARGIN = 0.75
"""The most that a token's logit may lie below the largest one that its grammar allows."""


@dataclass(frozen=True, slots=True)
class Forced:
    """One answer fed to the model: how many tokens, how many of them its first choice, the worst token's margin (inf: a token
    that the grammar does not allow)."""

    tokens: int
    agree: int
    margin: float


class Judge(Protocol):
    """Teacher forcing: ``must_call`` says whether the answer had to be a tool call."""

    def force(self, prompt: Sequence[int], answer: Sequence[int], must_call: bool) -> Forced: ...


class PlainModel:
    """The model in this process: one causal pass over prompt and answer, no pages, no cache, no batch.

    ``weights`` as the server's; the same precision, another way through the arithmetic. Raises ModelError for a bad file.
    """

    def __init__(self, path: Path, weights: str = "bf16") -> None:
        file = GgufFile(path)
        try:
            self.spec = read_spec(file)
            self._decoder = Decoder(
                self.spec, load_weights(GgufTensors(file, self.spec), self.spec, weights), self.spec.context
            )
            self._grammars = GrammarCache(build_tokenizer(read_tokenizer(file)))
        finally:
            file.close()
        tools = parse_tools(TOOLS)
        self._calls = grammar_for(rules_for(tools, "required", parallel=False), string_bound(self.spec.context))

    def force(self, prompt: Sequence[int], answer: Sequence[int], must_call: bool) -> Forced:
        logits = self.logits((*prompt, *answer[:-1]), len(answer))
        return compare(logits, answer, self._matcher(self._calls if must_call else None))

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], last: int) -> Tensor:
        """float32 [last, vocab]: what follows each of the ``last`` last positions of ``ids``."""
        n = len(ids)
        keep = torch.arange(n - last, n)
        hidden = self._decoder.hidden(torch.tensor(ids), torch.arange(n), causal_attention, keep)
        return self._decoder.logits(hidden).float()

    def _matcher(self, spec: GrammarSpec | None) -> Matcher | None:
        return None if spec is None else self._grammars.matcher(spec)


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``runtime.model.Attend`` for one whole sequence from position 0."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).reshape(q.shape[0], -1)


def compare(logits: Tensor, answer: Sequence[int], matcher: Matcher | None) -> Forced:
    """``logits`` float32 [len(answer), vocab]; ``matcher``: the grammar at the answer's beginning, None = free text."""
    agree, worst = 0, 0.0
    for row, token in zip(logits, answer, strict=True):
        allowed = row if matcher is None else row.masked_fill(~allowed_ids(matcher, row.shape[0]), float("-inf"))
        margin = float(allowed.max() - allowed[token])
        agree += margin == 0.0
        worst = max(worst, margin)
        if matcher is not None:
            matcher.consume(token)
    return Forced(len(answer), agree, worst)


def allowed_ids(matcher: Matcher, vocab: int) -> Tensor:
    """bool [vocab]."""
    words = torch.from_numpy(matcher.bitmask())
    bits = (words.unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten()[:vocab].bool()


def same_work(turn: Turn, reference: Turn) -> bool:
    """Nothing older than the new prompt was computed again: the same prompt, and no more of it computed than in the run whose
    pool holds everything. Only then do the tokens have to be the same."""
    same_prompt = turn.outcome.prompt_ids == reference.outcome.prompt_ids
    undisturbed = not turn.outcome.record.get("recomputed_tokens", 0)
    return same_prompt and undisturbed and computed_tokens(turn) <= computed_tokens(reference)


def check(turns: Sequence[Turn], reference: Sequence[Turn], tool_turns: int, judge: Judge) -> Comparison:
    """Every turn of ``turns``, compared one way or the other. ``tool_turns``: turns below this number had to call a tool."""
    known = {(turn.agent, turn.number): turn for turn in reference}
    differences: list[str] = []
    exact = forced = tokens = agree = 0
    margin = 0.0
    for turn in turns:
        where, other = f"{turn.agent} turn {turn.number + 1}", known.get((turn.agent, turn.number))
        if turn.fault or other is None or other.fault:
            differences.append(f"{where}: {turn.fault or 'there is nothing to compare with'}")
        elif same_work(turn, other):
            exact += 1
            if turn.outcome.token_ids != other.outcome.token_ids:
                differences.append(f"{where}: {first_difference(turn.outcome.token_ids, other.outcome.token_ids)}")
        else:
            forced += 1
            result = judge.force(turn.outcome.prompt_ids, turn.outcome.token_ids, turn.number < tool_turns)
            tokens, agree, margin = tokens + result.tokens, agree + result.agree, max(margin, result.margin)
            if result.margin > MARGIN:
                differences.append(f"{where}: a token lies {result.margin:.3f} below the largest logit")
    if agree < AGREEMENT * tokens:
        differences.append(f"only {agree} of {tokens} teacher-forced tokens are the model's first choice")
    return Comparison(exact, forced, tokens, agree, margin, tuple(differences))


def first_difference(ids: Sequence[int], other: Sequence[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
    return f"differs from token {place} on ({len(ids)} and {len(other)} tokens)"
