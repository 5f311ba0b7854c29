"""The whole HTTP surface on one screen."""

from __future__ import annotations

from collections.abc import Callable

from kvalet.api.body import BodyBudget
from kvalet.api.config import ServerConfig
from kvalet.api.endpoints import ChatCompletions, Completions, Health, Metrics, Models, Ready
from kvalet.api.gate import Gate
from kvalet.api.metrics import ServerMetrics
from kvalet.api.ports import TurnEnginePort
from starlette.routing import Route, Router


def build_app(engine: TurnEnginePort, config: ServerConfig) -> Gate:
    """The ASGI application over a running engine. It starts nothing and owns nothing; ``draining`` closes it to new work."""
    metrics = ServerMetrics(engine)
    budget = BodyBudget(config.max_bodies_bytes)
    gate: Gate

    def readiness() -> tuple[bool, str]:
        return (False, "shutting down") if gate.draining else engine.ready()

    routes = [
        post("/v1/chat/completions", ChatCompletions(engine, config, budget)),
        post("/v1/completions", Completions(engine, config, budget)),
        get("/v1/models", Models(engine)),
        get("/v1/models/{model_id:path}", Models(engine)),
        get("/health", Health()),
        get("/ready", Ready(readiness)),
        get("/metrics", Metrics(metrics.render)),
    ]
    gate = Gate(Router(routes, redirect_slashes=False), config, metrics.observe)
    return gate


def get(path: str, endpoint: Callable[..., object]) -> Route:
    return Route(path, endpoint, methods=["GET"])


def post(path: str, endpoint: Callable[..., object]) -> Route:
    return Route(path, endpoint, methods=["POST"])
