"""All that the core may ask for. Frozen. The loop carries them out in order; completions come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from kvalet.runtime.plan import PageId, SlotId
from kvalet.sched.events import TransferId
from kvalet.sched.session_state import SessionState
from kvalet.sched.turns import Ended, Piece, Refusal, TurnId
from kvalet.store.ids import ChunkKey, ChunkMeta, TailRef
from kvalet.store.record import Record


@dataclass(frozen=True, slots=True)
class Command:
    """Base of all commands."""


@dataclass(frozen=True, slots=True)
class Accept(Command):
    turn: TurnId


@dataclass(frozen=True, slots=True)
class Refuse(Command):
    turn: TurnId
    refusal: Refusal
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Emit(Command):
    turn: TurnId
    piece: Piece


@dataclass(frozen=True, slots=True)
class End(Command):
    """The last command for this turn."""

    turn: TurnId
    ended: Ended


@dataclass(frozen=True, slots=True)
class CopyOut(Command):
    """Device -> slot: ``pages[i]`` goes to page ``first_page + i`` of the slot's payload. Answer: CopyDone or CopyFailed.

    ``n_tokens``: tokens that the pages hold; what the last page has room for beyond them is zeroed in the slot, so that no
    stale KV leaves the device memory (0: all pages are full)."""

    transfer: TransferId
    pages: tuple[PageId, ...]
    slot: SlotId
    first_page: int = 0
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CopyIn(Command):
    """Slot -> device: payload page ``slot_pages[i]`` goes to ``pages[i]``. Answer: CopyDone or CopyFailed."""

    transfer: TransferId
    slot: SlotId
    slot_pages: tuple[int, ...]
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class ReadChunk(Command):
    """Disk -> slot, verified against ``meta``. Answer: ReadDone or ReadFailed. ``session`` is for fair shares; a smaller
    ``klass`` goes first (0 waiting turn, 1 predicted return, 2 background)."""

    transfer: TransferId
    meta: ChunkMeta
    slot: SlotId
    session: str = ""
    klass: int = 0


@dataclass(frozen=True, slots=True)
class ReadTail(Command):
    """Disk -> slot: of ``candidates`` (at most 4, most recent first, all of one parent), the one that shares the longest prefix
    with ``ids``. ReadDone carries its own ids; ReadFailed("no_prefix") if none shares a token.

    ``secret``: that of TurnSpec; without it the tail's key cannot be checked and the read is refused ("key")."""

    transfer: TransferId
    parent: bytes
    ordinal: int
    first_token: int
    ids: tuple[int, ...]
    candidates: tuple[TailRef, ...]
    slot: SlotId
    session: str = ""
    klass: int = 0
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class WriteChunk(Command):
    """Slot -> disk, durable. Answer: WriteDone or WriteFailed. Parents are asked for before their children. ``klass`` 2: a
    checkpoint, which the store may refuse for its budget of the day ("budget"); 1: an eviction."""

    transfer: TransferId
    meta: ChunkMeta
    slot: SlotId
    klass: int = 2


@dataclass(frozen=True, slots=True)
class WriteRecord(Command):
    """After all that it names is durable. Replaces the record of the same branch. Answer: RecordDone or RecordFailed."""

    transfer: TransferId
    record: Record
    klass: int = 1


@dataclass(frozen=True, slots=True)
class ReadRecords(Command):
    """Answer: one RecordsRead. The numbers ``transfer`` .. ``transfer + len(branches) - 1`` are this command's."""

    transfer: TransferId
    tenant: str
    session: str
    branches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropRecord(Command):
    """Forget the record, after whatever is being written under its name. No answer."""

    tenant: str
    session: str
    branch: str


@dataclass(frozen=True, slots=True)
class TellSession(Command):
    """The answer to an ``AskSession``. ``state`` None: there is no room for one more session."""

    request: int
    state: SessionState | None


@dataclass(frozen=True, slots=True)
class CancelTransfer(Command):
    """A wish: what has not started fails with reason "cancelled"; what has started finishes. One answer comes either way."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class PinDisk(Command):
    """The store does not evict these until unpinned (counted: as many unpins as pins)."""

    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class UnpinDisk(Command):
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class TouchDisk(Command):
    """One recency value for the whole chain, parents first."""

    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class WakeAt(Command):
    """Post a ``Tick`` at this time of the scheduler's clock. A later WakeAt does not cancel an earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class Drained(Command):
    """After BeginDrain: no turn runs and nothing is left to write. ``left_behind`` counts chunks that did not reach disk,
    ``records_left`` branches of named sessions without a record that says all of them. ``lost_pages``,
    ``lost_chunks``: what went with a lost device (``Counters.lost_device_pages``)."""

    left_behind: int
    records_left: int = 0
    lost_pages: int = 0
    lost_chunks: int = 0
