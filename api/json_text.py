"""JSON as text: parse within a nesting bound, and bring spacing into one form without touching a value's spelling. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

MAX_NESTING = 200
"""Levels of arrays and objects in anything a client sends that is walked or written again. Below the 254 levels that the
JSON writer accepts. Deeper is a 400, never a RecursionError."""

NOT_JSON: Final = object()

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\s+', re.DOTALL)
_SPACED = {",": ", ", ":": ": "}


def parse_json(text: str) -> Any:
    """The value, or ``NOT_JSON`` where ``text`` is not one JSON value or nests deeper than the parser goes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NOT_JSON


def respaced(text: str) -> str:
    """``text`` with ", " and ": " between items and no other white space: the one form that the grammar lets a model write.
    Strings, numbers and the order of keys stay exactly as spelled. Text that is not JSON comes back unchanged."""
    if parse_json(text) is NOT_JSON:
        return text
    tokens = (match[0] for match in _TOKEN.finditer(text))
    return "".join(_SPACED.get(token, token) for token in tokens if not token.isspace())


def nesting(value: Any, limit: int = MAX_NESTING) -> int:
    """Levels of arrays and objects in a parsed value; ``limit`` + 1 as soon as there are more than ``limit``. Iterative: a
    hostile depth costs no stack."""
    deepest = 0
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if not isinstance(item, (dict, list, tuple)):
            continue
        if depth > limit:
            return depth
        deepest = max(deepest, depth)
        stack.extend((child, depth + 1) for child in (item.values() if isinstance(item, dict) else item))
    return deepest


def same_value(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not, the order of keys does not matter."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(item, other[key]) for key, item in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other)
