"""``response_format`` -> the JSON schema that the answer must match. Pure."""

from __future__ import annotations

from typing import Any

from kvalet.api.errors import ApiError
from kvalet.api.schema_check import check_schema

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def response_schema(response_format: Any) -> dict[str, Any] | None:
    """None: free text. Compiles the schema: call it on a worker thread.

    ``strict`` makes no difference: with a schema the answer always matches it. ApiError 400 with the path of the field: an
    unknown type, a schema that is missing, in the wrong place, or that cannot be enforced.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, dict):
        raise ApiError("response_format must be an object.", param="response_format")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise ApiError(
            f"Unknown response_format type {kind!r}: use text, json_object or json_schema.", param="response_format.type"
        )
    return _json_schema(response_format)


def _json_schema(response_format: dict[str, Any]) -> dict[str, Any]:
    path = "response_format.json_schema"
    described = response_format.get("json_schema")
    if described is None and "schema" in response_format:
        raise ApiError(f"The schema belongs into {path}.schema.", param="response_format.schema")
    if not isinstance(described, dict):
        raise ApiError("json_schema must be an object with a name and a schema.", param=path)
    schema = described.get("schema")
    if not isinstance(schema, dict):
        raise ApiError("A JSON schema is needed: an object.", param=f"{path}.schema")
    check_schema(schema, f"{path}.schema")
    return schema
