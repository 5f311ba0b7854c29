"""Records at open and on the janitor's thread: whose chains are pinned, which records are older than their ttl."""

from __future__ import annotations

import logging

from kvalet.store import recordfiles
from kvalet.store.header import Refused
from kvalet.store.janitor import Burial, Gate
from kvalet.store.layout import FileName
from kvalet.store.reading import ReadOutcome, Stranger, failed
from kvalet.store.recordjobs import discard, learn
from kvalet.store.scan import Walk
from kvalet.store.settling import book_refusal
from kvalet.store.state import StoreState

log = logging.getLogger("kvalet.store")
READ_AT_ONCE = 64
"""Headers of records read by the janitor between two of its other chores."""


def restore_pins(state: StoreState, walk: Walk) -> None:
    """Blocking, at open, before anything can be evicted: reads the pinned records (about a millisecond each), so that what
    they name stays. One that cannot be believed is set aside like any other; its chain is then no longer pinned, and health
    says so. Files that a newer one has replaced are deleted."""
    for entry in [one for one in state.books.records.all() if one.file.pinned]:
        outcome = _read_keys(state, entry.file)
        with state.lock:
            if isinstance(outcome, ReadOutcome):
                log.warning("store: a pinned record is not used: %s, %s (%s)", entry.file.name, outcome.reason, outcome.field)
                state.lost_pins += 1
                book_refusal(state, outcome)
            else:
                learn(state, entry, *outcome)
    with state.lock:
        state.books.dying_bytes += sum(double.n_bytes for double in walk.doubles)
        state.bury([Burial(double.file, double.n_bytes, Gate(1)) for double in walk.doubles])


def _read_keys(state: StoreState, file: FileName) -> tuple[tuple[bytes, ...], int | None] | ReadOutcome:
    try:
        found = recordfiles.read_keys(state.disk, file)
    except (OSError, MemoryError) as error:
        return failed(error, file)
    except Stranger as strange:
        return ReadOutcome("foreign", str(strange), file, stranger=True)
    return ReadOutcome(found.reason, found.field, file) if isinstance(found, Refused) else found


def sweep(state: StoreState) -> int:
    """Delete unpinned records whose ttl is over; learn the ttl of some that were found at open. Returns how many went."""
    with state.lock:
        records = state.books.records
        unread = [entry for entry in map(state.books.entry, list(records.unread)[:READ_AT_ONCE]) if entry is not None]
    for entry in unread:
        ttl_s = _read_ttl(state, entry.file)
        with state.lock:
            if state.books.entry(entry.index_key) is entry:
                records.learn_ttl(entry.index_key, ttl_s)
    with state.lock:
        over = [entry for entry in records.expired(state.wall_ns()) if state.board.get(entry.index_key) is None]
        discard(state, over)
        state.counts.expired_records += len(over)
    return len(over)


def _read_ttl(state: StoreState, file: FileName) -> int | None:
    """None also if it cannot be read: whoever wants the record will find out why."""
    try:
        head = recordfiles.read_head(state.disk, file)
    except (OSError, MemoryError, Stranger):
        return None
    return None if isinstance(head, Refused) else head.ttl_s or None
