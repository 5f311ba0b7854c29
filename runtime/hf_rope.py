"""The rotary embedding in a config.json: ``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvalet.runtime.rope_spec import KINDS, RopeSpec, yarn_attention_factor

if TYPE_CHECKING:
    from kvalet.runtime.hf_config import ConfigReader


def read_rope(read: ConfigReader, default_base: float, trained: int) -> RopeSpec:
    """``trained``: the model's ``max_position_embeddings``. ModelError names the field and the value."""
    name = "rope_parameters" if read.fields.get("rope_parameters") else "rope_scaling"
    found = read.fields.get(name) or {}
    if not isinstance(found, dict):
        read.refuse(name, found, "which is no object")
    if any(isinstance(value, dict) for value in found.values()):
        read.refuse(name, found, "one per layer type, which is not supported")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in KINDS:
        read.refuse(f"{name}.rope_type", kind, f"supported are {', '.join(KINDS)}")
    partial = found.get("partial_rotary_factor", read.fields.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        read.refuse("partial_rotary_factor", partial)
    numbers = type(read)(found, f"{read.where}: {name}")
    base = numbers.number("rope_theta", read.number("rope_theta", default_base))
    rope = RopeSpec(base) if kind == "default" else _scaled(read, numbers, kind, base, trained)
    fault = rope.fault()
    if fault:
        read.refuse(name, found, f"that is {fault}, which is not supported")
    return rope


def _scaled(read: ConfigReader, numbers: ConfigReader, kind: str, base: float, trained: int) -> RopeSpec:
    original = _original_context(read, numbers, kind, trained)
    factor = numbers.number("factor", trained / original if kind == "yarn" else 0.0)
    if kind == "llama3":
        low, high = numbers.number("low_freq_factor", 0.0), numbers.number("high_freq_factor", 0.0)
        return RopeSpec(base, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind != "yarn":
        return RopeSpec(base, kind, factor, original)
    return RopeSpec(
        base,
        kind,
        factor,
        original,
        beta_fast=numbers.number("beta_fast", 0.0) or 32.0,
        beta_slow=numbers.number("beta_slow", 0.0) or 1.0,
        truncate=numbers.flag("truncate", True),
        attention_factor=_attention_factor(numbers, factor),
    )


def _original_context(read: ConfigReader, numbers: ConfigReader, kind: str, trained: int) -> int:
    """Tokens of the training before stretching. Dynamic scaling stretches from the model's own context."""
    if kind in ("linear", "dynamic"):
        return trained
    name = "original_max_position_embeddings"
    holder = read if read.fields.get(name) is not None else numbers
    return holder.integer(name, 1 << 24, trained)


def _attention_factor(numbers: ConfigReader, factor: float) -> float:
    given: Any = numbers.fields.get("attention_factor")
    if given is not None:
        return numbers.number("attention_factor", 1.0)
    mscale, mscale_all = numbers.number("mscale", 0.0), numbers.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all)
    return yarn_attention_factor(factor)
