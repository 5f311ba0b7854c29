"""What one request was and did, with the times at which it did it. Pure: chunks and times in, one frozen value out.

Time to first token is counted to the first content: text, reasoning, or a part of a tool call. A chunk that only names the
role is no content. A chunk is not a token: token counts come from the server's ``usage`` and from nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as put together from its deltas. ``arguments`` is JSON text as sent."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are seconds of one monotonic clock. ``intended_s``: when the workload wanted the request sent; ``sent_s``: when it
    was. ``chunk_s``: arrival of every chunk with content. ``error`` "" = a whole answer came; otherwise one sentence, and the
    request counts as failed whatever the status. ``output_tokens`` is None where the server sent no usage. ``record``: the
    server's own report (the field ``kvalet``), {} where there is none."""

    intended_s: float
    sent_s: float
    end_s: float
    status: int = 0
    error: str = ""
    chunk_s: tuple[float, ...] = ()
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    retry_after: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def queued_s(self) -> float:
        """How long the client itself held the request back."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """From the INTENDED time to the first content, so that a client that falls behind cannot flatter the server."""
        return self.chunk_s[0] - self.intended_s if self.chunk_s else None

    @property
    def latency_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def chunk_gaps_s(self) -> tuple[float, ...]:
        """Times between chunks with content. Of chunks: one may carry several tokens."""
        return tuple(b - a for a, b in pairwise(self.chunk_s))

    @property
    def s_per_token(self) -> float | None:
        """(last content - first content) / (output tokens - 1), the tokens as counted by the server."""
        if self.output_tokens is None or self.output_tokens < 2 or len(self.chunk_s) < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1)


class Collector:
    """Grows an ``Outcome`` from the parsed chunks of a stream, or from one whole reply (which is one chunk)."""

    def __init__(self) -> None:
        self.error = ""
        self.chunk_s: list[float] = []
        self._text: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._finish: list[str] = []
        self._ids: list[int] = []
        self._prompt_ids: tuple[int, ...] = ()
        self._usage: Mapping[str, Any] = {}
        self._record: Mapping[str, Any] = {}

    def add(self, chunk: Mapping[str, Any], now_s: float) -> bool:
        """Takes one chunk; True if it had content."""
        if chunk.get("error"):
            error = chunk["error"]
            self.error = str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
            return False
        self._usage = chunk.get("usage") or self._usage
        self._record = chunk.get("kvalet") or self._record
        self._prompt_ids = tuple(chunk.get("prompt_token_ids") or self._prompt_ids)
        content = False
        for choice in chunk.get("choices") or ():
            content |= self._choice(choice)
        if content:
            self.chunk_s.append(now_s)
        return content

    def _choice(self, choice: Mapping[str, Any]) -> bool:
        delta = choice.get("delta") or choice.get("message") or {}
        texts = [choice.get("text"), delta.get("content")]
        self._text += [text for text in texts if text]
        content = any(texts) or any(delta.get(name) for name in ("reasoning_content", "reasoning", "refusal"))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            content = True
            function = call.get("function") or {}
            known = self._calls.setdefault(call.get("index", position), ["", "", ""])
            known[0] = call.get("id") or known[0]
            known[1] += function.get("name") or ""
            known[2] += function.get("arguments") or ""
        self._ids += choice.get("token_ids") or ()
        self._prompt_ids = tuple(choice.get("prompt_token_ids") or self._prompt_ids)
        if choice.get("finish_reason"):
            self._finish.append(str(choice["finish_reason"]))
        return content

    def outcome(self, intended_s: float, sent_s: float, end_s: float, status: int, retry_after: str = "") -> Outcome:
        """``error`` is set for a status of refusal, an error in the stream, and a stream that ended without a finish reason."""
        error = self.error
        if not error and status != 200:
            error = f"status {status}"
        if not error and len(self._finish) != 1:
            error = f"{len(self._finish)} finish reasons instead of one"
        details = self._usage.get("prompt_tokens_details") or {}
        return Outcome(
            intended_s=intended_s,
            sent_s=sent_s,
            end_s=end_s,
            status=status,
            error=error,
            chunk_s=tuple(self.chunk_s),
            text="".join(self._text),
            tool_calls=tuple(ToolCall(*parts) for _, parts in sorted(self._calls.items())),
            finish_reasons=tuple(self._finish),
            token_ids=tuple(self._ids),
            prompt_ids=self._prompt_ids,
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            output_tokens=self._usage.get("completion_tokens"),
            retry_after=retry_after,
            record=self._record,
        )
