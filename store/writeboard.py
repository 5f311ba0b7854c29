"""Writes in flight and their order. Pure; the owner locks.

Data of a chain is written in any order and in parallel; a child is published (renamed into its shard) only after its parent
is durable; a failed parent takes its descendants with it. ``NEXT`` is the whole life of a write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvalet.store.config import KLASSES
from kvalet.store.ids import ChunkMeta
from kvalet.store.layout import FileName
from kvalet.store.record import Record


class Stage(Enum):
    QUEUED = "queued"
    WRITING = "writing"
    """Its bytes are on the way into a temporary file; a worker owns it."""
    WRITTEN = "written"
    """Data durable under a temporary name; waits for its parent."""
    PUBLISHING = "publishing"
    """The committer owns it."""
    DURABLE = "durable"
    FAILED = "failed"


NEXT = {
    Stage.QUEUED: (Stage.WRITING, Stage.FAILED),
    Stage.WRITING: (Stage.WRITTEN, Stage.FAILED),
    Stage.WRITTEN: (Stage.PUBLISHING, Stage.FAILED),
    Stage.PUBLISHING: (Stage.DURABLE, Stage.FAILED),
    Stage.DURABLE: (),
    Stage.FAILED: (),
}


@dataclass(slots=True, eq=False)
class Write:
    """One write. ``followers``: (job, done) of later writes of the same key, which end with it. ``gates``: unlinks that
    must be over before its data may be written. ``doomed``: an ancestor failed while a worker owned it. ``parent``: index key
    of the file that must be durable before. ``record``: it is one, and ``meta`` only says where it hangs; ``file_bytes``: what
    its file takes, known once it is written; ``dropped``: to be deleted as soon as it is settled."""

    job: int
    meta: ChunkMeta
    file: FileName
    slot: memoryview
    done: Any
    klass: int
    n_bytes: int
    recency: int
    gates: list[Any] = field(default_factory=list)
    followers: list[tuple[int, Any]] = field(default_factory=list)
    stage: Stage = Stage.QUEUED
    reason: str = ""
    doomed: str = ""
    tmp: str = ""
    started_ns: int = 0
    parent: bytes = b""
    record: Record | None = None
    file_bytes: int = 0
    dropped: bool = False

    def __post_init__(self) -> None:
        self.parent = self.parent or self.meta.parent
        self.file_bytes = self.file_bytes or self.n_bytes


class WriteBoard:
    """All writes from ``add`` to ``remove``. Bounded by its owner (``len``)."""

    def __init__(self) -> None:
        self._writes: dict[bytes, Write] = {}
        self._by_job: dict[int, bytes] = {}
        self._queues: tuple[deque[Write], ...] = tuple(deque() for _ in range(KLASSES))
        self._ready: list[Write] = []
        self._children: dict[bytes, list[Write]] = {}

    def __len__(self) -> int:
        return len(self._writes)

    def get(self, index_key: bytes) -> Write | None:
        return self._writes.get(index_key)

    def of_job(self, job: int) -> Write | None:
        return self._writes.get(self._by_job.get(job, b""))

    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def most_urgent(self) -> int:
        """The smallest class with a queued write; KLASSES if none is queued."""
        return next((klass for klass, queue in enumerate(self._queues) if queue), KLASSES)

    def unfinished(self) -> int:
        """Writes that still need a thread of the store."""
        return sum(write.stage not in (Stage.DURABLE, Stage.FAILED) for write in self._writes.values())

    def writes(self) -> Iterable[Write]:
        return self._writes.values()

    def add(self, write: Write) -> None:
        """The parent is durable already or on the board. Its queued ancestors inherit a more urgent class."""
        self._writes[write.file.index_key] = write
        self._by_job[write.job] = write.file.index_key
        self._children.setdefault(write.parent, []).append(write)
        self._queues[write.klass].append(write)
        self.raise_klass(self._writes.get(write.parent), write.klass)

    def raise_klass(self, write: Write | None, klass: int) -> None:
        """``write`` and its ancestors go at least as early as ``klass``."""
        line = []
        while write is not None and write.klass > klass:
            if write.stage is Stage.QUEUED:
                line.append(write)
            self._move(write, klass)
            write = self._writes.get(write.parent)
        for ancestor in line:  # deepest first, each to the front: the first ancestor ends up in front
            self._queues[klass].remove(ancestor)
            self._queues[klass].appendleft(ancestor)

    def take(self) -> Write | None:
        """The next write for a worker."""
        for queue in self._queues:
            if queue:
                write = queue.popleft()
                self._to(write, Stage.WRITING)
                return write
        return None

    def remove_queued(self, job: int) -> Write | None:
        """For a cancel: fail it if no worker has it and nobody follows it; else None."""
        write = self.of_job(job)
        if write is None or write.job != job or write.stage is not Stage.QUEUED or write.followers:
            return None
        self._queues[write.klass].remove(write)
        self._to(write, Stage.FAILED)
        write.reason = "cancelled"
        return write

    def written(self, write: Write) -> bool:
        """A worker has made the data durable. False: an ancestor failed meanwhile; the worker must unlink and ``fail`` it."""
        if write.doomed:
            return False
        self._to(write, Stage.WRITTEN)
        if self._parent_durable(write):
            self._ready.append(write)
        return True

    def take_ready(self) -> list[Write]:
        """One batch for a committer: written, parent durable, all of the shard of the oldest of them, so that one flush
        serves them. None is another's child."""
        ready = [write for write in self._ready if write.stage is Stage.WRITTEN]
        batch = [write for write in ready if _shard(write) == _shard(ready[0])]
        self._ready = [write for write in ready if _shard(write) != _shard(ready[0])]
        for write in batch:
            self._to(write, Stage.PUBLISHING)
        return batch

    def has_ready(self) -> bool:
        """May be true for writes that have failed meanwhile; ``take_ready`` knows."""
        return bool(self._ready)

    def durable(self, write: Write) -> None:
        self._to(write, Stage.DURABLE)
        self._ready += [child for child in self._children.get(write.file.index_key, ()) if child.stage is Stage.WRITTEN]

    def fail(self, write: Write, reason: str) -> list[Write]:
        """``write`` and its descendants fail, the descendants with "ancestor". Returns those that now need an answer and,
        if they have a ``tmp``, an unlink: all but the ones a worker owns, which are doomed and answered by that worker."""
        if write.stage is not Stage.FAILED:
            self._to(write, Stage.FAILED)
            write.reason = reason
        return [write, *self.parent_lost(write.file.index_key)]

    def parent_lost(self, parent: bytes) -> list[Write]:
        """What ``fail`` does for descendants, for a parent that was on disk and is found missing or bad."""
        over = []
        stack = list(self._children.get(parent, ()))
        while stack:
            write = stack.pop()
            if write.stage is Stage.WRITING:
                write.doomed = "ancestor"
            elif write.stage in (Stage.QUEUED, Stage.WRITTEN):
                if write.stage is Stage.QUEUED:
                    self._queues[write.klass].remove(write)
                self._to(write, Stage.FAILED)
                write.reason = "ancestor"
                over.append(write)
            stack.extend(self._children.get(write.file.index_key, ()))
        return over

    def remove(self, write: Write) -> None:
        """It is settled. Only DURABLE and FAILED ones may go; children of a durable one stay and see it in the index."""
        assert write.stage in (Stage.DURABLE, Stage.FAILED), write.stage
        if self._writes.get(write.file.index_key) is write:
            del self._writes[write.file.index_key]
        self._by_job.pop(write.job, None)
        siblings = self._children.get(write.parent, [])
        siblings.remove(write)
        if not siblings:
            self._children.pop(write.parent, None)

    def close(self) -> list[Write]:
        """Fail all that no worker owns with "closed"; doom the rest."""
        over = []
        for write in list(self._writes.values()):
            if write.stage in (Stage.QUEUED, Stage.WRITTEN):
                if write.stage is Stage.QUEUED:
                    self._queues[write.klass].remove(write)
                self._to(write, Stage.FAILED)
                write.reason = "closed"
                over.append(write)
            elif write.stage is Stage.WRITING:
                write.doomed = "closed"
        return over

    def _parent_durable(self, write: Write) -> bool:
        parent = self._writes.get(write.parent)
        return parent is None or parent.stage is Stage.DURABLE

    def _move(self, write: Write, klass: int) -> None:
        if write.stage is Stage.QUEUED:
            self._queues[write.klass].remove(write)
            self._queues[klass].append(write)
        write.klass = klass

    def _to(self, write: Write, stage: Stage) -> None:
        assert stage in NEXT[write.stage], f"{write.stage} -> {stage} of write {write.job}"
        write.stage = stage


def _shard(write: Write) -> tuple[str, str]:
    return write.file.folder, write.file.shard
