"""The one error that requests are refused with, and the single table from error to status (OpenAI shape)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvalet.sched.turns import EndReason

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
"""Clients give up at once on longer waits, so ``Retry-After`` stays between these two."""


class ApiError(Exception):
    """A request that cannot be served as asked. Never leaves anything behind.

    ``message`` says what is wrong and what to do; ``param`` is the path of the bad field ("messages[2].content"), None where
    no field is to blame; ``code`` a short stable word; ``status`` the HTTP status. ``retry_after_s`` 0 = no such header.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
"""``error.type`` by status where it is not the general word of its class."""


@dataclass(frozen=True, slots=True)
class EndError:
    """What a client is told when an accepted turn ended without an answer."""

    status: int
    code: str
    sentence: str


END_ERRORS = {
    EndReason.CANCELLED: EndError(499, "cancelled", "The request was cancelled."),
    EndReason.WRITE_TIMEOUT: EndError(499, "write_timeout", "The client took nothing for longer than the write timeout."),
    EndReason.GRAMMAR: EndError(500, "grammar_dead_end", "The constraint on the output allowed no further token."),
    EndReason.DEVICE_ERROR: EndError(503, "device_error", "The device failed while this request ran."),
    EndReason.SHUTDOWN: EndError(503, "shutdown", "The server is shutting down; send the request again."),
    EndReason.INTERNAL: EndError(500, "internal_error", "The server failed to finish this request."),
}
"""All end reasons but STOP and LENGTH, which are answers."""


def error_type(status: int) -> str:
    """``error.type`` of a status."""
    return ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object: message, type, param and code are always present."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def retry_after(seconds: float) -> str:
    """Value of a ``Retry-After`` header: whole seconds, within the bounds above."""
    return str(math.ceil(min(max(seconds, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)))


def ended_badly(reason: EndReason, message: str = "") -> ApiError:
    """The error for a turn whose end is no answer. ``message`` (the engine's own words) replaces the general sentence."""
    entry = END_ERRORS.get(reason, END_ERRORS[EndReason.INTERNAL])
    return ApiError(
        message or entry.sentence,
        code=entry.code,
        status=entry.status,
        retry_after_s=5.0 if entry.status == 503 else 0.0,
    )
