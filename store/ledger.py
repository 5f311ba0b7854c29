"""Bytes of one store by condition, in whole blocks. Pure."""

from __future__ import annotations


class Ledger:
    """``live``: files in the index; ``reserved``: to be written; ``dying``: evicted, not unlinked yet; ``aside``: in bad/;
    ``stranded``: could not be deleted. Together they are what the disk may hold of ours: ``used``. All in bytes."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.reserved_bytes = 0
        self.dying_bytes = 0
        self.aside_bytes = 0
        self.stranded_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self.live_bytes + self.reserved_bytes + self.dying_bytes + self.aside_bytes + self.stranded_bytes

    def release(self, n_bytes: int) -> None:
        """End a reservation (the file is an entry now, or was given up)."""
        self.reserved_bytes -= n_bytes

    def buried(self, n_bytes: int, *, gone: bool = True) -> None:
        """A dying file was unlinked, or could not be (``gone`` False: its bytes stay in the books as stranded)."""
        self.dying_bytes -= n_bytes
        if not gone:
            self.stranded_bytes += n_bytes

    def check_ledger(self, live_bytes: int) -> None:
        """AssertionError if it does not add up."""
        assert self.live_bytes == live_bytes, "live bytes"
        for name in ("reserved_bytes", "dying_bytes", "aside_bytes", "stranded_bytes"):
            assert getattr(self, name) >= 0, name
