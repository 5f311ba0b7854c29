"""``ls``: bytes and files per tenant tag and kind, from names and stat alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvalet.store import layout
from kvalet.store.inspect_walk import Found

KINDS = {layout.CHUNKS: "chunks", layout.TAILS: "tails", layout.STATES: "states", layout.RECORDS: "records"}
"""Folder -> what a person calls its files."""


@dataclass(slots=True)
class Sum:
    """Files of one kind and tenant tag. Times of last use in ns since 1970 (mtimes; the server writes them now and then)."""

    tag: str
    kind: str
    files: int = 0
    n_bytes: int = 0
    oldest_ns: int = 0
    newest_ns: int = 0


def sums(files: Iterable[Found]) -> list[Sum]:
    """The largest first."""
    found: dict[tuple[str, str], Sum] = {}
    for one in files:
        kind = KINDS.get(one.file.folder, one.file.folder)
        total = found.setdefault((one.tag, kind), Sum(one.tag, kind, oldest_ns=one.st.mtime_ns, newest_ns=one.st.mtime_ns))
        total.files += 1
        total.n_bytes += one.n_bytes
        total.oldest_ns = min(total.oldest_ns, one.st.mtime_ns)
        total.newest_ns = max(total.newest_ns, one.st.mtime_ns)
    return sorted(found.values(), key=lambda total: (-total.n_bytes, total.tag, total.kind))
