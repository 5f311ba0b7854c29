"""kvalet: an async agent-serving runtime for many LLM agents on one device.

The names below are the Python API; they are imported when first used, so that ``import kvalet`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvalet.api.build import StartError as StartError
    from kvalet.api.config import EngineConfig as EngineConfig
    from kvalet.api.engine import Engine as Engine
    from kvalet.api.engine import EngineStatistics as EngineStatistics
    from kvalet.api.engine import ModelInfo as ModelInfo
    from kvalet.api.errors import ApiError as ApiError
    from kvalet.api.requests import ChatRequest as ChatRequest
    from kvalet.api.requests import CompletionRequest as CompletionRequest
    from kvalet.api.requests import TextDelta as TextDelta
    from kvalet.api.requests import ToolCall as ToolCall
    from kvalet.api.requests import ToolCallDelta as ToolCallDelta
    from kvalet.api.requests import TurnEnd as TurnEnd
    from kvalet.api.session import Session as Session
    from kvalet.api.session import SessionTurn as SessionTurn
    from kvalet.api.turn import Turn as Turn
    from kvalet.runtime.plan import SamplingParams as SamplingParams
    from kvalet.sched.session_state import SessionState as SessionState
    from kvalet.sched.turns import EndReason as EndReason
    from kvalet.sched.turns import TurnReport as TurnReport

_HOMES = {
    "ApiError": "kvalet.api.errors",
    "ChatRequest": "kvalet.api.requests",
    "CompletionRequest": "kvalet.api.requests",
    "EndReason": "kvalet.sched.turns",
    "Engine": "kvalet.api.engine",
    "EngineConfig": "kvalet.api.config",
    "EngineStatistics": "kvalet.api.engine",
    "ModelInfo": "kvalet.api.engine",
    "SamplingParams": "kvalet.runtime.plan",
    "Session": "kvalet.api.session",
    "SessionState": "kvalet.sched.session_state",
    "SessionTurn": "kvalet.api.session",
    "StartError": "kvalet.api.build",
    "TextDelta": "kvalet.api.requests",
    "ToolCall": "kvalet.api.requests",
    "ToolCallDelta": "kvalet.api.requests",
    "Turn": "kvalet.api.turn",
    "TurnEnd": "kvalet.api.requests",
    "TurnReport": "kvalet.sched.turns",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvalet' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
