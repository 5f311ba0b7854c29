"""POST /v1/completions: the form of its answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvalet.api.chat import Frame
from kvalet.api.exchange import kv_record, usage
from kvalet.api.logprobs import CompletionLogprobs, TokenBytes
from kvalet.api.requests import Delta, TextDelta, TurnEnd
from kvalet.runtime.plan import TokenLogprob


class CompletionShape:
    """Chunks or the whole of one completion. Chunks and whole have the same object name, as in OpenAI's API."""

    def __init__(self, frame: Frame, token_bytes: TokenBytes) -> None:
        self._frame = frame
        self._logprobs = CompletionLogprobs(frame.top_logprobs or 0, token_bytes)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._taken: list[TokenLogprob] = []

    def opening(self) -> None:
        return None

    def chunk(self, delta: Delta) -> Mapping[str, Any] | None:
        text = delta.text if isinstance(delta, TextDelta) else ""
        self._ids.extend(delta.ids)
        self._taken.extend(delta.logprobs)
        if text or (self._ids and self._frame.return_token_ids) or (self._taken and self._frame.top_logprobs is not None):
            return {**self._head(), "choices": [self._choice(text)]}
        return None

    def closing(self, end: TurnEnd) -> list[Mapping[str, Any]]:
        choice = self._choice("", end.finish_reason)
        finish = {**self._head(), "choices": [choice]}
        if self._frame.return_token_ids:
            finish["prompt_token_ids"] = list(end.prompt_ids)
        chunks: list[Mapping[str, Any]] = [finish]
        if self._frame.include_usage:
            chunks.append({**self._head(), "choices": [], "usage": usage(end)})
        if self._frame.with_record:
            chunks[-1] = {**chunks[-1], "kvalet": kv_record(end)}
        return chunks

    def fold(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta):
            self._text.append(delta.text)
        self._ids.extend(delta.ids)
        self._taken.extend(delta.logprobs)

    def whole(self, end: TurnEnd) -> Mapping[str, Any]:
        choice = self._choice("".join(self._text), end.finish_reason)
        if self._frame.return_token_ids:
            choice["prompt_token_ids"] = list(end.prompt_ids)
        answer: dict[str, Any] = {**self._head(), "choices": [choice], "usage": usage(end)}
        if self._frame.return_token_ids:
            answer["prompt_token_ids"] = list(end.prompt_ids)
        if self._frame.with_record:
            answer["kvalet"] = kv_record(end)
        return answer

    def _head(self) -> dict[str, Any]:
        frame = self._frame
        return {"id": frame.id, "object": "text_completion", "created": frame.created, "model": frame.model}

    def _choice(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        """One choice with what has gathered since the last one."""
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if self._frame.top_logprobs is not None and self._taken:
            choice["logprobs"] = self._logprobs.lists(self._taken)
        self._taken = []
        if self._frame.return_token_ids:
            choice["token_ids"], self._ids = self._ids, []
        return choice
