"""A client's JSON schema: can it be enforced? Answered before any token is made, with the path of what is wrong.

Nesting first (nothing here recurses deeper than that bound), then references that lead back to themselves without an end
(runtime.schema_check), then a trial compilation by llguidance. A keyword that the compiler does not know how to enforce is
refused ("not supported: ..."), never dropped: an answer must not look constrained and be free.
"""

from __future__ import annotations

import json
from typing import Any

from kvalet.api.errors import ApiError
from kvalet.api.json_text import nesting
from kvalet.runtime.schema_check import endless_path, find_error, format_path
from llguidance import LLMatcher

MAX_SCHEMA_NESTING = 100
"""Levels of arrays and objects in a schema. The compiler's own reader stops at 128, wrappers included."""

SPACING: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The one form in which JSON is written: bounded white space, and the same bytes when a client's ``json.dumps`` or our own
history writes it again. It replaces whatever options a client's schema brings: "lenient" would drop constraints."""

_UNSUPPORTED = (
    "Unimplemented",
    "Unknown format",
    "oneOf constraints",
    "look-around",
    "Resource",
    "limit",
    "too complex",
    "too large",
)
"""What the compiler says where it cannot do what the schema rightly asks; anything else is a mistake in the schema."""


def check_schema(schema: Any, path: str) -> None:
    """Nothing if every value that is generated under ``schema`` matches it; else ApiError 400 with ``param`` = the path of
    the offending part below ``path``. Takes milliseconds for real tool sets: call it on a worker thread."""
    if nesting(schema, MAX_SCHEMA_NESTING) > MAX_SCHEMA_NESTING:
        raise ApiError(f"The schema nests deeper than {MAX_SCHEMA_NESTING} levels.", param=path, code="nesting_too_deep")
    if not isinstance(schema, dict):
        raise ApiError("A schema must be an object.", param=path)
    error = compile_error(schema)
    if error:
        raise _refusal(schema, error, path)
    endless = endless_path(schema)
    if endless is not None:
        where = _join(path, endless)
        reason = "invalid schema: it refers to itself without an end, so no finite value matches it"
        raise ApiError(reason, param=where, code="invalid_schema")


def compile_error(schema: Any) -> str:
    """The compiler's objection to ``schema``, "" if it has none. A warning is an objection: it says what is not enforced."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return "not a schema: it must be an object, true or false"
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": SPACING}))
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(str(messages[0]).split())[:500] if messages else ""


def _refusal(schema: dict[str, Any], error: str, path: str) -> ApiError:
    inner = find_error(schema, compile_error)
    node: Any = schema
    for step in inner:
        node = node[int(step)] if isinstance(node, list) else node[step]
    where = _join(path, inner) + _keyword(node, error)
    word = "not supported" if any(sign in error for sign in _UNSUPPORTED) else "invalid schema"
    return ApiError(f"{word}: {error}", param=where, code=word.replace(" ", "_"))


def _keyword(node: Any, error: str) -> str:
    """The keyword of ``node`` that the message speaks of, as the end of a path."""
    if not isinstance(node, dict):
        return ""
    for keyword, sign in (
        ("pattern", "regex"),
        ("format", "format"),
        ("type", "Invalid type"),
        ("enum", "anyOf is empty"),
        ("$ref", "Pointer"),
    ):
        if keyword in node and sign in error:
            return f".{keyword}"
    return next((f".{name}" for name in node if f'"{name}"' in error or f"'{name}'" in error), "")


def _join(path: str, inner: tuple[str, ...]) -> str:
    text = format_path(inner)
    return path if not text else f"{path}.{text}"
