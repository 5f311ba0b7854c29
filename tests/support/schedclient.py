"""Sizes of a tiny machine, and what the client of one turn has seen of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvalet.sched.config import SchedConfig
from kvalet.sched.turns import Ended, EndReason, Refusal, TurnSpec

IDENTITY = b"i" * 32
SECRET = b"s" * 32
CERTAIN = (EndReason.STOP, EndReason.LENGTH, EndReason.GRAMMAR)


def config(**changes: Any) -> SchedConfig:
    """A tiny machine: pages of 4 tokens, chunks of 8."""
    base = SchedConfig(
        page_tokens=4, chunk_tokens=8, n_pages=25, context_tokens=400, identity=IDENTITY, ram_slots=4, staging_slots=2,
        max_rows=4, step_tokens=16, idle_step_tokens=24, deterministic_piece=8,
    )  # fmt: skip
    return replace(base, **changes)


class NoDisk:
    """No disk tier."""

    def has(self, key: bytes) -> bool:
        return False

    def tails(self, parent: bytes) -> tuple[()]:
        return ()

    def accepts_writes(self) -> bool:
        return False

    def branches(self, tenant: str, session: str) -> tuple[()]:
        return ()


@dataclass
class Client:
    """What the client of one turn has seen."""

    spec: TurnSpec
    ids: list[int] = field(default_factory=list)
    text: str = ""
    accepted: bool = False
    refusal: Refusal | None = None
    ended: Ended | None = None
    blocked: bool = False
