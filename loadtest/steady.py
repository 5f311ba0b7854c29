"""Throughput of sessions that run at once. Pure.

Steady tokens/s: over the window in which ALL sessions are decoding, from the last one's first token to the first one's last.
Tokens in the window come from the server's usage, spread over a session's chunks. End to end: all output tokens over the time
from the first request to the last answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvalet.loadtest.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Batch:
    """Some sessions that ran at once. Milliseconds and tokens a second; ``window_s``: length of the steady window."""

    steady: float
    end_to_end: float
    gap_ms: float
    ttft_ms: float
    window_s: float


def steady_window(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """(from, to), seconds of the client's clock; empty (to <= from) where the sessions never decoded all at once."""
    return max(o.chunk_s[0] for o in outcomes), min(o.chunk_s[-1] for o in outcomes)


def tokens_between(outcome: Outcome, begin: float, end: float) -> float:
    """Output tokens whose chunk came after ``begin`` and not after ``end``."""
    inside = sum(begin < at <= end for at in outcome.chunk_s)
    return (outcome.output_tokens or 0) * inside / len(outcome.chunk_s)


def measure(outcomes: Sequence[Outcome]) -> Batch:
    """Raises ValueError with the server's words if one of them failed or gave no tokens."""
    for outcome in outcomes:
        if not outcome.ok or not outcome.output_tokens or len(outcome.chunk_s) < 2:
            raise ValueError(outcome.error or "an answer without tokens, or in one chunk")
    begin, end = steady_window(outcomes)
    inside = sum(tokens_between(o, begin, end) for o in outcomes)
    took = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    return Batch(
        steady=inside / (end - begin) if end > begin else 0.0,
        end_to_end=sum(o.output_tokens or 0 for o in outcomes) / took,
        gap_ms=statistics.fmean(o.s_per_token or 0.0 for o in outcomes) * 1e3,
        ttft_ms=statistics.median(o.ttft_s or 0.0 for o in outcomes) * 1e3,
        window_s=max(0.0, end - begin),
    )


def medians(batches: Sequence[Batch]) -> Batch:
    """Field by field."""
    names = ("steady", "end_to_end", "gap_ms", "ttft_ms", "window_s")
    return Batch(*(statistics.median(getattr(batch, name) for batch in batches) for name in names))
