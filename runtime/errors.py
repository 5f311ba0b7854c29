"""Errors of runtime that other folders tell apart. Everything else that is raised is a defect or a lost device."""

from __future__ import annotations


class RuntimeFault(Exception):
    """Base of runtime's own errors; the text is one clear sentence for a person."""


class ModelError(RuntimeFault):
    """The model file cannot be used: missing, short, damaged, or of a kind that is not supported (named in the text)."""


class DeviceLostText(str):
    """Why a copy failed, where the reason is that the device is lost: no later copy or step can succeed either."""

    __slots__ = ()


class EngineError(RuntimeFault):
    """A step plan that contradicts what the engine holds: a defect of its maker, never of a request."""
