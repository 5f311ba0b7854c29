"""Log-probabilities in the two shapes that OpenAI's APIs have for them. Pure.

``bytes`` are the token's own bytes, so that joined they decode to the text even where a character is split over tokens; a
token without text (end of turn) has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvalet.runtime.plan import TokenLogprob

TokenBytes = Callable[[int], bytes]
LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(logprobs: Iterable[TokenLogprob], k: int, token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """Items of ``choices[].logprobs.content``, one per token, each with ``k`` alternatives."""
    return [
        {
            **_one(item.token_id, item.logprob, token_bytes),
            "top_logprobs": [_one(token, value, token_bytes) for token, value in item.top[:k]],
        }
        for item in logprobs
    ]


def _one(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token)
    return {"token": text_of(data), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def text_of(data: bytes) -> str:
    """Part of a character shows as U+FFFD."""
    return data.decode("utf-8", "replace")


class CompletionLogprobs:
    """Items of ``choices[].logprobs`` of /v1/completions: parallel lists. ``text_offset`` counts characters of the answer."""

    def __init__(self, k: int, token_bytes: TokenBytes) -> None:
        self._k = k
        self._token_bytes = token_bytes
        self._offset = 0

    def lists(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The lists of these tokens. Offsets go on from call to call."""
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for item in logprobs:
            text = text_of(self._token_bytes(item.token_id))
            lists["tokens"].append(text)
            lists["token_logprobs"].append(finite(item.logprob))
            lists["top_logprobs"].append(self._top(item) if self._k else None)
            lists["text_offset"].append(self._offset)
            self._offset += len(text)
        return lists

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        return {text_of(self._token_bytes(token)): finite(value) for token, value in item.top[: self._k]}
