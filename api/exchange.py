"""One request and what became of it: filled while it is served, logged and counted once when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from kvalet.api.requests import TurnEnd

LOGGER = logging.getLogger("kvalet.request")
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Probes and scrapes: logged at debug level."""
CLIENT_GONE = 499
"""Status in log and metrics of a request whose client left before it was answered. Never sent."""


@dataclass(slots=True)
class Exchange:
    """``status`` 0 = nothing was sent. ``end``: the turn's end, None where no turn was started or it was never seen."""

    id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    error_code: str = ""
    session: str = ""
    tenant: str = ""
    turn_id: str = ""
    stream: bool = False
    client_gone: bool = False
    end: TurnEnd | None = None
    first_byte_at: float = 0.0

    @property
    def outcome(self) -> int:
        """The status that log and metrics show."""
        return CLIENT_GONE if self.client_gone else self.status

    def record(self) -> dict[str, Any]:
        """The log line's fields; the KV record beside them where there was a turn."""
        line: dict[str, Any] = {
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.outcome,
            "ms": round((time.perf_counter() - self.started) * 1e3, 1),
        }
        for name in ("error_code", "session", "tenant", "turn_id"):
            value = getattr(self, name)
            if value:
                line[name] = value
        if self.turn_id:
            line["stream"] = self.stream
        if self.end is not None:
            line["finish"] = self.end.finish_reason
            line["reason"] = self.end.reason
            line["kv"] = kv_record(self.end)
        return line

    def log(self) -> None:
        """One line: the word ``request`` and a JSON object."""
        level = logging.DEBUG if self.path in QUIET_PATHS else logging.INFO
        if LOGGER.isEnabledFor(level):
            LOGGER.log(level, "request %s", orjson.dumps(self.record()).decode())


def kv_record(end: TurnEnd) -> dict[str, Any]:
    """The turn's KV record as JSON values: the fields of ``sched.turns.TurnReport`` and ``cached_tokens``."""
    values = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(end.report).items()}
    return {**values, "cached_tokens": cached_tokens(end)}


def cached_tokens(end: TurnEnd) -> int:
    """Prompt tokens that were not computed, kept within 0 and the prompt: clients subtract these numbers."""
    return min(max(0, end.report.cached_tokens), end.report.prompt_tokens)


def usage(end: TurnEnd) -> Mapping[str, Any]:
    """OpenAI's usage object. ``cached_tokens`` is always there, also when it is 0."""
    report = end.report
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(end)},
    }
