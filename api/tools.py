"""The tools and the tool choice of one request, checked in shape. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.api.errors import ApiError

MAX_TOOLS = 256
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
CHOICES = ("auto", "none", "required", "named")


@dataclass(frozen=True, slots=True)
class Tool:
    """``parameters``: the JSON schema of its arguments, an object. ``path``: where that schema stands in the request.
    ``function``: what the client sent, as it is shown to the model."""

    name: str
    parameters: dict[str, Any]
    path: str
    function: dict[str, Any]


def parse_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """Tools of type "function", in the client's order. Other types (hosted searches and the like) are left out: agents send
    them to every server. ApiError 400 for a bad name, a name given twice, parameters that are not an object, too many."""
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"{len(tools)} tools: at most {MAX_TOOLS} are taken.", param="tools")
    parsed: list[Tool] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise ApiError("A tool must be an object.", param=path)
        if tool.get("type", "function") != "function":
            continue
        one = _tool(tool.get("function"), f"{path}.function")
        if one.name in names:
            raise ApiError(f"Two tools are named {one.name!r}.", param=f"{path}.function.name")
        names.add(one.name)
        parsed.append(one)
    return tuple(parsed)


def _tool(function: Any, path: str) -> Tool:
    if not isinstance(function, dict):
        raise ApiError("A tool needs an object 'function'.", param=path)
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError("A tool needs a name of 1 to 128 letters, digits, or _ . : / -", param=f"{path}.name")
    if not isinstance(function.get("description") or "", str):
        raise ApiError("description must be text.", param=f"{path}.description")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_PARAMETERS
    if not isinstance(parameters, dict):
        raise ApiError("parameters must be a JSON schema: an object.", param=f"{path}.parameters")
    return Tool(name, parameters, f"{path}.parameters", function)


def allowed_tools(tools: Sequence[Tool], choice: str, name: str) -> tuple[Tool, ...]:
    """The tools that this answer may call: none of them, all, or the named one.

    ApiError 400: "required" without a tool, "named" with a name that is not among them, an unknown choice.
    """
    if choice not in CHOICES:
        raise ApiError(f"Unknown tool_choice {choice!r}: use one of {', '.join(CHOICES)}.", param="tool_choice")
    if choice == "none":
        return ()
    if choice == "required" and not tools:
        raise ApiError("tool_choice 'required' needs at least one tool of type 'function'.", param="tool_choice")
    if choice == "named":
        chosen = tuple(tool for tool in tools if tool.name == name)
        if not chosen:
            raise ApiError(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice.function.name")
        return chosen
    return tuple(tools)
