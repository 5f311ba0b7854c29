"""All that can happen to the core. Frozen; every event carries the clock's time ``now`` in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from kvalet.runtime.plan import StepResult
from kvalet.sched.turns import EndReason, TurnId, TurnSpec
from kvalet.store.ids import ChunkKey
from kvalet.store.record import Record

TransferId = NewType("TransferId", int)
"""Names one transfer (one chunk moving one way between two tiers). Never reused."""


@dataclass(frozen=True, slots=True)
class Event:
    now: float


@dataclass(frozen=True, slots=True)
class Submit(Event):
    """Answered by exactly one ``Accept`` or ``Refuse``."""

    spec: TurnSpec


@dataclass(frozen=True, slots=True)
class Cancel(Event):
    """Ends the turn with ``reason`` at this event, in whatever state it is; unknown or ended turns are ignored."""

    turn: TurnId
    reason: EndReason = EndReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Blocked(Event):
    """The turn's channel is full: pause it."""

    turn: TurnId


@dataclass(frozen=True, slots=True)
class Unblocked(Event):
    turn: TurnId


@dataclass(frozen=True, slots=True)
class CloseSession(Event):
    """Ends the session's turns as cancelled and gives up its claim on its branches (shared pages stay cached)."""

    session: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ForkSession(Event):
    """``child`` starts with all branches of ``parent``. Both share pages, chunks and reads."""

    parent: str
    child: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class AskSession(Event):
    """Answered by exactly one ``TellSession`` with the same ``request``, once the session's records are read if the disk has
    some. ``pinned``: None only asks; else the session is pinned or unpinned first, and made if it is not there."""

    request: int
    session: str
    tenant: str = ""
    pinned: bool | None = None


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    result: StepResult


@dataclass(frozen=True, slots=True)
class DeviceFailed(Event):
    """The engine thread raised or the device is lost: every turn ends once with ``device_error``."""

    message: str


@dataclass(frozen=True, slots=True)
class CopyDone(Event):
    """A CopyOut or CopyIn has finished on the device."""

    transfer: TransferId
    copy_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyFailed(Event):
    """The bytes did not arrive; source and destination are untouched or garbage and no longer in use by the copy."""

    transfer: TransferId
    message: str


@dataclass(frozen=True, slots=True)
class ReadDone(Event):
    """The chunk's bytes lie verified in the slot. For a tail found by prefix, ``ids`` are the tail's own token ids and
    ``key`` its key."""

    transfer: TransferId
    key: ChunkKey
    ids: tuple[int, ...] = ()
    n_bytes: int = 0
    read_ms: float = 0.0
    verify_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadFailed(Event):
    """The slot holds nothing of use and is no longer used by the reader. ``reason``: the store's word for it."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class WriteDone(Event):
    """The chunk is durable (or was there already); the slot is no longer used by the writer."""

    transfer: TransferId
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WriteFailed(Event):
    """Not on disk; the slot's bytes are intact and no longer used by the writer."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class RecordDone(Event):
    """The record is durable."""

    transfer: TransferId
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RecordFailed(Event):
    """The record before it, if there was one, still stands."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class RecordsRead(Event):
    """The records of a session, most recent first, as far as they could be read; ``failures``: why the others could not."""

    transfer: TransferId
    records: tuple[Record, ...] = ()
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskGone(Event):
    """The store no longer holds these (evicted, quarantined, found missing)."""

    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed: posted when a ``WakeAt`` is due."""


@dataclass(frozen=True, slots=True)
class BeginDrain(Event):
    """Refuse new turns from now on, end running ones at ``deadline`` at the latest with ``shutdown``, and when
    none runs spill everything that is worth it down to the disk, in order of value."""

    deadline: float
