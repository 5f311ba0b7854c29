"""Outcomes of store jobs, as the loop sees them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvalet.store.ids import ChunkKey

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
    """``reason`` "" = durable. Else one of: full, io, ancestor, read_only, resources, cancelled, closed, internal. ``skipped``:
    it was there already (or another job wrote it meanwhile), this job wrote nothing."""

    job: int
    reason: str = ""
    n_bytes: int = 0
    skipped: bool = False
    write_ms: float = 0.0
