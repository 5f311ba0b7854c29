"""Narrow a tool's schema so that a small model's call ends: every narrowed value is valid for the client's schema too.

A model that loops inside a string or invents keys would write until the context is full. So strings without a bound get one,
lists too, and objects with named properties take no others, unless the schema says so itself. ``narrowed`` never widens. Pure.
"""

from __future__ import annotations

from typing import Any

from kvalet.runtime.schema_check import children

MAX_ITEMS = 256
_SPELLED_OUT = ("enum", "const", "pattern", "format", "maxLength")
_COMBINATORS = ("allOf", "anyOf", "oneOf", "$ref")


def string_bound(context_tokens: int) -> int:
    """Characters of one argument string: what about a quarter of the context can say, at least 256."""
    return max(256, context_tokens)


def narrowed(schema: dict[str, Any], max_string_chars: int) -> dict[str, Any]:
    """A copy. Objects are closed only where no combinator could join them with others that name further properties."""
    result: dict[str, Any] = _narrow(schema, max_string_chars, close=not _joins_objects(schema))
    return result


def _joins_objects(node: Any) -> bool:
    """Somewhere two schemas are to match one object together: closing one would shut out the other's properties."""
    if not isinstance(node, dict):
        return False
    beside = any(name in node for name in _COMBINATORS) and ("properties" in node or "additionalProperties" in node)
    return beside or "allOf" in node or any(_joins_objects(child) for _, child in children(node))


def _narrow(node: Any, max_string_chars: int, *, close: bool) -> Any:
    if not isinstance(node, dict):
        return node
    result = {key: _child(key, value, max_string_chars, close) for key, value in node.items()}
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not any(name in node for name in _SPELLED_OUT):
        result["maxLength"] = max(max_string_chars, _number(node.get("minLength")))
    if "array" in kinds and "maxItems" not in node and not any(name in node for name in ("enum", "const")):
        result["maxItems"] = max(MAX_ITEMS, _number(node.get("minItems")))
    if close and node.get("properties") and not any(name in node for name in ("additionalProperties", "patternProperties")):
        result["additionalProperties"] = False
    return result


def _child(key: str, value: Any, max_string_chars: int, close: bool) -> Any:
    if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
        return {name: _narrow(child, max_string_chars, close=close) for name, child in value.items()}
    if key in ("anyOf", "oneOf", "allOf", "prefixItems", "items") and isinstance(value, list):
        return [_narrow(child, max_string_chars, close=close) for child in value]
    if key in ("items", "additionalProperties"):
        return _narrow(value, max_string_chars, close=close)
    return value


def _number(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
