"""What can be said about one session: a frozen picture of it, for whoever asks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SessionState:
    """``known`` False: neither the server nor its disk tier has the session; everything else is 0 then.

    ``tokens``: tokens of the most recent branch that have KV. ``saved_tokens``: how many of them are durable on disk with a
    record beside them, so that a crash does not lose them. ``refused``: why the disk last refused to take more ("" = it did
    not). ``turns``: live turns. ``pages``: the whole pages of that branch that are on the device now, in order from token 0.
    """

    known: bool = False
    pinned: bool = False
    branches: int = 0
    turns: int = 0
    tokens: int = 0
    saved_tokens: int = 0
    refused: str = ""
    pages: tuple[int, ...] = field(default=(), compare=False)
