"""One table from errno to the store's words (docs/store.md, "Errors"). Pure."""

from __future__ import annotations

import errno

RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
STRANGE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.ENOTEMPTY})
"""Something that is not a file of ours stands in the place."""
IN_THE_WAY = frozenset({errno.EISDIR, errno.ENOTEMPTY, errno.ENOTDIR, errno.ELOOP})
"""Something that is not a file of ours stands where a file should go; it stays."""
BARRED = frozenset({errno.EACCES, errno.EPERM})
"""It may be ours, but we may not open it."""
NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""How file systems refuse O_DIRECT, at open or at the first transfer."""


def read_reason(error: OSError | MemoryError) -> str:
    """A word of store.jobs.ReadResult."""
    if isinstance(error, MemoryError) or error.errno in RESOURCES:
        return "resources"
    if error.errno == errno.ENOENT:
        return "missing"
    return "foreign" if error.errno in STRANGE | BARRED else "io"


def write_reason(error: OSError | MemoryError) -> str:
    """A word of store.jobs.WriteResult."""
    if isinstance(error, MemoryError) or error.errno in RESOURCES:
        return "resources"
    if error.errno in IN_THE_WAY:
        return "blocked"
    return "full" if error.errno in FULL else "io"


def opens_write_breaker(error: OSError | MemoryError) -> bool:
    """Is the disk (not this one name) to blame? A strange thing in one file's place is no reason to stop writing."""
    return write_reason(error) == "io"


def explain(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{errno.errorcode.get(error.errno, error.errno)} ({error.strerror})"
    return repr(error)
