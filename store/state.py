"""What the threads of one store share, under one lock. No I/O happens under the lock."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvalet.store.books import Books
from kvalet.store.breaker import ReadBreaker, WriteBreaker
from kvalet.store.budget import Budget
from kvalet.store.config import KLASSES, StoreConfig
from kvalet.store.directory import Directory
from kvalet.store.errors import StoreError
from kvalet.store.fairqueue import FairQueue
from kvalet.store.header import Home
from kvalet.store.ids import ChunkKey, ChunkMeta
from kvalet.store.janitor import BadFolder, Burial, Gate
from kvalet.store.layout import FileName
from kvalet.store.reading import ReadOutcome, TailWish
from kvalet.store.recordfiles import RecordWish
from kvalet.store.writeboard import Write, WriteBoard

NO_SLOT = memoryview(b"")
"""Of jobs that move no chunk."""
UNKNOWN_SPARE = 1 << 62
"""Until free space was measured once: only the cap limits."""

Done = Callable[[Any], None]


@dataclass(slots=True, eq=False)
class Read:
    """One read. Exactly one of ``meta`` (a chunk or state), ``wish`` (a tail) and ``record`` is set. ``held``: index keys
    pinned for it."""

    job: int
    slot: memoryview
    done: Done
    queued_at: float
    meta: ChunkMeta | None = None
    wish: TailWish | None = None
    files: tuple[FileName, ...] = ()
    held: tuple[bytes, ...] = ()
    klass: int = 0
    started_at: float = 0.0
    record: RecordWish | None = None


@dataclass(frozen=True, slots=True)
class ReadOver:
    """Completion of a read: ``outcomes`` of all files it looked at; the last one is the answer."""

    read: Read
    outcomes: tuple[ReadOutcome, ...]


@dataclass(frozen=True, slots=True)
class WriteOver:
    """Completion of a write or of one of its followers (``leader`` False). ``write`` None: refused at once; ``is_record``
    then says what it was."""

    job: int
    reason: str
    write: Write | None = None
    leader: bool = True
    skipped: bool = False
    write_ms: float = 0.0
    is_record: bool = False


@dataclass(slots=True)
class Counts:
    """Since open. ``refusals``: (reason, field) of reads; ``failures``: reasons of writes."""

    reads: int = 0
    hits: int = 0
    read_bytes: int = 0
    read_ms: float = 0.0
    verify_ms: float = 0.0
    writes: int = 0
    skipped: int = 0
    written_bytes: int = 0
    write_ms: float = 0.0
    internal: int = 0
    drift: int = 0
    waves: int = 0
    expired_records: int = 0
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


class StoreState:
    """``lock`` guards everything below it. ``wake``: readers, writers, committer, clerk and janitor sleep on their own
    conditions over that lock."""

    def __init__(
        self, config: StoreConfig, disk: Directory, home: Home, books: Books, bad: BadFolder, budget: Budget | None = None
    ) -> None:
        self.config = config
        self.disk = disk
        self.home = home
        self.clock: Callable[[], float] = time.monotonic
        self.wall_ns: Callable[[], int] = time.time_ns
        self.lock = threading.Lock()
        self.books = books
        self.bad = bad
        self.budget = budget or Budget(0, 0.0, 0.0)
        self.reads: FairQueue[Read] = FairQueue(KLASSES)
        self.board = WriteBoard()
        self.running: dict[int, Read] = {}
        self.answers: deque[tuple[Done, Any]] = deque()
        self.burials: deque[Burial] = deque()
        self.tmp_garbage: deque[Write] = deque()
        self.dying: dict[str, Gate] = {}
        self.touched: dict[str, tuple[FileName, int]] = {}
        self.gone: list[ChunkKey] = []
        self.unsettled = 0
        self.warn_from_s = 0.0
        """On ``clock``: from then on damage is logged again. Of the loop thread alone."""
        self.lost_pins = 0
        """Pinned records that could not be read at open."""
        self.spare_bytes = UNKNOWN_SPARE
        self.read_breaker = ReadBreaker(config.breaker_errors, config.breaker_window_s, config.breaker_open_s)
        self.write_breaker = WriteBreaker(config.probe_every_s)
        self.counts = Counts()
        self.closed = False
        self.forked = False
        self.stopping = False
        self.janitor_stopping = False
        self.for_readers = threading.Condition(self.lock)
        self.for_writers = threading.Condition(self.lock)
        self.for_committer = threading.Condition(self.lock)
        self.for_clerk = threading.Condition(self.lock)
        self.for_janitor = threading.Condition(self.lock)
        self.quiet = threading.Condition(self.lock)

    def answer(self, done: Done, over: Any) -> None:
        """Lock held. Call ``done`` soon, on the clerk's thread."""
        if self.forked:
            raise StoreError("this process was forked from one with an open store; only the parent may use it")
        self.answers.append((done, over))
        self.for_clerk.notify()

    def bury(self, burials: list[Burial]) -> None:
        """Lock held. Their bytes are in ``dying`` already; a write of the same name waits for the gate."""
        for burial in burials:
            if burial.gate is not None:
                self.dying[burial.file.name] = burial.gate
            self.burials.append(burial)
        self.for_janitor.notify()

    def abandon(self) -> None:
        """In a forked child: give up everything without touching the directory. Closing is not unlocking: the parent keeps
        its lock, because the lock belongs to the open file that it still has."""
        self.lock = threading.Lock()  # the old one may be held by a thread that does not exist here
        self.closed = self.stopping = self.janitor_stopping = self.forked = True
        self.disk.close()

    def finish_write(self, write: Write) -> list[tuple[Done, WriteOver]]:
        """Lock held. What to call, without the lock, for a write that is durable or failed."""
        ms = (time.perf_counter_ns() - write.started_ns) / 1e6 if write.started_ns else 0.0
        calls = [(write.done, WriteOver(write.job, write.reason, write, write_ms=ms))]
        calls += [(done, WriteOver(job, write.reason, write, leader=False, skipped=True)) for job, done in write.followers]
        write.followers = []
        return calls
