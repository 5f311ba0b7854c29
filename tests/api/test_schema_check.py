"""Schemas are refused with path and reason, or enforced (cases P05, P07, P46)."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest
from kvalet.api.errors import ApiError
from kvalet.api.response_format import response_schema
from kvalet.api.schema_bounds import MAX_ITEMS, narrowed, string_bound
from kvalet.api.schema_check import MAX_SCHEMA_NESTING, check_schema, compile_error

PATH = "tools[0].function.parameters"


def with_property(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}}


def nested(levels: int) -> dict[str, Any]:
    """``levels`` objects around a string: 2 * levels + 1 levels of JSON."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


TREE = {
    "$defs": {
        "T": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}},
            "required": ["v"],
        }
    },
    "$ref": "#/$defs/T",
}


@pytest.mark.parametrize(
    ("schema", "param", "message"),
    [
        ({"type": "not-a-type"}, PATH + ".type", "invalid schema: Invalid type: not-a-type"),
        (with_property({"$ref": "#/$defs/Gone"}), PATH + ".properties.x.$ref", "does not exist"),
        ({"$defs": {"N": {"$ref": "#/$defs/N"}}, "$ref": "#/$defs/N"}, PATH, "refers to itself"),
        ({**with_property({"$ref": "#"}), "required": ["x"]}, PATH, "refers to itself"),
        (
            with_property({"type": "string", "pattern": "("}),
            PATH + ".properties.x.pattern",
            "invalid schema: regex parse error",
        ),
        (
            with_property({"type": "string", "pattern": "(?=x)y"}),
            PATH + ".properties.x.pattern",
            "not supported: .*look-around",
        ),
        (
            with_property({"type": "string", "format": "made-up"}),
            PATH + ".properties.x.format",
            "not supported: Unknown format",
        ),
        ({"enum": []}, PATH + ".enum", "invalid schema: Unsatisfiable"),
        (
            with_property({"type": "array", "uniqueItems": True}),
            PATH + ".properties.x.uniqueItems",
            "not supported: Unimplemented",
        ),
        ({"not": {"type": "string"}}, PATH + ".not", "not supported: Unimplemented"),
        ({"if": {}, "then": {}}, PATH + ".if", "not supported: Unimplemented"),
        (with_property({"oneOf": [{"type": "integer"}, {"type": "number"}]}), PATH + ".properties.x", "not supported: oneOf"),
        (with_property({"$ref": "http://example.com/s"}), PATH + ".properties.x", "not supported"),
        (with_property(5), PATH, "schema"),
        ({"properties": 5}, PATH, "invalid schema: properties must be an object"),
        (with_property({"minimum": "a"}), PATH + ".properties.x.minimum", "invalid schema: Expected"),
        ({"type": "string", "minLength": 9, "maxLength": 2}, PATH, "invalid schema: Unsatisfiable"),
        ([], PATH, "must be an object"),
        ("text", PATH, "must be an object"),
        ({"type": "string", "pattern": "(?=x)y", "x-guidance": {"lenient": True}}, PATH + ".pattern", "not supported"),
    ],
)
def test_refused_with_path_and_reason(schema: Any, param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        check_schema(schema, PATH)
    assert caught.value.status == 400
    assert caught.value.param == param


@pytest.mark.parametrize(
    "schema",
    [
        {},
        TREE,
        with_property({"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        with_property({"type": ["string", "null"]}),
        with_property({"type": "string", "pattern": "^hello there\\\\!$"}),
        with_property({"oneOf": [{"type": "integer"}, {"type": "string"}]}),
        with_property({"$ref": "#/properties/y"}) | {"properties": {"x": {"$ref": "#/properties/y"}, "y": {"type": "integer"}}},
        {"type": "array", "minItems": 2},
        {"$schema": "http://json-schema.org/draft-07/schema#", "title": "t", "description": "d", "default": {}, "examples": []},
        {"type": "integer", "format": "int32"},
        nested((MAX_SCHEMA_NESTING - 1) // 2 - 1),
    ],
)
def test_enforceable(schema: dict[str, Any]) -> None:
    check_schema(schema, PATH)


@pytest.mark.parametrize("levels", [60, 120, 250, 340, 2000, 20_000])
def test_deep_nesting_is_a_400_at_once(levels: int) -> None:
    deep = nested(levels)
    began = time.process_time()
    with pytest.raises(ApiError, match=f"nests deeper than {MAX_SCHEMA_NESTING} levels") as caught:
        check_schema(deep, PATH)
    assert (caught.value.code, caught.value.param) == ("nesting_too_deep", PATH)
    assert time.process_time() - began < 0.1


def test_wide_schema_is_checked_in_time() -> None:
    properties = {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(2000)}
    wide: dict[str, Any] = {"type": "object", "properties": properties}
    began = time.process_time()
    check_schema(wide, PATH)
    wide["properties"]["last"] = {"type": "string", "format": "made-up"}
    with pytest.raises(ApiError, match="not supported"):
        check_schema(wide, PATH)
    assert time.process_time() - began < 20.0


def test_narrowing_bounds_what_has_no_bound() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "short": {"type": "string", "maxLength": 3},
            "long": {"type": "string", "minLength": 5000},
            "kind": {"type": "string", "enum": ["a"]},
            "list": {"type": "array", "items": {"type": ["string", "null"]}},
            "open": {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
            "free": {"type": "object"},
        },
    }
    result = narrowed(schema, 1000)
    properties = result["properties"]
    assert properties["text"]["maxLength"] == 1000
    assert properties["short"]["maxLength"] == 3
    assert properties["long"]["maxLength"] == 5000
    assert "maxLength" not in properties["kind"]
    assert properties["list"] == {
        "type": "array",
        "items": {"type": ["string", "null"], "maxLength": 1000},
        "maxItems": MAX_ITEMS,
    }
    assert properties["open"]["additionalProperties"] is True
    assert "additionalProperties" not in properties["free"]
    assert result["additionalProperties"] is False
    assert "maxLength" not in schema["properties"]["text"], "the client's schema is not changed"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}]}, {"a": 1, "b": 2}),
        ({"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, {"a": 1, "b": 2}),
        (
            {
                "$defs": {"Base": {"type": "object", "properties": {"a": {"type": "integer"}}}},
                "properties": {"b": {"type": "integer"}},
                "$ref": "#/$defs/Base",
            },
            {"a": 1, "b": 2},
        ),
        (TREE, {"v": 1, "kids": [{"v": 2}]}),
    ],
)
def test_narrowing_never_makes_a_schema_unsatisfiable(schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, schema)
    jsonschema.validate(value, narrowed(schema, 1000))
    assert compile_error(narrowed(schema, 1000)) == ""


@pytest.mark.parametrize(("context", "bound"), [(16, 256), (8192, 8192), (131072, 131072)])
def test_string_bound_grows_with_the_context(context: int, bound: int) -> None:
    assert string_bound(context) == bound


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert response_schema(None) is None
    assert response_schema({"type": "text"}) is None
    assert response_schema({"type": "json_object"}) == {"type": "object"}
    assert response_schema({"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": schema}}) == schema
    assert response_schema({"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}) == schema


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema", "schema": {"type": "object"}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": "x"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "r"}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"pattern": "(?=x)y", "type": "string"}}},
            "response_format.json_schema.schema.pattern",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "string", "format": "made-up"}}},
            "response_format.json_schema.schema.format",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": []}}}, "response_format.json_schema.schema.enum"),
    ],
)
def test_response_formats_that_are_refused(response_format: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        response_schema(response_format)
    assert (caught.value.status, caught.value.param) == (400, param)
