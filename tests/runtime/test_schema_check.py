"""Schemas that refer to themselves without an end, and the place of an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvalet.runtime.schema_check import MAX_NODES, MAX_TRIALS, children, endless_path, find_error, format_path, resolve

NODE = {"$ref": "#/$defs/N"}


def with_node(definition: Any, **schema: Any) -> dict[str, Any]:
    return {"$defs": {"N": definition}, **(schema or NODE)}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (with_node(NODE), ()),
        (with_node({"allOf": [NODE, {"type": "string"}]}), ()),
        (with_node({"anyOf": [NODE, {"allOf": [NODE]}]}), ()),
        (with_node({"type": "object", "properties": {"n": NODE}, "required": ["n"]}), ()),
        (with_node({"type": "array", "items": NODE, "minItems": 1}), ()),
        (with_node({"type": "array", "prefixItems": [NODE], "minItems": 1}), ()),
        ({"$ref": "#"}, ()),
        (with_node(NODE, type="object", properties={"a": {"items": NODE}}), ("$defs", "N")),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, ("properties", "a")),
        ({"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "type": "string"}, ("$defs", "A")),
    ],
)
def test_endless_parts_are_found(schema: Any, path: tuple[str, ...]) -> None:
    assert endless_path(json.loads(json.dumps(schema))) == path  # a copy: parsed JSON shares no objects


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        False,
        {"type": "string"},
        with_node({"anyOf": [NODE, {"type": "null"}]}),
        with_node({"type": "object", "properties": {"n": NODE}}),
        with_node({"type": "object", "properties": {"n": NODE, "v": {}}, "required": ["v"]}),
        with_node({"properties": {"n": NODE}, "required": ["n"]}),  # without a type, a number satisfies it
        with_node({"type": "array", "items": NODE}),
        with_node({"type": "array", "items": NODE, "minItems": 0}),
        with_node({"type": ["array", "null"], "items": NODE, "minItems": 1}),
        {"$ref": "#/$defs/Gone"},
        {"$ref": "http://example.com/other"},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "required": ["unknown"]},
        {"allOf": "no list", "anyOf": [], "properties": [1], "required": "a", "$ref": 5},
    ],
)
def test_finite_schemas_and_odd_values_pass(schema: Any) -> None:
    assert endless_path(schema) is None


def test_a_long_chain_of_references_is_followed() -> None:
    definitions: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(300)}
    assert endless_path({"$defs": {**definitions, "300": {"type": "null"}}, "$ref": "#/$defs/0"}) is None
    assert endless_path({"$defs": {**definitions, "300": {"$ref": "#/$defs/0"}}, "$ref": "#/$defs/0"}) == ()


def test_depth_is_no_recursion() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(MAX_NODES - 1):
        schema = {"type": "array", "items": schema, "minItems": 1}
    assert endless_path(schema) is None


def test_hostile_shapes_stay_cheap() -> None:
    """Each reference points to the next, and the first needs all: one visit per need, not one pass per reference."""
    n = MAX_NODES // 2 - 2
    chain: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(n)}
    schema = {"$defs": {**chain, str(n): {}}, "allOf": [{"$ref": f"#/$defs/{i}"} for i in range(n)]}
    assert endless_path(schema) is None


def test_a_schema_beyond_the_bound_is_left_to_the_compiler() -> None:
    schema = {"$ref": "#", "properties": {str(i): {} for i in range(MAX_NODES)}}
    assert endless_path(schema) is None


def broken(schema: Any) -> str:
    """An error that is somewhere inside: the word "bad" as a type."""
    if isinstance(schema, dict):
        if schema.get("type") == "bad":
            return "bad type"
        for _, child in children(schema):
            if broken(child):
                return "bad type"
    return ""


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "bad"}, ""),
        ({"properties": {"a": {}, "b": {"type": "bad"}}}, "properties.b"),
        ({"anyOf": [{}, {"items": {"type": "bad"}}]}, "anyOf[1].items"),
        ({"$defs": {"T": {"additionalProperties": {"type": "bad"}}}}, "$defs.T.additionalProperties"),
        ({"prefixItems": [{"not": {"type": "bad"}}]}, "prefixItems[0].not"),
    ],
)
def test_the_deepest_part_with_the_error_is_named(schema: Any, path: str) -> None:
    assert format_path(find_error(schema, broken)) == path


def test_the_search_for_an_error_is_bounded() -> None:
    trials = 0

    def counting(schema: Any) -> str:
        nonlocal trials
        trials += 1
        return broken(schema)

    wide = {"properties": {**{str(i): {} for i in range(1000)}, "z": {"type": "bad"}}}
    assert find_error(wide, counting) == ()
    assert trials == MAX_TRIALS


def test_references_are_resolved_as_json_pointers() -> None:
    root = {"a/b": {"~": [10, {"x": 1}]}}
    assert resolve(root, "#") is root
    assert resolve(root, "#/a~1b/~0/1/x") == 1
    for missing in ("#/a", "#/a~1b/~0/2", "#/a~1b/~0/x", "a", "http://x#/a", ""):
        assert resolve(root, missing) is None
