"""What sched raises. One tree; api's error table maps ``Refused`` to a status."""

from __future__ import annotations

from kvalet.sched.turns import Refusal


class SchedError(Exception):
    """Base of everything that sched raises on purpose."""


class Refused(SchedError):
    """A turn that was not accepted. Nothing of it is left anywhere: no row, no page, no stream.

    ``retry_after_s`` 0 = trying again does not help, or nobody can say when it would.
    """

    def __init__(self, refusal: Refusal, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.message = message
        self.retry_after_s = retry_after_s


class StreamBusy(SchedError):
    """Two tasks wait for the next item of one turn's stream. The first one keeps its place; nothing is lost."""
