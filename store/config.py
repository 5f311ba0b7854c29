"""Settings of the disk tier. Frozen; only api/settings.py fills it from the outside."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_BYTES = 4096
"""Alignment of slots, header, payload and file sizes; direct I/O needs it."""

KLASSES = 3
"""Classes of reads and writes: 0 a turn waits for it, 1 a predicted return, 2 background."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Sizes in bytes, times in seconds.

    ``directory``: created (0700) if missing; its parent must exist. ``cap_bytes``: all chunk and tail files, reservations
    and set-aside files together; 0 disables the tier (nothing is read, written or deleted). ``min_free_bytes``: what must stay
    free on that file system; writes evict, then are refused ("full"), before it is touched.
    ``readers``, ``writers``: threads that move data; ``committers``: threads that publish what is written (docs/numbers.md
    has what more or fewer of them cost).
    ``sync``: "data" (an acknowledged write survives power loss) or "none" (survives a kill only).
    ``direct``: "auto" probes O_DIRECT at open and falls back to buffered; "off" is always buffered.
    ``queue_limit``: reads, and writes, waiting at once; the next one is answered "resources".
    ``queue_deadline_s``: a read that waits longer without being started is answered "deadline".
    ``yield_s``: the longest a background write waits for waiting reads before each chunk.
    ``breaker_*``: ``breaker_errors`` read errors within ``breaker_window_s`` stop reads for ``breaker_open_s``; after a write
    error the tier is read-only until a probe, tried every ``probe_every_s``, succeeds.
    ``bad_files``, ``bad_bytes``: what is kept of refused files for diagnosis, the oldest deleted first.
    ``bytes_per_day``: what may be written in a day, 0 = no limit; see ``budget.py``.
    ``walk_every_s``: how often the books are compared with the disk.
    """

    directory: str
    cap_bytes: int
    min_free_bytes: int = 1 << 30
    readers: int = 4
    writers: int = 8
    committers: int = 8
    sync: str = "data"
    direct: str = "auto"
    force_network_fs: bool = False
    queue_limit: int = 4096
    queue_deadline_s: float = 30.0
    yield_s: float = 0.05
    room_wait_s: float = 10.0
    breaker_errors: int = 3
    breaker_window_s: float = 60.0
    breaker_open_s: float = 60.0
    probe_every_s: float = 5.0
    bad_files: int = 16
    bad_bytes: int = 256 << 20
    touch_every_s: float = 5.0
    free_every_s: float = 1.0
    walk_every_s: float = 3600.0
    bytes_per_day: int = 0

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError("directory must not be empty")
        for name in ("readers", "writers", "committers", "queue_limit", "breaker_errors", "bad_files"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("cap_bytes", "min_free_bytes", "bad_bytes", "queue_deadline_s", "yield_s", "room_wait_s", "bytes_per_day"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.sync not in ("data", "none"):
            raise ValueError(f'sync must be "data" or "none", not {self.sync!r}')
        if self.direct not in ("auto", "off"):
            raise ValueError(f'direct must be "auto" or "off", not {self.direct!r}')
