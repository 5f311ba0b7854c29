"""What the HTTP surface needs from the engine. ``api.engine.Engine`` is the shipped one; tests script another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from kvalet.api.requests import ChatRequest, CompletionRequest, Delta, TurnEnd


class ModelPort(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def created(self) -> int:
        """Unix seconds."""
        ...


class TurnPort(Protocol):
    """``async for`` gives deltas and last, exactly once, a ``TurnEnd``."""

    @property
    def id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Delta | TurnEnd]: ...

    def cancel(self) -> None:
        """Synchronous, idempotent, harmless after the end. Who goes on reading gets the ``TurnEnd``."""
        ...


class TurnEnginePort(Protocol):
    """``start_*`` raise ApiError for whatever is refused and leave nothing behind, also when cancelled."""

    @property
    def model(self) -> ModelPort: ...

    async def start_chat(self, request: ChatRequest) -> TurnPort: ...

    async def start_completion(self, request: CompletionRequest) -> TurnPort: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def ready(self) -> tuple[bool, str]: ...

    def statistics(self) -> Any: ...

    async def drain(self, seconds: float) -> Any: ...

    def banner(self) -> list[str]: ...


class ServedEnginePort(TurnEnginePort, Protocol):
    """What ``serve`` needs beyond the routes."""

    on_device_lost: Callable[[str], None] | None
    """Called once, on the loop's thread, when nothing can be computed any more."""
