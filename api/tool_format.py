"""The server's own tool format, for models whose chat template knows no tools.

Tools are described in the first system message; a call is written as Hermes-style models do:

    <tool_call>
    {"name": "clock", "arguments": {"zone": "UTC"}}
    </tool_call>

and results come back in a user message between <tool_response> tags. The grammar (tool_grammar.py) lets the model write exactly
this spacing, and the history is rendered with it again, so that what comes back from a client matches what the model wrote,
byte for byte. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvalet.api.normalise import Message, PastCall
from kvalet.api.tools import Tool

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
BETWEEN_CALLS = "\n"
RESULT_OPEN = "<tool_response>"
RESULT_CLOSE = "</tool_response>"

PREFACE = """You can call these tools, described in JSON:
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments as JSON like this:
<tool_call>
{{"name": "tool name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result comes back between <tool_response> tags."""


def call_prefix(name: str) -> str:
    """What stands between ``CALL_OPEN`` and the arguments."""
    return f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


CALL_SUFFIX = "}\n"
"""Between the arguments and ``CALL_CLOSE``."""


def call_text(name: str, arguments: str) -> str:
    return f"{CALL_OPEN}{call_prefix(name)}{arguments}{CALL_SUFFIX}{CALL_CLOSE}"


def describe(tools: Sequence[Tool]) -> str:
    """The text for the system message. Stable: the same tools in the same order give the same bytes."""
    lines = (json.dumps({"type": "function", "function": tool.function}, ensure_ascii=False) for tool in tools)
    return PREFACE.format(tools="\n".join(lines))


def own_messages(
    messages: Sequence[Message], tools: Sequence[Tool], original: Callable[[PastCall], str]
) -> list[dict[str, Any]]:
    """Plain role/content messages for the template. Consecutive tool results become one user message (templates that want
    turns to alternate accept it). ``original`` gives the arguments text of a past call as the model wrote it."""
    plain: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"{RESULT_OPEN}\n{message.content}\n{RESULT_CLOSE}")
            continue
        _flush(results, plain)
        plain.append({"role": message.role, "content": message.content + _calls_text(message.calls, original)})
    _flush(results, plain)
    return _with_tools(plain, tools) if tools else plain


def _flush(results: list[str], plain: list[dict[str, Any]]) -> None:
    if results:
        plain.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _calls_text(calls: Iterable[PastCall], original: Callable[[PastCall], str]) -> str:
    return BETWEEN_CALLS.join(call_text(call.name, original(call)) for call in calls)


def _with_tools(plain: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    text = describe(tools)
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]
