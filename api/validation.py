"""pydantic's complaint about a request body -> one ApiError that names the field as OpenAI's API does.

Only the first complaint is told: one sentence is what a person acts on. Locations that pydantic makes up for the branches of
a union are left out of the path by walking the body itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvalet.api.errors import ApiError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Body = TypeVar("Body", bound=BaseModel)

WORDS = {
    "missing": "is required",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number of at most 64 bits",
    "int_from_float": "must be a whole number of at most 64 bits",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "too_short": "must not be empty",
    "string_too_short": "must not be an empty string",
}
"""In JSON's words, where pydantic would speak of Python's types."""


def validated(model: type[Body], body: Mapping[str, Any]) -> Body:
    """``body`` as a ``model``; ApiError 400 with the path of the first bad field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise explained(error.errors(include_url=False), body) from None


def explained(errors: Sequence[ErrorDetails], body: Any) -> ApiError:
    """The first error of ``errors`` (there is at least one)."""
    first = errors[0]
    path = path_of(first["loc"], body)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(f"'{path}' {_said(first)}.", param=path, code=code)


def _said(error: ErrorDetails) -> str:
    """What is wrong, to follow the field's name. Messages of our own validators are already in this form."""
    word = WORDS.get(error["type"])
    if word is not None:
        return word
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    return message.replace("Input should", "must") if message.startswith("Input should") else message


def path_of(location: Sequence[int | str], body: Any) -> str:
    """``("messages", 2, "content")`` -> ``messages[2].content``. Steps that do not exist in ``body`` are names of union
    branches and left out, except the last one of a missing field."""
    path = ""
    here = body
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
            here = here[step] if isinstance(here, list) and step < len(here) else None
            continue
        known = isinstance(here, Mapping) and step in here
        if known or (index == len(location) - 1 and isinstance(here, Mapping)):
            path += f".{step}" if path else step
            here = here[step] if known else None
    return path
