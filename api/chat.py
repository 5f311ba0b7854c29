"""POST /v1/chat/completions: the form of its answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvalet.api.exchange import kv_record, usage
from kvalet.api.logprobs import TokenBytes, chat_logprobs
from kvalet.api.requests import Delta, TextDelta, ToolCallDelta, TurnEnd
from kvalet.runtime.plan import TokenLogprob


@dataclass(frozen=True, slots=True)
class Frame:
    """What all chunks of one answer have in common. ``created`` in unix seconds. ``top_logprobs`` None = not asked for."""

    id: str
    created: int
    model: str
    include_usage: bool = False
    return_token_ids: bool = False
    with_record: bool = False
    top_logprobs: int | None = None


@dataclass(slots=True)
class _Call:
    """A tool call of a whole answer, as its deltas arrive."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def value(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": "".join(self.arguments)}}


class ChatShape:
    """Chunks or the whole of one chat answer. Token ids of a delta without text or call ride with the next chunk."""

    def __init__(self, frame: Frame, token_bytes: TokenBytes) -> None:
        self._frame = frame
        self._token_bytes = token_bytes
        self._text: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def opening(self) -> Mapping[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, delta: Delta) -> Mapping[str, Any] | None:
        self._ids.extend(delta.ids)
        self._logprobs.extend(delta.logprobs)
        if isinstance(delta, ToolCallDelta):
            return self._chunk({"tool_calls": [_call_delta(delta)]})
        if delta.text or (self._logprobs and self._frame.top_logprobs is not None):
            return self._chunk({"content": delta.text})
        return None

    def closing(self, end: TurnEnd) -> list[Mapping[str, Any]]:
        finish = self._chunk({}, end.finish_reason)
        if self._frame.return_token_ids:
            finish["prompt_token_ids"] = list(end.prompt_ids)
        chunks: list[Mapping[str, Any]] = [finish]
        if self._frame.include_usage:
            chunks.append({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(end)})
        if self._frame.with_record:
            chunks[-1] = {**chunks[-1], "kvalet": kv_record(end)}
        return chunks

    def fold(self, delta: Delta) -> None:
        self._ids.extend(delta.ids)
        self._logprobs.extend(delta.logprobs)
        if isinstance(delta, TextDelta):
            self._text.append(delta.text)
            return
        call = self._calls.setdefault(delta.index, _Call())
        call.id = call.id or delta.id
        call.name = call.name or delta.name
        call.arguments.append(delta.arguments)

    def whole(self, end: TurnEnd) -> Mapping[str, Any]:
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = [call.value() for _, call in sorted(self._calls.items())]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": self._taken_logprobs(),
            "finish_reason": end.finish_reason,
        }
        answer: dict[str, Any] = {**self._head("chat.completion"), "choices": [choice], "usage": usage(end)}
        if self._frame.return_token_ids:
            choice["token_ids"] = self._ids
            answer["prompt_token_ids"] = list(end.prompt_ids)
        if self._frame.with_record:
            answer["kvalet"] = kv_record(end)
        return answer

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._frame.id, "object": kind, "created": self._frame.created, "model": self._frame.model}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": self._taken_logprobs(),
            "finish_reason": finish_reason,
        }
        if self._frame.return_token_ids:
            choice["token_ids"] = self._ids
            self._ids = []
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _taken_logprobs(self) -> dict[str, Any] | None:
        """What has gathered since the last chunk; None where nothing was asked for or nothing is there."""
        k = self._frame.top_logprobs
        if k is None:
            return None
        taken, self._logprobs = self._logprobs, []
        return {"content": chat_logprobs(taken, k, self._token_bytes), "refusal": None} if taken else None


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """The first delta of a call names it; later ones carry index and arguments only."""
    if delta.id or delta.name:
        function = {"name": delta.name, "arguments": delta.arguments}
        return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return {"index": delta.index, "function": {"arguments": delta.arguments}}
