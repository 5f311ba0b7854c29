"""Turns, the branches they extend, and the sessions that name them. Lengths are named by where the tokens are."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvalet.runtime.plan import PageId, RowId, SamplingParams
from kvalet.sched.prefix import Node, common_prefix
from kvalet.sched.states import TurnState
from kvalet.sched.transfer_record import Transfer
from kvalet.sched.turns import TurnId, TurnReport, TurnSpec
from kvalet.store.ids import ChunkKey

if TYPE_CHECKING:
    from kvalet.sched.events import TransferId
    from kvalet.sched.lines import Line

MAX_BRANCHES = 16
"""Branches kept per session; the least recently used is forgotten (its KV stays cached until it is evicted)."""


def space_of(secret: bytes) -> bytes:
    """8 bytes that tell a tenant's spaces (its salts) apart without telling the secret: what a record on disk may hold."""
    return hashlib.blake2b(b"space", key=secret, digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of history as its last turn left it.

    ``ids``: prompt and reusable answer. ``boundary``: where that turn's prompt ended. ``kv_len``: how much of it had KV.
    ``decoded``: position ranges [start, end) that decode steps computed, in order; an empty range marks a place where a
    prefill piece ended all the same (deterministic mode cuts there again). ``id``: 16 hex, the same as the branch grows
    ("" where nothing below names it). ``parent``: the branch that it left at token ``fork_at``. ``space``: ``space_of`` the
    secret; a branch that a record brought back has no secret and is known by its space.
    """

    ids: tuple[int, ...]
    boundary: int
    kv_len: int
    secret: bytes
    decoded: tuple[tuple[int, int], ...] = ()
    id: str = ""
    parent: str = ""
    fork_at: int = 0
    space: bytes = b""

    def __post_init__(self) -> None:
        if not self.space:
            object.__setattr__(self, "space", space_of(self.secret))


@dataclass(slots=True, eq=False)
class Session:
    """``branches``: least recently used first. ``turns``: live turns. ``name`` "" = recognised by its prefix only.

    ``lines``: what the disk holds of each branch, by branch id. ``pinned``: never lost, still spillable. ``looked``: the disk
    was asked for its records. ``loading``: the read of these; its turns wait in the queue until it ends, or ``load_until``.
    ``closed``: nothing may be written for it any more.
    """

    tenant: str
    name: str
    branches: list[Branch] = field(default_factory=list)
    turns: set[TurnId] = field(default_factory=set)
    lines: dict[str, Line] = field(default_factory=dict)
    pinned: bool = False
    looked: bool = False
    loading: TransferId | None = None
    load_until: float = 0.0
    closed: bool = False

    def nearest(self, ids: tuple[int, ...], secret: bytes) -> tuple[Branch, int] | None:
        """The branch that shares most ids with ``ids``, and how many; the most recent of equals."""
        best: tuple[Branch, int] | None = None
        space = space_of(secret)
        for branch in reversed(self.branches):
            if branch.space == space:
                shared = common_prefix(branch.ids, ids)
                if best is None or shared > best[1]:
                    best = (branch, shared)
        return best

    def extend(self, old: Branch | None, new: Branch) -> None:
        """``new`` takes the place of ``old`` (if it still stands there), or of a branch with its id, and is the most recent."""
        if old in self.branches:
            self.branches.remove(old)
        if new.id:
            self.branches = [branch for branch in self.branches if branch.id != new.id]
        self.branches.append(new)
        del self.branches[:-MAX_BRANCHES]


@dataclass(slots=True, eq=False)
class Turn:
    """One accepted request until its end.

    ``ids``: the prompt and the accepted tokens. ``kv_len``: positions whose KV completed steps wrote. ``fed``: positions in
    completed or planned steps. ``pending``: planned steps whose sampled token is not known yet. ``feed_end``: known tokens
    to feed at this admission before it decodes again. ``table``: pages by position; ``sent``: how many of them the engine
    knows. ``spare``: owned pages not in the table yet. ``cursor``: the deepest index node it stands on (pinned; not None
    exactly while admitted). ``source``: a partial page to copy before the first step (pinned), of which ``source_tokens``
    count.
    """

    spec: TurnSpec
    session: Session
    params: SamplingParams
    submitted_at: float
    ids: list[int]
    state: TurnState = TurnState.QUEUED
    branch: Branch | None = None
    """The line of history nearest to the prompt; ``replaces``: the same, if the prompt goes on from its boundary.
    ``recalled`` False: the session's records are still being read."""
    recalled: bool = True
    replaces: Branch | None = None
    decoded: list[tuple[int, int]] = field(default_factory=list)
    calls: tuple[int, ...] = ()
    """Deterministic mode: for each position of ``ids`` a code of the call that computes it (see ``calls.py``)."""
    ids_seen: tuple[int, ...] = ()
    keys: list[ChunkKey] = field(default_factory=list)
    """Keys of the whole chunks of ``ids``, as far as they were asked for."""
    # progress
    kv_len: int = 0
    fed: int = 0
    pending: int = 0
    feed_end: int = 0
    kv_high: int = 0
    # claims
    row: RowId | None = None
    opened: bool = False
    table: list[PageId] = field(default_factory=list)
    sent: int = 0
    spare: deque[PageId] = field(default_factory=deque)
    cursor: Node | None = None
    source: Node | None = None
    source_tokens: int = 0
    restores: list[Transfer] = field(default_factory=list)
    duplicates: int = 0
    """Pages of the table that are private although the index has their ids: given back by a readmission."""
    # waiting
    blocked: bool = False
    want_node: Node | None = None
    passed: int = 0
    need: int = 0
    """Free pages that its last look at the tiers asked for (0: not looked yet); ``need_own``: idle pages it would stand on."""
    need_own: int = 0
    looked_at: int = 0
    """Number of the event at that look."""
    preemptions: int = 0
    older_ended: bool = False
    restore_until: float = 0.0
    # record
    report: TurnReport = field(default_factory=TurnReport)
    lost: dict[str, int] = field(default_factory=dict)
    admitted_at: float = 0.0
    restore_from: float = 0.0
    prefill_from: float = 0.0
    first_token_at: float = 0.0
    resident_base: int = 0
    """Whole-page tokens found on the device at this admission; ``tiers``: (end, from disk) of what was restored after them."""
    tiers: list[tuple[int, bool]] = field(default_factory=list)
    lookup_ms: float = 0.0
    read_ms: float = 0.0
    verify_ms: float = 0.0
    copy_ms: float = 0.0
    bytes_from_ram: int = 0
    bytes_from_disk: int = 0
    restore_ms: float = 0.0
    prefilled_once: bool = False

    def __repr__(self) -> str:
        return (
            f"Turn({self.id}, {self.state.value}, row={self.row}, prompt={self.n_prompt}, ids={len(self.ids)}, "
            f"kv={self.kv_len}, fed={self.fed}, pending={self.pending}, table={self.table}, spare={list(self.spare)}, "
            f"restores={len(self.restores)})"
        )

    def known_ids(self) -> tuple[int, ...]:
        """``ids`` as a tuple; copied only when tokens came in since the last call."""
        if len(self.ids_seen) != len(self.ids):
            self.ids_seen = tuple(self.ids)
        return self.ids_seen

    @property
    def id(self) -> TurnId:
        return self.spec.turn

    @property
    def order(self) -> tuple[int, int]:
        """Smaller goes first: higher class, then older."""
        return (-self.spec.priority, self.spec.turn)

    @property
    def n_prompt(self) -> int:
        return len(self.spec.prompt)

    @property
    def max_tokens(self) -> int:
        """As asked for, or what context and pool allow."""
        return self.params.max_tokens

    @property
    def accepted(self) -> int:
        return len(self.ids) - self.n_prompt

    @property
    def ahead(self) -> int:
        """Tokens that can be fed now: known ones, and with ``lag`` 1 the one still on the device."""
        if self.accepted + self.pending >= self.max_tokens:
            return 0
        return len(self.ids) + self.pending - self.fed

    @property
    def feeds_until(self) -> int:
        """No position at or beyond this is ever fed: the last accepted token never is."""
        return self.n_prompt + self.max_tokens - 1

    @property
    def running(self) -> bool:
        return self.state in (TurnState.PREFILLING, TurnState.DECODING)

    @property
    def admitted(self) -> bool:
        return self.cursor is not None

    @property
    def n_pages(self) -> int:
        return len(self.table) + len(self.spare)
