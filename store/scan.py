"""Reading names at open: which files are there. One directory listing plus one stat per file, no contents.

Files that are not ours (names, types, owners, links) are counted and otherwise left alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from kvalet.store import layout
from kvalet.store.books import Books
from kvalet.store.directory import Directory
from kvalet.store.entries import UNKNOWN_ORDINAL, Entry
from kvalet.store.fileio import FileStat
from kvalet.store.janitor import round_block
from kvalet.store.layout import FileName


@dataclass(frozen=True, slots=True)
class Walk:
    """What a walk of the disk found. Bytes are rounded up to 4096 per file. ``doubles``: older files of a record that has
    a newer one under another name; a power loss can bring them back. They are in no book."""

    files: int
    n_bytes: int
    strangers: int
    doubles: tuple[Entry, ...] = ()


def walk(disk: Directory) -> Iterator[tuple[FileName | None, FileStat]]:
    """All names under c/, t/, s/ and r/; None for one that is not ours. OSError if a shard cannot be listed."""
    for folder in layout.SHARDED:
        for shard, st in disk.io.scan(disk.folder_fds[folder]):
            if shard not in _SHARDS or not stat.S_ISDIR(st.mode):
                yield None, st
                continue
            fd = disk.open_shard(folder, shard)
            try:
                found = disk.io.scan(fd)
            finally:
                disk.close_quietly(fd)
            for name, file_stat in found:
                yield _ours(folder, shard, name, file_stat), file_stat


def load(disk: Directory, books: Books, now_ns: int) -> Walk:
    """Fill ``books``. Times in the future are clamped to now; a tail's ordinal comes from its parent, if that is here."""
    files = n_bytes = strangers = 0
    tails: list[Entry] = []
    doubles: list[Entry] = []
    for file, st in walk(disk):
        other = books.entry(file.index_key) if file is not None else None
        if file is None or (other is not None and not file.is_record):
            strangers += 1
            continue
        entry = Entry(file, round_block(st.size), min(max(st.mtime_ns, 0), now_ns), max(file.ordinal, 0))
        files += 1
        n_bytes += entry.n_bytes
        if other is not None:
            entry, older = (entry, other) if _rank(entry) > _rank(other) else (other, entry)
            books.drop(older.index_key)
            doubles.append(older)
        if file.is_tail:
            tails.append(entry)
        else:
            books.add(entry)
    for entry in tails:
        entry.parent = entry.file.parent
        entry.ordinal = _tail_ordinal(books, entry)
        books.add(entry)
    return Walk(files, n_bytes, strangers, tuple(doubles))


def _rank(record: Entry) -> tuple[int, bool]:
    """Of two files of one record the later one counts; of equally old ones the pinned one: what is pinned is never lost."""
    return record.recency, record.file.pinned


def count(disk: Directory) -> Walk:
    """The same walk, for comparing the disk with the ledger."""
    files = n_bytes = strangers = 0
    for file, st in walk(disk):
        if file is None:
            strangers += 1
        else:
            files += 1
            n_bytes += round_block(st.size)
    return Walk(files, n_bytes, strangers)


_SHARDS = frozenset(layout.SHARDS)


def _ours(folder: str, shard: str, name: str, st: FileStat) -> FileName | None:
    if not stat.S_ISREG(st.mode) or st.nlink != 1 or st.uid != os.geteuid():
        return None
    return layout.parse_name(folder, shard, name)


def _tail_ordinal(books: Books, entry: Entry) -> int:
    if entry.parent == books.root:
        return 0
    parent = books.entry(entry.parent or b"")
    return parent.ordinal + 1 if parent is not None else UNKNOWN_ORDINAL
