"""Tools, tool choice and response format of a request -> the constraint on its answer. Pure.

| choice | answer |
|---|---|
| none, or no tools | free text, or JSON where a response format asks for it |
| auto | free text; once the model writes the marker of a call, a valid call must follow, and after calls only calls |
| auto with a response format | that JSON, or calls |
| required | one or more calls |
| named | exactly one call of that tool |

``parallel_tool_calls`` false allows one call. A tool's ``strict`` makes no difference: arguments always match the schema.
Spacing is fixed (schema_check.SPACING), so white space is bounded; schema_bounds.py bounds the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.api.schema_bounds import narrowed
from kvalet.api.schema_check import SPACING, compile_error
from kvalet.api.tool_format import BETWEEN_CALLS, CALL_CLOSE, CALL_OPEN, CALL_SUFFIX, call_prefix
from kvalet.api.tools import Tool
from kvalet.runtime.plan import GrammarSpec

MAX_CALLS = 8
"""Calls in one answer; then it can only end (small models repeat themselves, and the next turn can call again)."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """What an answer may be. ``tools``: those that may be called, already by tool choice. ``must_call``: no answer in text.
    ``schema``: of a JSON answer, None = free text."""

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    max_calls: int = MAX_CALLS
    schema: dict[str, Any] | None = None


def rules_for(tools: Sequence[Tool], choice: str, *, parallel: bool, schema: dict[str, Any] | None = None) -> CallRules:
    """``tools``: what ``allowed_tools`` left of them."""
    must_call = choice in ("required", "named")
    single = not parallel or choice == "named"
    return CallRules(tuple(tools), must_call, 1 if single else MAX_CALLS, None if must_call else schema)


def grammar_for(rules: CallRules, max_string_chars: int) -> GrammarSpec | None:
    """None: nothing is constrained. Schemas have been checked (schema_check.check_schema)."""
    if not rules.tools:
        return None if rules.schema is None else GrammarSpec("json_schema", _json(rules.schema))
    lines = ["%llguidance {}", *_start(rules), f"body: {' | '.join(f'call_{i}' for i in range(len(rules.tools)))}"]
    for index, tool in enumerate(rules.tools):
        arguments = _json(_arguments_schema(tool, max_string_chars))
        lines.append(f"call_{index}: {_text(call_prefix(tool.name))} %json {arguments} {_text(CALL_SUFFIX + CALL_CLOSE)}")
    return GrammarSpec("lark", "\n".join(lines) + "\n")


def _start(rules: CallRules) -> list[str]:
    more = f"({_text(BETWEEN_CALLS + CALL_OPEN)} body){{0,{rules.max_calls - 1}}}" if rules.max_calls > 1 else ""
    calls = f"{_text(CALL_OPEN)} body {more}".rstrip()
    if rules.must_call:
        return [f"start: {calls}"]
    if rules.schema is not None:
        return [f"start: answer | {calls}", f"answer: %json {_json(rules.schema)}"]
    return [
        f"start: TEXT | opened body {more}".rstrip(),
        # Lazy: decided at the first marker, so text cannot run past one.
        f"opened[lazy]: /(.|\\n)*/ {_text(CALL_OPEN)}",
        "TEXT: /(.|\\n)*/",
    ]


def _arguments_schema(tool: Tool, max_string_chars: int) -> dict[str, Any]:
    """Narrowed, and an object: what names no type at the top still is called with named arguments."""
    schema = tool.parameters
    if not any(name in schema for name in ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")):
        schema = {**schema, "type": "object"}
    narrow = narrowed(schema, max_string_chars)
    # Narrowing can meet a bound from elsewhere in the schema; the client's own schema is known to compile.
    return schema if compile_error(narrow) else narrow


def _json(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": SPACING}, ensure_ascii=False)


def _text(text: str) -> str:
    """A Lark string literal. Names and markers hold no character that Lark and JSON escape differently."""
    return json.dumps(text, ensure_ascii=False)
