"""What the routes do: ASGI endpoints over one engine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from kvalet.api.answer import Shape, answer_stream, answer_whole, send_json
from kvalet.api.body import BodyBudget, off_loop, parse_object, read_body
from kvalet.api.chat import ChatShape, Frame
from kvalet.api.completions import CompletionShape
from kvalet.api.config import ServerConfig
from kvalet.api.errors import ApiError
from kvalet.api.exchange import Exchange
from kvalet.api.identify import session_hint
from kvalet.api.ports import ModelPort, TurnEnginePort, TurnPort
from kvalet.api.requests import ChatRequest, CompletionRequest
from kvalet.api.schemas import Asked, Caller, parse_chat, parse_completion
from kvalet.api.sse import SseWriter
from starlette.types import Receive, Scope, Send

REPORT_HEADER = "x-kvalet-report"
"""Set to 1 it asks for the KV record in the answer."""


class Turns:
    """Base of the endpoints that start a turn."""

    def __init__(self, engine: TurnEnginePort, config: ServerConfig, budget: BodyBudget) -> None:
        self._engine = engine
        self._config = config
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        headers: Mapping[str, str] = scope["state"]["headers"]
        asked = await self._read(receive, headers, exchange.tenant)
        exchange.session, exchange.stream = asked.request.session, asked.stream
        check_model(asked.model, self._engine.model)

        def form(turn_id: str) -> Shape:
            return self.shape(self._frame(turn_id, asked, headers))

        if asked.stream:
            writer = SseWriter(send, self._config.ping_s)
            await answer_stream(receive, writer, lambda: self.start(asked), form, exchange)
        else:
            await answer_whole(receive, send, lambda: self.start(asked), form, exchange)

    def parse(self, body: Mapping[str, Any], caller: Caller, vocab_size: int) -> Asked:
        raise NotImplementedError

    def shape(self, frame: Frame) -> Shape:
        raise NotImplementedError

    def start(self, asked: Asked) -> Awaitable[TurnPort]:
        raise NotImplementedError

    async def _read(self, receive: Receive, headers: Mapping[str, str], tenant: str) -> Asked:
        """The bytes of the body are gone when this returns."""
        config = self._config
        with self._budget.holding() as take:
            data = await read_body(receive, headers, config.max_body_bytes, config.body_timeout_s, take)
            return await off_loop(data, lambda data: self._parse_bytes(data, headers, tenant))

    def _parse_bytes(self, data: bytes, headers: Mapping[str, str], tenant: str) -> Asked:
        body = parse_object(data, self._config.max_nesting)
        return self.parse(body, Caller(session_hint(headers, body), tenant), self._engine.model.vocab_size)

    def _frame(self, turn_id: str, asked: Asked, headers: Mapping[str, str]) -> Frame:
        return Frame(
            id=turn_id,
            created=int(time.time()),
            model=self._engine.model.id,
            include_usage=asked.include_usage,
            return_token_ids=asked.return_token_ids,
            with_record=headers.get(REPORT_HEADER, "").strip() == "1",
            top_logprobs=asked.top_logprobs,
        )


class ChatCompletions(Turns):
    """POST /v1/chat/completions."""

    def parse(self, body: Mapping[str, Any], caller: Caller, vocab_size: int) -> Asked:
        return parse_chat(body, caller, vocab_size)

    def shape(self, frame: Frame) -> Shape:
        return ChatShape(frame, self._engine.token_bytes)

    def start(self, asked: Asked) -> Awaitable[TurnPort]:
        return self._engine.start_chat(cast(ChatRequest, asked.request))


class Completions(Turns):
    """POST /v1/completions."""

    def parse(self, body: Mapping[str, Any], caller: Caller, vocab_size: int) -> Asked:
        return parse_completion(body, caller, vocab_size)

    def shape(self, frame: Frame) -> Shape:
        return CompletionShape(frame, self._engine.token_bytes)

    def start(self, asked: Asked) -> Awaitable[TurnPort]:
        return self._engine.start_completion(cast(CompletionRequest, asked.request))


class Models:
    """GET /v1/models and GET /v1/models/{id}: there is one."""

    def __init__(self, engine: TurnEnginePort) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._engine.model
        wanted = scope.get("path_params", {}).get("model_id")
        if wanted is None:
            await send_json(send, 200, {"object": "list", "data": [model_object(model)]})
            return
        check_model(wanted, model)
        await send_json(send, 200, model_object(model))


class Health:
    """GET /health: the process answers. Says nothing about the device: routers keep a server for it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"status": "ok"})


class Ready:
    """GET /ready: 200 where a request would be taken, else 503 with the reason."""

    def __init__(self, state: Callable[[], tuple[bool, str]]) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ready, reason = self._state()
        if not ready:
            raise ApiError(f"Not ready: {reason}.", status=503, code="not_ready", retry_after_s=1.0)
        await send_json(send, 200, {"status": "ready"})


class Metrics:
    """GET /metrics: Prometheus text."""

    def __init__(self, render: Callable[[], tuple[str, bytes]]) -> None:
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content_type, text = self._render()
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text, "more_body": False})


def check_model(wanted: str, model: ModelPort) -> None:
    """ApiError 404 for any model but the one that is served."""
    if wanted != model.id:
        message = f"The model {wanted[:200]!r} does not exist here: this server has {model.id!r}."
        raise ApiError(message, param="model", status=404, code="model_not_found")


def model_object(model: ModelPort) -> dict[str, Any]:
    """OpenAI's model object and, as other servers have it, the context length."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "kvalet",
        "max_model_len": model.context_tokens,
    }
