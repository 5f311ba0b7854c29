"""The one error that requests are refused with, and the single table from error to status (OpenAI shape)."""

from __future__ import annotations


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
