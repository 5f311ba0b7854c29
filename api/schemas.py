"""Request bodies of chat and completions: parsed JSON -> the frozen requests of api/requests.py, or a 400 with the field.

Messages, tools and schemas are checked here only as far as "a list of objects"; their contents are the engine's business
(api/normalise.py, api/tools.py), so that the Python API has the same checks. All functions are pure and may run on a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from kvalet.api.errors import ApiError
from kvalet.api.requests import ChatRequest, CompletionRequest
from kvalet.api.sampling_fields import MAX_TOP_LOGPROBS, SamplingFields, check_ids, kind_of, sampling_params
from kvalet.api.validation import validated
from pydantic import Discriminator, Field, Tag

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of /v1/completions when it is absent: OpenAI's."""
CHOICE_WORDS = ("auto", "none", "required")
FORMAT_TYPES = ("text", "json_object", "json_schema")


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None


def prompt_kind(value: Any) -> str:
    """Branch of ``prompt``: text, token ids, or a batch of either (of which one is taken)."""
    if not isinstance(value, list):
        return kind_of(value)
    first = value[0] if value else 0
    return "batch" if isinstance(first, (str, list)) else "ids"


OnePrompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[int], Tag("ids")],
    Discriminator(prompt_kind, custom_error_type="prompt_type", custom_error_message="must be a string or a list of token ids"),
]
Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[int], Tag("ids")] | Annotated[list[OnePrompt], Tag("batch")],
    Discriminator(prompt_kind, custom_error_type="prompt_type", custom_error_message="must be a string or a list of token ids"),
]


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request with what only the answer's form needs. ``top_logprobs``: None = no logprobs asked for."""

    request: ChatRequest | CompletionRequest
    model: str
    stream: bool
    include_usage: bool
    return_token_ids: bool
    top_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: ``session`` hint and authenticated ``tenant``."""

    session: str = ""
    tenant: str = ""


def parse_chat(body: Mapping[str, Any], caller: Caller, vocab_size: int) -> Asked:
    """ApiError 400 with the path of the bad field."""
    chat = validated(ChatBody, body)
    _refuse_what_cannot_be_honoured(chat)
    top_logprobs = _chat_logprobs(chat)
    max_tokens = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    choice = read_tool_choice(chat.tool_choice, chat.tools or [])
    request = ChatRequest(
        messages=tuple(chat.messages),
        params=sampling_params(chat, max_tokens, top_logprobs, vocab_size),
        max_tokens_given=max_tokens is not None,
        tools=choice.tools,
        tool_choice=choice.word,
        tool_name=choice.name,
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        response_format=_response_format(chat.response_format),
        session=caller.session,
        tenant=caller.tenant,
        cache_salt=chat.cache_salt or "",
    )
    return _asked(request, chat, top_logprobs)


def parse_completion(body: Mapping[str, Any], caller: Caller, vocab_size: int) -> Asked:
    """ApiError 400 with the path of the bad field."""
    completion = validated(CompletionBody, body)
    for field in ("echo", "suffix"):
        if getattr(completion, field):
            raise ApiError(f"'{field}' is not supported.", param=field, code="unsupported_value")
    if completion.best_of not in (None, 1):
        raise ApiError("'best_of' must be 1.", param="best_of", code="unsupported_value")
    max_tokens = completion.max_tokens if completion.max_tokens is not None else DEFAULT_COMPLETION_TOKENS
    if completion.max_tokens is None:
        max_tokens = max(max_tokens, completion.min_tokens or 0)
    request = CompletionRequest(
        prompt=_prompt(completion.prompt, vocab_size),
        params=sampling_params(completion, max_tokens, completion.logprobs, vocab_size),
        session=caller.session,
        tenant=caller.tenant,
        cache_salt=completion.cache_salt or "",
    )
    return _asked(request, completion, completion.logprobs)


def _asked(request: ChatRequest | CompletionRequest, body: SamplingFields, top_logprobs: int | None) -> Asked:
    return Asked(
        request=request,
        model=body.model,
        stream=bool(body.stream),
        include_usage=body.include_usage(),
        return_token_ids=bool(body.return_token_ids),
        top_logprobs=top_logprobs,
    )


def _refuse_what_cannot_be_honoured(chat: ChatBody) -> None:
    if chat.audio is not None or any(word != "text" for word in chat.modalities or ()):
        field = "audio" if chat.audio is not None else "modalities"
        raise ApiError(f"'{field}' is not supported: this model writes text.", param=field, code="unsupported_value")
    for field, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(chat, field):
            raise ApiError(f"'{field}' is no longer supported: use '{instead}'.", param=field, code="unsupported_value")


def _chat_logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs is not None and not chat.logprobs:
        raise ApiError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
    return (chat.top_logprobs or 0) if chat.logprobs else None


def _response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The object as it came, None for free text. Its schema is compiled and checked by the engine."""
    if value is None:
        return None
    kind = value.get("type")
    if kind not in FORMAT_TYPES:
        raise ApiError(
            f"'response_format.type' must be one of {', '.join(FORMAT_TYPES)}.",
            param="response_format.type",
            code="invalid_value",
        )
    return None if kind == "text" else value


@dataclass(frozen=True, slots=True)
class ToolChoice:
    word: Literal["auto", "none", "required", "named"]
    tools: tuple[dict[str, Any], ...]
    name: str = ""


def read_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> ToolChoice:
    """OpenAI's four forms. ``allowed_tools`` keeps only the tools it names. Without tools, absent means "none"; whether a
    named tool exists and whether "required" has any is checked by the engine, for both of its surfaces."""
    given = tuple(tools)
    if choice is None or choice == "auto":
        return ToolChoice("auto" if given else "none", given)
    if isinstance(choice, str):
        if choice == "required" or choice == "none":
            return ToolChoice("required" if choice == "required" else "none", given)
        raise ApiError(f"'tool_choice' must be one of {', '.join(CHOICE_WORDS)} or an object.", param="tool_choice")
    if not isinstance(choice, dict):
        raise ApiError("'tool_choice' must be a string or an object.", param="tool_choice", code="invalid_value")
    if choice.get("type") == "function":
        return ToolChoice("named", given, _function_name(choice, "tool_choice"))
    if choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), given)
    raise ApiError("'tool_choice.type' must be function or allowed_tools.", param="tool_choice.type", code="invalid_value")


def _allowed(allowed: Any, tools: tuple[dict[str, Any], ...]) -> ToolChoice:
    path = "tool_choice.allowed_tools"
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(entries, list) or not isinstance(allowed, dict):
        raise ApiError(f"'{path}.tools' must be a list.", param=f"{path}.tools", code="invalid_value")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise ApiError(f"'{path}.mode' must be auto or required.", param=f"{path}.mode", code="invalid_value")
    names = {_function_name(entry, f"{path}.tools[{index}]") for index, entry in enumerate(entries)}
    kept = tuple(tool for tool in tools if isinstance(tool.get("function"), dict) and tool["function"].get("name") in names)
    return ToolChoice("required" if mode == "required" else "auto", kept)


def _function_name(entry: Any, path: str) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ApiError(f"'{path}.function.name' must name a tool.", param=f"{path}.function.name", code="invalid_value")
    return name


def _prompt(prompt: str | list[int] | list[Any], vocab_size: int) -> str | tuple[int, ...]:
    """One prompt. A batch of one is taken, more are refused."""
    path = "prompt"
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise ApiError("'prompt' must be one prompt: send each in a request of its own.", param="prompt")
        prompt, path = prompt[0], "prompt[0]"
    if isinstance(prompt, str):
        if not prompt:
            raise ApiError("'prompt' must not be empty.", param="prompt", code="invalid_value")
        return prompt
    if not prompt:
        raise ApiError("'prompt' must not be empty.", param="prompt", code="invalid_value")
    check_ids(prompt, vocab_size, path)
    return tuple(prompt)
