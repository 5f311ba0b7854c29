"""A disk that fails on purpose: the store's system calls with one fault in them. Shipped, for tests and soaks.

``FaultIO`` counts every call by name, so a test can sweep n until the fault no longer fires, and can assert that it fired.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.store.fileio import FileIO, FileStat

OPS = (
    "open",
    "close",
    "fstat",
    "preadv",
    "pwritev",
    "fdatasync",
    "fsync",
    "rename",
    "unlink",
    "mkdir",
    "utime",
    "scan",
    "free_bytes",
    "drop_cache",
)
KINDS = ("errno", "short", "zero", "lie", "corrupt", "hang", "memory")


@dataclass(frozen=True, slots=True)
class Fault:
    """The ``nth`` call (from 1) of ``op`` after arming goes wrong; with ``sticky`` all later ones too.

    ``kind``: "errno" raises OSError(``code``); "memory" raises MemoryError; "short" moves half the bytes (rounded down to
    ``granule``); "zero" moves none; "lie" reports success and does nothing; "corrupt" flips one bit of what was read;
    "hang" waits for ``FaultIO.release`` first. ``direct_only``: only calls on descriptors opened with O_DIRECT count.
    """

    op: str
    nth: int = 1
    kind: str = "errno"
    code: int = 5
    sticky: bool = False
    granule: int = 1
    direct_only: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS or self.kind not in KINDS:
            raise ValueError(f"no such fault: {self}")


class FaultIO(FileIO):
    """Starts disarmed. ``fired`` counts how often the fault happened; ``hanging`` is set while a call hangs."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.armed = False
        self.calls: Counter[str] = Counter()
        self.fired = 0
        self.hanging = threading.Event()
        self._release = threading.Event()
        self._lock = threading.Lock()
        self._direct: set[int] = set()

    def arm(self, fault: Fault | None = None) -> None:
        """Count from here; ``fault`` replaces the present one if given."""
        with self._lock:
            self.fault = fault or self.fault
            self.calls.clear()
            self.fired = 0
            self.armed = True

    def disarm(self) -> None:
        self.armed = False
        self.release()

    def release(self) -> None:
        """Let hanging calls go on, now and later."""
        self._release.set()

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        self._strike("open", direct=bool(flags & os.O_DIRECT))
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        with self._lock:
            (self._direct.add if flags & os.O_DIRECT else self._direct.discard)(fd)
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)  # as on Linux: the descriptor is gone even when close reports an error
        self._strike("close")

    def fstat(self, fd: int) -> FileStat:
        self._strike("fstat")
        return super().fstat(fd)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        kind = self._strike("preadv", direct=fd in self._direct)
        if kind in ("zero", "lie"):
            return 0 if kind == "zero" else len(buffers[0])
        if kind == "short":
            return super().preadv(fd, [self._half(buffers[0])], offset)
        n = super().preadv(fd, buffers, offset)
        if kind == "corrupt" and n:
            buffers[0][n // 2] ^= 1
        return n

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        kind = self._strike("pwritev", direct=fd in self._direct)
        if kind == "zero":
            return 0
        if kind == "lie":
            return len(buffers[0])
        if kind == "short":
            return super().pwritev(fd, [self._half(buffers[0])], offset)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        if self._strike("fdatasync") != "lie":
            super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        if self._strike("fsync") != "lie":
            super().fsync(fd)

    def rename(self, old: str, new: str, *, old_dir: int, new_dir: int) -> None:
        if self._strike("rename") != "lie":
            super().rename(old, new, old_dir=old_dir, new_dir=new_dir)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        if self._strike("unlink") != "lie":
            super().unlink(path, dir_fd=dir_fd)

    def mkdir(self, path: str, *, dir_fd: int) -> None:
        self._strike("mkdir")
        super().mkdir(path, dir_fd=dir_fd)

    def utime(self, target: str | int, mtime_ns: int, *, dir_fd: int | None = None) -> None:
        self._strike("utime")
        super().utime(target, mtime_ns, dir_fd=dir_fd)

    def scan(self, fd: int) -> list[tuple[str, FileStat]]:
        self._strike("scan")
        return super().scan(fd)

    def free_bytes(self, fd: int) -> int:
        self._strike("free_bytes")
        return super().free_bytes(fd)

    def drop_cache(self, fd: int) -> None:
        self._strike("drop_cache")
        super().drop_cache(fd)

    def _strike(self, op: str, *, direct: bool = False) -> str:
        """Count the call. Raises, waits, or returns the kind of fault to be acted out by the caller ("" = none)."""
        with self._lock:
            fault = self.fault
            if not self.armed or fault is None or op != fault.op or (fault.direct_only and not direct):
                self.calls[op] += self.armed
                return ""
            self.calls[op] += 1
            if self.calls[op] != fault.nth and not (fault.sticky and self.calls[op] > fault.nth):
                return ""
            self.fired += 1
        if fault.kind == "errno":
            raise OSError(fault.code, f"injected: {os.strerror(fault.code)}")
        if fault.kind == "memory":
            raise MemoryError("injected")
        if fault.kind == "hang":
            self.hanging.set()
            self._release.wait()
        return fault.kind

    def _half(self, view: Any) -> Any:
        n = len(view) // 2
        return view[: max(n - n % (self.fault.granule if self.fault else 512), 1)]


EIO, ENOSPC = ("errno", errno.EIO), ("errno", errno.ENOSPC)
CHANCES: dict[str, tuple[tuple[str, int], ...]] = {
    "open": (EIO, ("errno", errno.EMFILE), ("errno", errno.ENFILE), ("errno", errno.ENOMEM), ("memory", 0)),
    "preadv": (EIO, ("short", 0), ("zero", 0), ("lie", 0), ("corrupt", 0), ("memory", 0), ("hang", 0)),
    "pwritev": (EIO, ENOSPC, ("errno", errno.EDQUOT), ("short", 0), ("zero", 0), ("lie", 0), ("memory", 0), ("hang", 0)),
    "fdatasync": (EIO, ENOSPC, ("lie", 0), ("hang", 0)),
    "fsync": (EIO, ENOSPC, ("lie", 0), ("hang", 0)),
    "rename": (EIO, ENOSPC, ("errno", errno.ENOMEM)),
}
"""What may happen to a call; to any other, EIO. No lies about names: whether a file is there is what the books are about."""
HANG_S = 0.02


class RandomFaults(FaultIO):
    """A disk on which every call fails with probability ``rate``, in any of the ways of CHANCES. ``struck`` counts them by
    (call, kind). The order of threads is not in the seed, so a seed repeats the mixture, not the run."""

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__()
        self.rate = rate
        self.struck: Counter[tuple[str, str]] = Counter()
        self._rng = random.Random(seed)

    def _strike(self, op: str, *, direct: bool = False) -> str:
        with self._lock:
            if not self.armed:
                return ""
            self.calls[op] += 1
            if self._rng.random() >= self.rate:
                return ""
            kind, code = self._rng.choice(CHANCES.get(op, (EIO,)))
            self.struck[op, kind] += 1
            self.fired += 1
        if kind == "errno":
            raise OSError(code, f"injected: {os.strerror(code)}")
        if kind == "memory":
            raise MemoryError("injected")
        if kind == "hang":
            self._release.wait(HANG_S)
        return kind
