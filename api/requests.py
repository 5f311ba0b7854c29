"""A request and its answer between the HTTP surface and the engine: frozen values, already validated in shape.

The HTTP handlers (chat, completions) build requests and turn deltas into their API's bytes; the Python API (api/engine.py)
uses the same values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvalet.runtime.plan import SamplingParams, TokenLogprob
from kvalet.sched.turns import EndReason, TurnReport

MESSAGE_CHARS = 50
"""What a message costs beside its text: rendering."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``messages`` and ``tools`` in OpenAI's chat shape (plain JSON values). ``tool_choice``: "auto", "none", "required" or
    the name in ``tool_name`` with "named". ``response_format``: the OpenAI object or None. ``params.grammar`` is None here:
    the engine makes it from tools and response_format. ``max_tokens_given``: False lets the engine use what the context leaves.
    ``session`` is a hint, ``tenant`` the authenticated key's name ("" without keys), ``cache_salt`` splits inside it."""

    messages: tuple[dict[str, Any], ...]
    params: SamplingParams
    max_tokens_given: bool = True
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    session: str = ""
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``prompt``: text, or token ids (each 0 <= id < vocabulary, checked by the engine)."""

    prompt: str | tuple[int, ...]
    params: SamplingParams
    max_tokens_given: bool = True
    session: str = ""
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0


def text_size(request: ChatRequest | CompletionRequest) -> int:
    """What turning it into tokens will cost, in characters, roughly. Never raises, whatever the messages hold."""
    if isinstance(request, CompletionRequest):
        return len(request.prompt) if isinstance(request.prompt, str) else 0
    return sum(MESSAGE_CHARS + _content_size(message.get("content")) for message in request.messages)


def _content_size(content: object) -> int:
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return len(content) if isinstance(content, str) else 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New content. ``ids``: the token ids accepted with it (may be empty, and text may be empty while ids are not)."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of a tool call. The first delta of a call carries ``id`` and ``name`` (and maybe arguments); later ones only
    ``index`` and ``arguments``."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text, exactly the joined ``arguments`` of its deltas."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The last item of every turn. ``finish_reason`` in OpenAI's words: "stop", "length", "tool_calls", or "error" with
    ``reason`` and ``message`` saying why (then HTTP sends an error object)."""

    finish_reason: str
    reason: EndReason
    report: TurnReport
    message: str = ""
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)


Delta = TextDelta | ToolCallDelta
