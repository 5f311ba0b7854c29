"""Ranges of sampling parameters that come from Python programs (HTTP bodies are checked by their schemas). Pure."""

from __future__ import annotations

import math

from kvalet.api.errors import ApiError
from kvalet.runtime.plan import SamplingParams

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
    "min_tokens": (0, 1 << 31),
    "max_tokens": (1, 1 << 31),
}
ABOVE_ZERO = ("top_p", "repetition_penalty")


def check_sampling(params: SamplingParams) -> SamplingParams:
    """``params`` unchanged. ApiError 400 names the field that is out of range or not a number."""
    for name, (low, high) in RANGES.items():
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ApiError(f"'{name}' must be a number.", param=name, code="invalid_value")
        if not low <= value <= high or (name in ABOVE_ZERO and value == 0):
            raise ApiError(f"'{name}' is {value}: it must be between {low} and {high}.", param=name, code="invalid_value")
    if isinstance(params.stop, str) or not all(isinstance(text, str) and text for text in params.stop):
        raise ApiError("'stop' must be a tuple of strings that are not empty.", param="stop", code="invalid_value")
    return params
