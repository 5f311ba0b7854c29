"""Messages as clients send them -> messages as chat templates expect them: every content is text, nothing is None.

What clients send differs (docs of each rule at the function): ``developer`` roles, content in parts, content null beside tool
calls, arguments as "", "null" or an object. What a text-only model cannot honour (images, audio, files) is refused with the
path of the field. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.api.errors import ApiError
from kvalet.api.json_text import parse_json

MAX_NAME_CHARS = 256
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
PART_SEPARATOR = "\n"
"""Between the text parts of one message. Other servers of open models join them this way as well."""


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call in the history. ``arguments`` is JSON text, "{}" where the client sent "", "null" or nothing; text that is
    not JSON is kept as it is (the model is shown what it wrote; a cut-off call must not make the history unusable)."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """``role``: system, user, assistant or tool. ``content`` is never None. ``name`` and ``reasoning`` "" = not given."""

    role: str
    content: str
    calls: tuple[PastCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


def normalise(messages: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """ApiError 400 with the path of the first field that cannot be understood. Order and number of messages are kept."""
    if not messages:
        raise ApiError("'messages' is empty: at least one message is needed.", param="messages", code="empty_array")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: Any, path: str) -> Message:
    if not isinstance(message, dict):
        raise ApiError(f"A message must be an object, not {_kind(message)}.", param=path)
    role = message.get("role")
    known = ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise ApiError(f"Unknown role {role!r}: use one of {', '.join(sorted(ROLES))}.", param=f"{path}.role")
    calls = _calls(message, path) if known == "assistant" else ()
    return Message(
        role=known,
        content=_content(message, known, path),
        calls=calls,
        tool_call_id=_text_field(message, "tool_call_id", path) if known == "tool" else "",
        name=_text_field(message, "name", path),
        reasoning=_text_field(message, "reasoning_content", path) if known == "assistant" else "",
    )


def _content(message: dict[str, Any], role: str, path: str) -> str:
    """Text, or text parts joined. Missing and null are "" for an assistant (it may only have called tools) and for a tool
    (it may return nothing); for others they are a mistake. Objects and numbers from a tool become JSON text."""
    content = message.get("content")
    where = f"{path}.content"
    if content is None:
        if role in ("assistant", "tool"):
            return ""
        raise ApiError(f"A {role} message needs content.", param=where)
    if isinstance(content, str):
        return clean_text(content, where)
    if isinstance(content, list):
        return PART_SEPARATOR.join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    if role == "tool":
        return clean_text(json.dumps(content, ensure_ascii=False), where)
    raise ApiError(f"content must be text or a list of text parts, not {_kind(content)}.", param=where)


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return clean_text(part, path)
    kind = part.get("type") if isinstance(part, dict) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ApiError(f"This model takes text only; a content part of type {kind!r} is not supported.", param=path)
    text = part.get(field)
    if not isinstance(text, str):
        raise ApiError(f"A part of type {kind!r} needs its text in {field!r}.", param=f"{path}.{field}")
    return clean_text(text, f"{path}.{field}")


def _calls(message: dict[str, Any], path: str) -> tuple[PastCall, ...]:
    calls = message.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise ApiError(f"tool_calls must be a list, not {_kind(calls)}.", param=f"{path}.tool_calls")
    return tuple(_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls))


def _call(call: Any, path: str) -> PastCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ApiError("A tool call needs an object 'function' with name and arguments.", param=f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ApiError("A tool call needs a name.", param=f"{path}.function.name")
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    return PastCall(_text_field(call, "id", path), clean_text(name, f"{path}.function.name"), arguments)


def _arguments(arguments: Any, path: str) -> str:
    if arguments is None:
        return "{}"
    if isinstance(arguments, dict):
        return clean_text(json.dumps(arguments, ensure_ascii=False), path)
    if not isinstance(arguments, str):
        raise ApiError(f"arguments must be JSON text, not {_kind(arguments)}.", param=path)
    return clean_text(arguments, path) if arguments.strip() not in ("", "null") else "{}"


def _text_field(holder: dict[str, Any], field: str, path: str) -> str:
    value = holder.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ApiError(f"{field} must be text, not {_kind(value)}.", param=f"{path}.{field}")
    return clean_text(value, f"{path}.{field}")


def clean_text(text: str, path: str) -> str:
    """Half a surrogate pair is not a character; no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"Text with half a surrogate pair at character {error.start}.", param=path) from error
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def native_messages(messages: Sequence[Message], original: Callable[[PastCall], str]) -> list[dict[str, Any]]:
    """For a template that writes tool calls itself: the shape that templates are written for, ``arguments`` an object
    (templates print it with ``tojson``), or the text where it is not a JSON object. ``original`` as in tool_format."""
    return [_native(message, original) for message in messages]


def _native(message: Message, original: Callable[[PastCall], str]) -> dict[str, Any]:
    native: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        native["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _as_object(original(call))},
            }
            for call in message.calls
        ]
    for field, value in (
        ("tool_call_id", message.tool_call_id),
        ("name", message.name),
        ("reasoning_content", message.reasoning),
    ):
        if value:
            native[field] = value
    return native


def _as_object(arguments: str) -> dict[str, Any] | str:
    value = parse_json(arguments)
    return value if isinstance(value, dict) else arguments
