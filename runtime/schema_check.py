"""What the grammar compiler does not say of a JSON Schema: where it is wrong, and that no finite text can satisfy it.

A schema that refers to itself without an end ({"$defs": {"N": {"$ref": "#/$defs/N"}}}, or an object that requires itself)
compiles, and dies half-way through an answer. ``endless_path`` finds those parts before any token is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_NODES = 4000
"""Subschemas looked at; a larger schema is not checked here (the compiler's own limits hold for it)."""

MAX_TRIALS = 256
"""Subschemas tried one by one to find where an error comes from; then the best path so far is named."""

Path = tuple[str, ...]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")


def format_path(path: Path) -> str:
    """("properties", "a", "anyOf", "0") -> "properties.a.anyOf[0]"; "" for the schema itself."""
    text = ""
    for step in path:
        text += f"[{step}]" if step.isdigit() else f".{step}"
    return text.removeprefix(".")


def children(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The subschemas right below ``schema`` with their paths from it. Not a schema: none."""
    if not isinstance(schema, dict):
        return
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from (((key, name), child) for name, child in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from (((key, str(i)), child) for i, child in enumerate(schema[key]))
    for key in _SINGLES:
        if isinstance(schema.get(key), dict | bool):
            yield (key,), schema[key]


def find_error(schema: Any, error_of: Callable[[Any], str]) -> Path:
    """The path of the deepest subschema that gives the same error as the whole.

    ``error_of(subschema)`` compiles it and returns the error, "" for none; it is called at most ``MAX_TRIALS`` times.
    References are kept working by giving each subschema the definitions of the whole.
    """
    reason, trials = error_of(schema), 1
    path: Path = ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    here = schema
    while True:
        for step, child in children(here):
            if trials >= MAX_TRIALS:
                return path
            trials += 1
            whole = {**shared, **child} if isinstance(child, dict) and step[0] not in shared else child
            if error_of(whole) == reason:
                path, here = (*path, *step), child
                break
        else:
            return path


def endless_path(schema: Any) -> Path | None:
    """The path of a part that no finite text can satisfy because it refers to itself without an end; None if there is none.

    A least fixed point: a part is finite if what it needs is finite. It errs towards None: references it cannot follow, and
    keywords it does not know, are left to the compiler. ``false`` is finite here (the compiler prunes it).
    """
    nodes = _reachable(schema)
    if nodes is None:
        return None
    needs = {key: _needs(node, schema) for key, (_, node) in nodes.items()}
    needed_by: dict[int, list[int]] = {}
    for key, groups in needs.items():
        for child in (child for group in groups for child in group):
            needed_by.setdefault(child, []).append(key)
    finite: set[int] = set()
    todo = list(nodes)
    while todo:
        key = todo.pop()
        if key not in finite and all(any(child in finite for child in group) for group in needs[key]):
            finite.add(key)
            todo.extend(needed_by.get(key, ()))
    endless = [path for key, (path, _) in nodes.items() if key not in finite]
    return min(endless, key=lambda path: (len(path), path)) if endless else None


def _reachable(schema: Any) -> dict[int, tuple[Path, dict[str, Any]]] | None:
    """Every subschema that is an object, and every target of a reference, by identity; None beyond ``MAX_NODES``."""
    nodes: dict[int, tuple[Path, dict[str, Any]]] = {}
    todo: list[tuple[Path, Any]] = [((), schema)]
    while todo:
        path, node = todo.pop()
        if not isinstance(node, dict) or id(node) in nodes:
            continue
        if len(nodes) >= MAX_NODES:
            return None
        nodes[id(node)] = (path, node)
        reference = node.get("$ref")
        if isinstance(reference, str):
            todo.append((tuple(reference.removeprefix("#/").split("/")), resolve(schema, reference)))
        todo.extend(((*path, *step), child) for step, child in children(node))
    return nodes


def _needs(node: dict[str, Any], root: Any) -> list[list[int]]:
    """What must be finite for ``node`` to be: one part of each group, by identity. Parts that are no objects need nothing."""
    groups: list[list[Any]] = [[part] for part in _list(node, "allOf")]
    if isinstance(node.get("$ref"), str):
        groups.append([resolve(root, node["$ref"])])
    groups += [_list(node, key) for key in ("anyOf", "oneOf") if _list(node, key)]
    properties = node.get("properties")
    if node.get("type") == "object" and isinstance(properties, dict):
        groups += [[properties.get(name)] for name in _list(node, "required") if isinstance(name, str)]
    if node.get("type") == "array" and isinstance(node.get("minItems"), int) and node["minItems"] > 0:
        groups.append(_list(node, "prefixItems")[:1] or [node.get("items")])
    return [[id(part) for part in group] for group in groups if all(isinstance(part, dict) for part in group)]


def _list(node: dict[str, Any], key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []


def resolve(root: Any, reference: str) -> Any | None:
    """The part of ``root`` that a local reference ("#", "#/$defs/T") names; None if it is not local or names nothing."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    here = root
    for step in reference[2:].split("/") if reference != "#" else []:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and step in here:
            here = here[step]
        elif isinstance(here, list) and step.isdigit() and int(step) < len(here):
            here = here[int(step)]
        else:
            return None
    return here
