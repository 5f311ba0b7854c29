"""One open row: its ids, page table, sampler, grammar, detokeniser and end conditions.

Everything is a function of a ``RowOpen``: opening a row replays the tokens it was already given without emitting their text,
and it then goes on exactly as the row that was closed would have.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from kvalet.runtime.detok import Detokenizer, Vocabulary
from kvalet.runtime.finish import Released, StopStrings
from kvalet.runtime.plan import EndedBy, GrammarSpec, PageId, RowOpen, RowResult, TokenLogprob
from kvalet.runtime.sampler import NO_TOKEN, RowSampling
from numpy.typing import NDArray


class RowMatcher(Protocol):
    """A grammar's state in one row; ``runtime.grammar.Matcher`` is it."""

    def bitmask(self) -> NDArray[np.int32]:
        """The tokens allowed next, end-of-turn ids included where the text may end. All zero: nothing is."""
        ...

    def consume(self, token_id: int) -> bool:
        """Advance; False if the token is not allowed or the matcher failed."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, empty if there is a choice."""
        ...

    @property
    def finished(self) -> bool:
        """The text is complete and nothing can follow."""
        ...


class GrammarSource(Protocol):
    """Compiled grammars by spec; ``runtime.grammar.GrammarCache`` is it."""

    def matcher(self, spec: GrammarSpec) -> RowMatcher | None:
        """A matcher at the grammar's beginning; None if the grammar cannot be used."""
        ...


def _draw_seed() -> int:
    return secrets.randbits(64)


@dataclass(frozen=True)
class TextContext:
    """What all rows of one engine share. ``end_ids``: the model's end-of-turn ids. ``forced_runs``: accept a grammar's forced
    tokens together with the sampled one. ``draw_seed``: seeds of requests that bring none."""

    vocabulary: Vocabulary
    vocab_size: int
    end_ids: frozenset[int]
    grammars: GrammarSource | None = None
    forced_runs: bool = False
    draw_seed: Callable[[], int] = field(default=_draw_seed)


class RowState:
    """One row from its admission to its end. Not thread-safe: the engine thread owns it.

    ``ids``: prompt and accepted tokens. ``kv_len`` and ``pages`` are kept by the engine. ``ended``: why the row takes no more
    tokens, None while it goes on.
    """

    def __init__(self, opened: RowOpen, text: TextContext) -> None:
        self.row = opened.row
        self.params = opened.params
        self.n_prompt = opened.n_prompt
        self.ids: list[int] = list(opened.ids[: opened.n_prompt])
        self.kv_len = opened.kv_len
        self.pages: list[PageId] = list(opened.pages)
        self.ended: EndedBy | None = None
        params = opened.params
        seed = params.seed if params.seed is not None else text.draw_seed()
        self._text = text
        self._sampling = RowSampling(params, seed, text.vocab_size, self.ids)
        self._detok = Detokenizer(text.vocabulary)
        self._stops = StopStrings(params.stop)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else text.end_ids)
        self._stop_ids = frozenset(token_id for token_id in stop_ids if 0 <= token_id < text.vocab_size)
        self._n_chars = 0
        self._n_sent = 0
        self._last_char: list[int] = []
        self._reusable = -1
        self._matcher = self._open_grammar()
        for token_id in opened.ids[opened.n_prompt :]:
            if self.ended is not None:
                break
            self._take(token_id)
        self.ids[len(self.ids) :] = opened.ids[len(self.ids) :]

    def _open_grammar(self) -> RowMatcher | None:
        spec = self.params.grammar
        if spec is None:
            return None
        matcher = self._text.grammars.matcher(spec) if self._text.grammars is not None else None
        if matcher is None:
            self.ended, self._reusable = EndedBy.GRAMMAR, 0  # never free text
        return matcher

    @property
    def n_accepted(self) -> int:
        """Tokens accepted since the prompt, those before a preemption included."""
        return len(self.ids) - self.n_prompt

    def sampling(self) -> RowSampling:
        """The sampler's view of this row for its next token, bans and mask brought up to date."""
        sampling, banned = self._sampling, self._banned()
        if self._matcher is None:
            sampling.banned = banned
        else:
            sampling.bitmask = _without(self._matcher.bitmask(), banned)
        return sampling

    def _banned(self) -> tuple[int, ...]:
        """Ids that would end the turn too early, or that ``ignore_eos`` does not want while the grammar has more to say."""
        banned = self._stop_ids if self.n_accepted < self.params.min_tokens else frozenset()
        if self.params.ignore_eos and self._matcher is not None:
            banned |= self._text.end_ids
        return tuple(banned)

    def progress(self) -> RowResult:
        """The result of a step that did not sample (a prefill piece)."""
        return RowResult(self.row, self.kv_len)

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> RowResult:
        """Take the sampled token (NO_TOKEN: the grammar's dead end), and the run that the grammar forces after it.

        The result carries ``kv_len`` as the engine has set it. A row that ended while it was replayed reports that and takes
        nothing. Log-probabilities exist for sampled tokens only, so a row that asked for them takes no forced runs.
        """
        first = self.n_accepted
        pieces: list[str] = []
        if self.ended is None and token_id == NO_TOKEN:
            pieces.append(self._end(EndedBy.GRAMMAR, self.n_accepted))
        if self.ended is None:
            pieces.append(self._take(token_id))
        if self.ended is None and self._text.forced_runs and self._matcher is not None and self.params.logprobs is None:
            for forced_id in self._matcher.forced():
                pieces.append(self._take(forced_id))
                if self.ended is not None:
                    break
        ids = tuple(self.ids[self.n_prompt + first :])
        return RowResult(
            row=self.row,
            kv_len=self.kv_len,
            ids=ids,
            text="".join(pieces),
            ended_by=self.ended,
            reusable_ids=self._reusable if self.ended is not None else -1,
            logprobs=(logprob,) if logprob is not None and ids else (),
        )

    def _take(self, token_id: int) -> str:
        """Accept one token and return the text that is certain now; sets ``ended`` if it is the last."""
        early = self.n_accepted < self.params.min_tokens
        self.ids.append(token_id)
        self._sampling.accept(token_id)
        if self._matcher is not None and not self._matcher.consume(token_id):
            return self._end(EndedBy.GRAMMAR, self.n_accepted - 1)
        if token_id in self._stop_ids and not early:
            return self._end(EndedBy.STOP, self.n_accepted - 1)
        text = self._push(token_id, early)
        if self.ended is None and self._matcher is not None and self._matcher.finished:
            text += self._end(EndedBy.STOP, self.n_accepted)
        if self.ended is None and self.n_accepted >= self.params.max_tokens:
            text += self._end(EndedBy.LENGTH, self.n_accepted)
        return text

    def _push(self, token_id: int, early: bool) -> str:
        """Detokenise one token. Text of the first ``min_tokens`` tokens is not searched for stop strings."""
        piece = self._detok.push(token_id)
        self._n_chars += len(piece)
        self._last_char.append(self._n_chars if self._detok.pending else self._n_chars - 1)
        released = Released(piece) if early else self._stops.feed(piece)
        self._n_sent += len(released.text)
        if released.stopped:
            # What was sent ends where the match begins: reusable are the tokens whose last character is before it.
            self.ended, self._reusable = EndedBy.STOP, bisect_left(self._last_char, self._n_sent)
        return released.text

    def _end(self, why: EndedBy, reusable: int) -> str:
        """End the row; returns the text that was held back."""
        self.ended, self._reusable = why, reusable
        return self._stops.flush() + self._detok.finish()


def _without(bitmask: NDArray[np.int32], banned: tuple[int, ...]) -> NDArray[np.int32]:
    """The mask without ``banned``; the mask as it is where nothing else is allowed (a complete text may end early)."""
    if not banned:
        return bitmask
    bits = bitmask.copy().view(np.uint32)
    for token_id in banned:
        bits[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return bits.view(np.int32) if bits.any() else bitmask
