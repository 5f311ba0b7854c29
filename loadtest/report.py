"""Outcomes added up: percentiles over what succeeded, failures apart, a table and one JSON line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvalet.loadtest.outcome import Outcome

MAX_LAG_SHARE = 0.05
"""An open-loop run whose client sent later than intended by more than this share of the run is no measurement."""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the least value such that ``share`` (0..1) of all are <= it; nan of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds. ``n`` values; nan where there are none."""

    n: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        p50, p90, p99 = (percentile(seconds, share) * 1e3 for share in (0.5, 0.9, 0.99))
        return cls(len(seconds), p50, p90, p99, max(seconds, default=math.nan) * 1e3)

    def as_json(self) -> dict[str, float | int | None]:
        """nan has no JSON: it becomes null."""
        names = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
        return {"n": self.n} | {name: none_if_nan(round(getattr(self, name), 3)) for name in names}


def none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Summary:
    """A run. ``asked_rate``: requests a second that the workload wanted (0 = closed loop), ``achieved_rate``: that were
    answered. ``queued``: time in the client before sending, which TTFT and latency include. ``valid`` False: the client could
    not keep to its own plan, see ``why_invalid``; such figures say more about the client than about the server."""

    requests: int
    failures: dict[str, int]
    duration_s: float
    asked_rate: float
    achieved_rate: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft: Spread
    latency: Spread
    per_token: Spread
    chunk_gap: Spread
    queued: Spread
    why_invalid: str = ""

    @property
    def valid(self) -> bool:
        return not self.why_invalid

    def as_json(self) -> dict[str, object]:
        spreads = ("ttft", "latency", "per_token", "chunk_gap", "queued")
        plain = ("requests", "failures", "output_tokens", "prompt_tokens", "cached_tokens", "valid", "why_invalid")
        rates = {name: round(getattr(self, name), 3) for name in ("duration_s", "asked_rate", "achieved_rate")}
        return {name: getattr(self, name) for name in plain} | rates | {name: getattr(self, name).as_json() for name in spreads}

    def table(self) -> str:
        head = f"{'':<24}{'n':>7}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'max ms':>10}"
        names = {
            "ttft": "time to first token",
            "latency": "latency",
            "per_token": "time per token",
            "chunk_gap": "gap between chunks",
            "queued": "held back by client",
        }
        rows = [head]
        for name, label in names.items():
            s: Spread = getattr(self, name)
            rows.append(f"{label:<24}{s.n:>7}{s.p50_ms:>10.1f}{s.p90_ms:>10.1f}{s.p99_ms:>10.1f}{s.max_ms:>10.1f}")
        asked = f"asked {self.asked_rate:.2f}/s, " if self.asked_rate else ""
        rows.append(f"{self.requests} requests in {self.duration_s:.1f} s: {asked}answered {self.achieved_rate:.2f}/s")
        rows.append(f"tokens: prompt {self.prompt_tokens} (not computed: {self.cached_tokens}), output {self.output_tokens}")
        rows += [f"failed: {count} x {why}" for why, count in sorted(self.failures.items())]
        if self.why_invalid:
            rows.append(f"NOT VALID: {self.why_invalid}")
        return "\n".join(rows)


def failure_word(outcome: Outcome) -> str:
    """What failures are counted by: few words, whatever the server writes into its messages."""
    if outcome.status not in (0, 200):
        return f"status {outcome.status}"
    return "error in the stream" if outcome.status == 200 else outcome.error.split(":")[0]


def summarise(outcomes: Sequence[Outcome], asked_rate: float = 0.0) -> Summary:
    """Percentiles over the successful outcomes only. ``asked_rate`` makes lag a reason to call the run invalid."""
    good = [o for o in outcomes if o.ok]
    begin = min((o.intended_s for o in outcomes), default=0.0)
    duration = max((o.end_s for o in outcomes), default=0.0) - begin
    sending = max((o.intended_s for o in outcomes), default=0.0) - begin
    queued = [o.queued_s for o in outcomes]
    lag = max(queued, default=0.0)
    why = ""
    if asked_rate and sending and lag > MAX_LAG_SHARE * sending:
        why = f"the client sent up to {lag:.2f} s later than intended"
    return Summary(
        requests=len(outcomes),
        failures=dict(Counter(failure_word(o) for o in outcomes if not o.ok)),
        duration_s=duration,
        asked_rate=asked_rate,
        achieved_rate=len(good) / duration if duration else 0.0,
        output_tokens=sum(o.output_tokens or 0 for o in good),
        prompt_tokens=sum(o.prompt_tokens or 0 for o in good),
        cached_tokens=sum(o.cached_tokens or 0 for o in good),
        ttft=Spread.of([o.ttft_s for o in good if o.ttft_s is not None]),
        latency=Spread.of([o.latency_s for o in good]),
        per_token=Spread.of([o.s_per_token for o in good if o.s_per_token is not None]),
        chunk_gap=Spread.of([gap for o in good for gap in o.chunk_gaps_s]),
        queued=Spread.of(queued),
        why_invalid=why,
    )
