"""What crosses the border between sched and runtime: ints, tuples and strings. No torch.

One step = one ``StepPlan`` in, one ``StepResult`` out. The engine keeps, per open row, the token ids, the page table,
the sampler's seed and counters, the grammar state and the detokeniser; the plan carries only what changed. Everything
the engine keeps can be rebuilt from a ``RowOpen``, so a preempted turn is closed and opened again under a new row id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

RowId = NewType("RowId", int)
"""Names one admission of one turn. Never reused, so it is also the epoch: results of a closed row are dropped by it."""

PageId = NewType("PageId", int)
"""Index into the pool. Page 0 is scratch and owned by nobody."""

SlotId = NewType("SlotId", int)
"""Index into the slab."""


class EndedBy(StrEnum):
    """Why the engine says that a row has no more tokens. The scheduler maps it to the turn's end reason."""

    STOP = "stop"
    """An end-of-turn id of the model, a ``stop_token_ids`` id, a stop string, or a finished grammar."""
    LENGTH = "length"
    """``max_tokens`` accepted tokens."""
    GRAMMAR = "grammar"
    """The grammar allows no token at all (a dead end), or its matcher failed: an error, never free text."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the generated text. Compiled once per (kind, text) in a worker thread, before submission.

    ``kind``: "json_schema", "regex" or "lark" (the syntax of llguidance), ``text``: its source.
    ``trigger``: None constrains from the first token. "lark" grammars express trigger-based (free text until a marker)
    constraints themselves.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn's tokens are chosen and when it stops. Values are already validated by api (ranges there).

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1.0 and ``min_p`` 0.0 are off. ``seed`` None: the engine draws
    one per turn. ``logprobs`` None: not asked for; k >= 0: the chosen token's and k alternatives' log-probabilities.
    ``stop`` strings are never sent to the client; ``stop_token_ids`` end the turn and their text is not sent.
    ``max_tokens`` counts accepted tokens, the end-of-turn id included. ``logit_bias`` pairs are (token id, bias).
    Noise of a request depends on its seed and the position only, never on its neighbours.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True)
class RowOpen:
    """Admission of a turn to the engine. The row exists from this plan on, until its ``closes`` entry.

    ``ids``: the prompt followed by the tokens this turn has already had accepted (after a preemption); the first
    ``n_prompt`` are the prompt. ``pages``: the page table so far, in order of position; it covers at least what the row
    is fed in this plan. KV of positions below ``kv_len`` is already in these pages.
    Text and end conditions are replayed from ids[n_prompt:] without being emitted again.
    """

    row: RowId
    ids: tuple[int, ...]
    n_prompt: int
    kv_len: int
    pages: tuple[PageId, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """One open row's part of a step: feed positions [start, start + n), then sample if asked.

    The ids fed are the row's own (RowOpen.ids, then accepted tokens in order). With ``lag`` 1 the last id may still be on
    the device: the engine feeds what it sampled. ``decode`` says which kind of call computes the positions (under
    ``deterministic`` the kind decides the bits): decode rows have n = 1, or a forced run of a grammar.
    ``new_pages`` are appended to the row's page table before the step. ``sample`` is set exactly when start + n reaches
    the row's last known id.
    """

    row: RowId
    start: int
    n: int
    decode: bool
    sample: bool
    new_pages: tuple[PageId, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The engine applies, in this order: closes, opens, page copies, the forward pass over ``rows``.

    ``page_copies`` are (source, destination) copies on the device, done before anything of this step is written.
    ``step`` numbers grow by one. A plan may have no rows (only closes and copies); it has a result as well.
    """

    step: int
    rows: tuple[Row, ...]
    opens: tuple[RowOpen, ...] = ()
    closes: tuple[RowId, ...] = ()
    page_copies: tuple[tuple[PageId, PageId], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, natural log, of the model's own distribution before temperature and masks
    (OpenAI's meaning). ``top`` holds (token id, logprob) of the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row got from one step.

    ``kv_len``: accepted tokens whose KV this row now has written (start + n of the plan).
    ``ids``: newly accepted tokens, in order: none for a prefill piece that does not sample, one for a sampled token, more
    when a grammar forces a run. The last accepted id's KV is not written yet. A stop token id is accepted and listed.
    ``text``: text that is now certain: whole characters, nothing that may still become part of a stop string.
    ``ended_by``: set once; ``text`` then holds everything that is left to send (before the stop match).
    ``reusable_ids``: with ``ended_by``: how many of the turn's accepted tokens come before the first token that overlaps a
    stop match (what the index and snapshots may keep); -1 while the row goes on.
    """

    row: RowId
    kv_len: int
    ids: tuple[int, ...] = ()
    text: str = ""
    ended_by: EndedBy | None = None
    reusable_ids: int = -1
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of the step ``step``, one per row of the plan, in the plan's order, except rows that had already ended in an
    earlier step that the scheduler had not seen yet (lag 1): these are left out."""

    step: int
    rows: tuple[RowResult, ...]
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)
