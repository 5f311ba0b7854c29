"""Sizes and ages as people write them. Pure."""

from __future__ import annotations

import re
from typing import Any

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SIZE = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)
AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
AGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", re.IGNORECASE)


def parse_size(value: Any) -> Any:
    """ "2GiB", "500MB", "1.5 GB" or a number of bytes -> bytes. ValueError for other text; other types pass through."""
    if not isinstance(value, str):
        return value
    match = SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is no size: write 2GiB, 500MB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2].lower()])


def parse_age(text: str) -> float:
    """ "30d", "12h", "90m", "45s", "2w" -> seconds. ValueError for anything else."""
    match = AGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no age: write 30d, 12h, 90m or 45s")
    return float(match[1]) * AGE_UNITS[match[2].lower()]


def size_text(n_bytes: int) -> str:
    """In powers of ten, as disks are sold: "5.9 MB"."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
