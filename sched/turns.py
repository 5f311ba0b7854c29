"""A turn as it crosses the border to api: what is asked, how it ended, and the record of what its KV cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from kvalet.runtime.plan import SamplingParams, TokenLogprob

TurnId = NewType("TurnId", int)
"""Unique in the process; given by ``Scheduler.next_turn_id``. Grows by one, so a smaller id is an older turn."""


class EndReason(StrEnum):
    """The one reason with which an accepted turn ends. Exactly one per accepted turn, always."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    """Cancelled by its owner, or its client has gone."""
    WRITE_TIMEOUT = "write_timeout"
    """Its client did not read for longer than the write timeout."""
    GRAMMAR = "grammar"
    """The grammar allowed no token: a dead end."""
    DEVICE_ERROR = "device_error"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"
    """A defect of kvalet. Counted; must be 0 in every test."""


class Refusal(StrEnum):
    """Why a turn was not accepted. api's error table maps it to a status."""

    QUEUE_FULL = "queue_full"
    NEVER_FITS = "never_fits"
    """Prompt + one page exceeds the pool, or the prompt leaves no room for one token in the context."""
    CLOSING = "closing"
    SESSION_CLOSED = "session_closed"
    SESSIONS_FULL = "sessions_full"
    DEVICE_LOST = "device_lost"


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One request on one line of history. Times are seconds of the scheduler's monotonic clock.

    ``session``: the client's id, a hint only ("" = none: recognised by its longest prefix). ``secret``: 32 bytes of the
    tenant (store.ids.tenant_secret): two turns share KV only if these are equal. ``priority``: class, higher first; one
    class (0) is used today. ``stream_pieces``: bound of the turn's channel.
    """

    turn: TurnId
    prompt: tuple[int, ...]
    params: SamplingParams
    secret: bytes
    session: str = ""
    tenant: str = ""
    priority: int = 0
    received_at: float = 0.0
    stream_pieces: int = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of a turn and the text that is now certain (may be empty for either)."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnReport:
    """What the turn cost: the KV record. tokens_* are prompt tokens; computed + resident + ram + disk == prompt_tokens
    on the first admission; after a preemption what was computed or restored again is added in ``recomputed_tokens``.

    ``resident_tokens``: found in device pages. ``diverged_at``: the first prompt token that differs from the session's
    stored history (-1: it did not, or there was none). ``lost``: why stored KV was not used, by reason.
    Milliseconds are wall time of the stage, summed over chunks where several were read (they overlap in time).
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: int = 0
    resident_tokens: int = 0
    ram_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    bytes_from_ram: int = 0
    bytes_from_disk: int = 0
    queued_ms: float = 0.0
    lookup_ms: float = 0.0
    read_ms: float = 0.0
    verify_ms: float = 0.0
    copy_ms: float = 0.0
    restore_ms: float = 0.0
    """Wall time from the first restore command to the last page usable."""
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    diverged_at: int = -1
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were NOT computed."""
        return self.prompt_tokens - self.computed_tokens


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of every accepted turn's stream. ``message`` says more where the reason is an error."""

    reason: EndReason
    report: TurnReport
    message: str = ""
