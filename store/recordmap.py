"""Reading a JSON map that somebody else may have written: each field by name and type, and what is left over is kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson


class Taker:
    """Takes fields of known types out of a map. ``wrong``: the first one missing or of another type; ``left``: the rest."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.left = dict(fields)
        self.wrong = ""

    def blame(self, name: str) -> None:
        self.wrong = self.wrong or name

    def text(self, name: str) -> str:
        value = self.left.pop(name, None)
        if isinstance(value, str):
            return value
        self.blame(name)
        return ""

    def number(self, name: str) -> int:
        value = self.left.pop(name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self.blame(name)
        return 0

    def items(self, name: str) -> list[Any]:
        value = self.left.pop(name, None)
        if isinstance(value, list):
            return value
        self.blame(name)
        return []

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            self.blame(name)
            return ()
        return tuple(values)

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        values = self.items(name)
        if not all(isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in values):
            self.blame(name)
            return ()
        return tuple((first, last) for first, last in values)

    def blob(self, name: str) -> bytes:
        return (self.hexes(name, [self.text(name)], None) or [b""])[0]

    def hexes(self, name: str, values: Sequence[Any], n_bytes: int | None) -> list[bytes]:
        try:
            found = [bytes.fromhex(value) for value in values]
        except (TypeError, ValueError):
            self.blame(name)
            return []
        if any(n_bytes is not None and len(value) != n_bytes for value in found):
            self.blame(name)
        return found


def rest_of(data: bytes) -> dict[str, Any]:
    """The map that ``rest_bytes`` made."""
    return dict(orjson.loads(data)) if data else {}


def rest_bytes(fields: Mapping[str, Any]) -> bytes:
    """JSON in a form that two equal maps share; b"" for none. Bytes, so that the value that holds it can be frozen."""
    return orjson.dumps(dict(fields), option=orjson.OPT_SORT_KEYS) if fields else b""
