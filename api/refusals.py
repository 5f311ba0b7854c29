"""The scheduler's refusals in the words of the API: one table."""

from __future__ import annotations

from kvalet.api.errors import ApiError
from kvalet.sched.errors import Refused
from kvalet.sched.turns import Refusal

STATUS = {
    Refusal.QUEUE_FULL: (429, "queue_full", 1.0),
    Refusal.SESSIONS_FULL: (429, "sessions_full", 5.0),
    Refusal.NEVER_FITS: (400, "context_length_exceeded", 0.0),
    Refusal.SESSION_CLOSED: (400, "session_closed", 0.0),
    Refusal.CLOSING: (503, "closing", 5.0),
    Refusal.DEVICE_LOST: (503, "device_lost", 5.0),
}
"""(status, code, seconds after which trying again may help where the scheduler gives none)."""


def refusal_error(refused: Refused, n_prompt: int, limit_tokens: int, param: str) -> ApiError:
    """A prompt that can never fit gets the sentence by which agents know that they must shorten their history.

    ``limit_tokens``: what a prompt and its answer can have at most here, the pool's size considered. ``param``: the prompt's
    field.
    """
    status, code, retry_after_s = STATUS[refused.refusal]
    if refused.refusal is not Refusal.NEVER_FITS:
        return ApiError(refused.message, status=status, code=code, retry_after_s=refused.retry_after_s or retry_after_s)
    message = (
        f"This model's maximum context length is {limit_tokens} tokens. However, you requested {n_prompt} tokens in the"
        f" {param}: {refused.message}. Please reduce the length of the {param}."
    )
    return ApiError(message, param=param, status=status, code=code)
