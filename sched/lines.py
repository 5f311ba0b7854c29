"""Which of the sessions' branches the disk knows, and which records it is still owed.

A *line* stands beside each branch of a named session (of every session where idle ones are checkpointed). It names the pieces
of the branch's chain, whole chunks and tail, and remembers what the last durable record of the branch says. The books here
find the lines of a piece that has become durable, and hold those whose turn it is. Functions over them: ``records.py``,
``checkpoint.py``.

Bounds: ``max_sessions`` x ``MAX_BRANCHES`` lines; the queues hold each line once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvalet.sched.events import TransferId
from kvalet.sched.session import Branch, Session
from kvalet.store.ids import ChunkKey
from kvalet.store.record import Record

if TYPE_CHECKING:
    from kvalet.sched.prefix import Node


@dataclass(frozen=True, slots=True)
class Saved:
    """What a record says: that the first ``n_tokens`` of ``branch`` are durable, and whether they are pinned."""

    branch: Branch
    n_tokens: int
    pinned: bool


@dataclass(slots=True, eq=False)
class Line:
    """``keys``: of the whole chunks of the branch up to its kv_len; ``tail``: of what follows them, if anything does.

    ``node``: where its last page lay on the device when its last turn ended. ``saved``: what its durable record says;
    ``sending``: what the record under way says. ``held``: keys pinned in the store until the record is durable.
    ``told``: what else the record read from disk says (transcript, ttl, keys of later versions): kept when it is replaced.
    ``failures``: writes and records that failed in a row since its last turn; ``refused``: the last one's reason.
    """

    session: Session
    branch: Branch
    keys: tuple[ChunkKey, ...]
    tail: ChunkKey | None
    node: Node | None = None
    saved: Saved | None = None
    sending: Saved | None = None
    held: tuple[ChunkKey, ...] = ()
    told: Record | None = None
    failures: int = 0
    refused: str = ""
    used: float = 0.0

    def __repr__(self) -> str:
        saved = f"{self.saved.n_tokens} saved" if self.saved else "not saved"
        return f"Line({self.session.name!r}, {self.branch.id}, {self.branch.kv_len} tokens, {saved}, refused={self.refused!r})"

    @property
    def pieces(self) -> tuple[ChunkKey, ...]:
        return self.keys if self.tail is None else (*self.keys, self.tail)

    @property
    def last(self) -> ChunkKey:
        """The piece that is durable last."""
        return self.keys[-1] if self.tail is None else self.tail

    @property
    def saved_tokens(self) -> int:
        """Tokens of the branch as it is now that a durable record vouches for."""
        return min(self.saved.n_tokens, self.branch.kv_len) if self.saved else 0

    @property
    def complete(self) -> bool:
        """The record on disk says all that is to be said."""
        return self.says(self.branch.kv_len)

    def says(self, n_tokens: int) -> bool:
        """The record on disk says that ``n_tokens`` of the branch as it is now are durable, and whether they are pinned."""
        saved = self.saved
        same = saved is not None and saved.branch is self.branch and saved.n_tokens == n_tokens
        return same and saved is not None and saved.pinned == self.session.pinned


@dataclass(slots=True)
class RecordJob:
    """A record under way. ``keys``: pinned in the store until the answer."""

    line: Line
    saved: Saved
    keys: tuple[ChunkKey, ...]


@dataclass(slots=True)
class Ask:
    """A question about a session, or a wish to pin it, that waits for its records. ``pinned`` None: only a question."""

    request: int
    pinned: bool | None


@dataclass(slots=True)
class Load:
    """A read of a session's records: which sessions wait for it (its own first, then forks of it), and what else does."""

    sessions: list[Session]
    asks: list[Ask] = field(default_factory=list)


@dataclass(slots=True)
class LineBook:
    """``by_end``: lines by the keys of their last whole chunk and their tail. ``pinned``: pieces of pinned lines, counted.
    ``due``: lines whose record is to be written now. ``checkpoints``: lines whose chain is to be written, in order;
    ``stalled``: those that the disk refused too often, until it takes something again. ``writing``: checkpoint transfers."""

    by_end: dict[ChunkKey, dict[Line, None]] = field(default_factory=dict)
    pinned: Counter[ChunkKey] = field(default_factory=Counter)
    due: dict[Line, None] = field(default_factory=dict)
    checkpoints: dict[Line, None] = field(default_factory=dict)
    stalled: dict[Line, None] = field(default_factory=dict)
    jobs: dict[TransferId, RecordJob] = field(default_factory=dict)
    writing: dict[TransferId, Line] = field(default_factory=dict)
    loads: dict[TransferId, Load] = field(default_factory=dict)
    record_retry_at: float = 0.0
    checkpoint_retry_at: float = 0.0
    swept: bool = False
    """The drain has asked for the records of all lines that are whole on disk; ``flushed``: of all others."""
    flushed: bool = False
    pin_wait_since: float | None = None

    def add(self, line: Line) -> None:
        """``line`` is new, or has new pieces (after ``remove``)."""
        for key in _ends(line):
            self.by_end.setdefault(key, {})[line] = None
        if line.session.pinned:
            self.pinned.update(line.pieces)

    def remove(self, line: Line) -> None:
        """Take ``line`` out of all books but the one of jobs under way."""
        for key in _ends(line):
            lines = self.by_end.get(key)
            if lines is not None:
                lines.pop(line, None)
                if not lines:
                    del self.by_end[key]
        if line.session.pinned:
            self._unpin(line.pieces)
        for queue in (self.due, self.checkpoints, self.stalled):
            queue.pop(line, None)

    def set_pinned(self, session: Session, pinned: bool) -> None:
        if session.pinned == pinned:
            return
        session.pinned = pinned
        for line in session.lines.values():
            if pinned:
                self.pinned.update(line.pieces)
            else:
                self._unpin(line.pieces)

    def _unpin(self, keys: tuple[ChunkKey, ...]) -> None:
        for key in keys:
            if self.pinned[key] > 1:
                self.pinned[key] -= 1
            else:
                del self.pinned[key]


def _ends(line: Line) -> tuple[ChunkKey, ...]:
    if line.tail is None:
        return line.keys[-1:]
    return (*line.keys[-1:], line.tail)
