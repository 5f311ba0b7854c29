"""Transfers: one chunk on its way between tiers. Keyed by chunk, never by turn; turns only attach to restores."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvalet.runtime.plan import PageId, SlotId
from kvalet.sched.events import TransferId
from kvalet.sched.states import TransferCause, TransferState, next_transfer_state
from kvalet.store.ids import ChunkKey, TailRef

if TYPE_CHECKING:
    from kvalet.sched.chunks import Chunk
    from kvalet.sched.session import Turn


class TransferKind(StrEnum):
    RESTORE = "restore"
    """RAM or disk -> device, for its askers."""
    SPILL = "spill"
    """Device -> RAM; the pages leave when it is done, unless somebody stands on them again."""
    PERSIST = "persist"
    """Device -> staging slot -> disk; the pages stay. Ancestors of what is to be written, and the drain."""
    WRITE = "write"
    """RAM slot -> disk; the slot keeps its key."""


@dataclass(frozen=True, slots=True)
class TailQuestion:
    """What a restore of a stored tail of unknown ids asks for: ``ids`` are the asker's, from ``first_token`` on."""

    parent: ChunkKey | None
    secret: bytes
    ordinal: int
    first_token: int
    ids: tuple[int, ...]
    candidates: tuple[TailRef, ...]


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer; its id serves the read and the copy (or the copy and the write) one after the other.

    ``pages[i]`` is page ``first_page + i`` of the chunk; all are leased until the transfer ends (an abandoned restore gives
    back pages that no copy is writing at once). ``slot`` is held from RESERVED's end. ``staging``: the slot is a
    staging slot. ``askers``: turns that wait for a restore, in the order of attaching.
    """

    id: TransferId
    kind: TransferKind
    chunk: Chunk | None
    pages: list[PageId] = field(default_factory=list)
    first_page: int = 0
    state: TransferState = TransferState.RESERVED
    slot: SlotId | None = None
    staging: bool = False
    askers: list[Turn] = field(default_factory=list)
    question: TailQuestion | None = None
    from_disk: bool = False
    pinned: bool = False
    """PinDisk was sent for the chunk's key and UnpinDisk was not yet."""
    abandoned: bool = False
    """Its last asker left while a command was out: the answer only frees what it held."""
    arrived: bool = False
    """A restore's bytes are in its pages; they join the index when all before them are in."""
    n_pages: int = 0
    """Pages it was to move; ``pages`` is empty once the leases are given up."""
    frees: int = 0
    """A spill: pages that come free if nobody stands on them again until it is done."""
    klass: int = 1
    """A write: 1 an eviction, 2 a checkpoint."""
    started_at: float = 0.0
    n_bytes: int = 0
    read_ms: float = 0.0
    verify_ms: float = 0.0
    copy_ms: float = 0.0

    def __repr__(self) -> str:
        askers = [turn.id for turn in self.askers]
        return (
            f"Transfer({self.id}, {self.kind.value}, {self.state.value}, pages={self.pages}, slot={self.slot}, askers={askers})"
        )

    @property
    def live(self) -> bool:
        return self.state not in (TransferState.DONE, TransferState.FAILED)

    def take(self, cause: TransferCause) -> None:
        self.state = next_transfer_state(self.state, cause)
