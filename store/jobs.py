"""Outcomes of store jobs, as the loop sees them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvalet.store.ids import ChunkKey
from kvalet.store.record import Record

NO_KEY = ChunkKey(b"")


@dataclass(frozen=True, slots=True)
class ReadResult:
    """``reason`` "" = the slot holds the verified chunk. Else one of: missing, size, header, payload, identity, key,
    foreign, io, resources, cancelled, deadline, no_prefix, quarantined, closed, internal.
    For a tail: ``key`` and ``ids`` are its own."""

    job: int
    reason: str = ""
    key: ChunkKey = NO_KEY
    ids: tuple[int, ...] = ()
    n_bytes: int = 0
    read_ms: float = 0.0
    verify_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WriteResult:
    """``reason`` "" = durable. Else one of: full, io, blocked, ancestor, read_only, resources, cancelled, closed, budget,
    internal. blocked: something that is no file of ours has the name. ``skipped``: it was there already (or another job wrote
    it meanwhile), this job wrote nothing."""

    job: int
    reason: str = ""
    n_bytes: int = 0
    skipped: bool = False
    write_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordResult:
    """Of a write and of a read; ``reason`` "" = the record is durable, or ``record`` is what was read, whole and verified.

    A write fails for the reasons of WriteResult, and: missing (something it names is not on disk), busy (another write of this
    record is under way), record (it cannot be told: longer than 8 MiB, or text that is not Unicode). A read fails for the
    reasons of ReadResult. ``n_bytes``: of the file.
    """

    job: int
    reason: str = ""
    record: Record | None = None
    n_bytes: int = 0
