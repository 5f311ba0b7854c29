"""Records on the loop thread: taking in their jobs, booking what came of them, dropping them. Lock held, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from kvalet.store import layout
from kvalet.store.admission import gates_for, parent_key, refuse_read, refuse_write
from kvalet.store.config import KLASSES
from kvalet.store.entries import Entry, Room
from kvalet.store.ids import ChunkKey, ChunkMeta
from kvalet.store.janitor import Burial, Gate, round_block
from kvalet.store.jobs import RecordResult
from kvalet.store.layout import FileName
from kvalet.store.reading import ReadOutcome
from kvalet.store.record import MAX_RECORD_BYTES, Record, size_bound
from kvalet.store.recordfiles import wish_for
from kvalet.store.state import NO_SLOT, Done, Read, ReadOver, StoreState, WriteOver
from kvalet.store.writeboard import Stage, Write


def branches(state: StoreState, tenant: str, session: str) -> list[str]:
    """Most recent first."""
    return state.books.records.branches(layout.session_hash(state.disk.secret, _tenant(state, tenant), session))


def admit_record(state: StoreState, job: int, record: Record, done: Done, klass: int) -> None:
    """All that it names must be on disk, or be the piece it ends with in flight: its name is published after that one's.
    Everything named is pinned until the record is."""
    klass = min(max(klass, 0), KLASSES - 1)
    try:
        file = layout.record_name(layout.session_hash(state.disk.secret, _tenant(state, record.tenant), record.session), record)
    except (ValueError, KeyError):
        state.answer(done, WriteOver(job, "record", is_record=True))
        return
    parent = parent_key(state, record.keys[-1]) if record.keys else state.books.root
    n_bytes = round_block(min(size_bound(record), MAX_RECORD_BYTES))
    reason = _refuse(state, record, file, n_bytes, parent, klass)
    if not reason:
        state.books.pin(record.keys)  # before room is made for it
        room = _reserve(state, record, file, n_bytes)
        if room.granted:
            meta = ChunkMeta(ChunkKey(file.index_key), parent, 0, 0, (), 0)
            gates = gates_for(state, room.victims, file.name)
            recency = state.books.next_recency(state.wall_ns())
            state.books.add_child(parent)
            state.budget.book(n_bytes)
            state.board.add(Write(job, meta, file, NO_SLOT, done, klass, n_bytes, recency, gates, parent=parent, record=record))
            state.for_writers.notify()
            return
        state.books.unpin(record.keys)
        reason = "full"
    state.answer(done, WriteOver(job, reason, is_record=True))


def _reserve(state: StoreState, record: Record, file: FileName, n_bytes: int) -> Room:
    """A wish to unpin must come true even where pinned sessions fill the tier: they are let go before the record can say so."""
    room = state.books.reserve(n_bytes, state.spare_bytes, record=True)
    old = state.books.entry(file.index_key)
    if not room.granted and old is not None and old.file.pinned and not record.pinned:
        state.books.let_go(old)
        room = state.books.reserve(n_bytes, state.spare_bytes, record=True)
    return room


def _refuse(state: StoreState, record: Record, file: FileName, n_bytes: int, parent: bytes, klass: int) -> str:
    reason = refuse_write(state, n_bytes, klass)
    if reason:
        return reason
    flying = state.board.get(file.index_key)
    if flying is not None and flying.stage not in (Stage.FAILED, Stage.DURABLE):
        return "busy"
    has = state.books.has
    missing = [key for key in record.keys if not has(key)]
    coming = state.board.get(parent)
    if missing and not (missing == [record.keys[-1]] and coming is not None and coming.stage is not Stage.FAILED):
        return "missing"
    return ""


def _tenant(state: StoreState, tenant: str) -> bytes:
    return layout.tenant_hash(state.disk.secret, tenant)


def settle_record(state: StoreState, write: Write, over: WriteOver) -> RecordResult:
    """Lock held; what is true of every write has been booked."""
    record = write.record
    assert record is not None
    state.books.unpin(record.keys)
    if write.stage is Stage.DURABLE:
        enter(state, write, record)
    reason = "missing" if over.reason == "ancestor" else over.reason
    return RecordResult(over.job, reason, n_bytes=0 if reason else write.file_bytes)


def enter(state: StoreState, write: Write, record: Record) -> None:
    """It is durable: into the index, in place of the one before it."""
    entry = Entry(write.file, write.file_bytes, write.recency, 0)
    replaced = state.books.add(entry)
    state.books.quarantined.pop(entry.index_key[:8], None)
    learn(state, entry, record.keys, record.ttl_s)
    if replaced is not None:
        state.touched.pop(replaced.file.name, None)
        if replaced.file.name != write.file.name:
            state.books.dying_bytes += replaced.n_bytes
            state.bury([Burial(replaced.file, replaced.n_bytes, Gate(1))])
    if write.dropped:
        discard(state, [entry])


def learn(state: StoreState, entry: Entry, keys: Sequence[bytes], ttl_s: int | None) -> None:
    state.books.records.learn_keys(entry, keys)
    state.books.records.learn_ttl(entry.index_key, ttl_s)


def drop_record(state: StoreState, tenant: str, session: str, branch: str) -> None:
    """The file goes soon; one that is being written goes as soon as it is settled."""
    key = layout.record_index_key(layout.session_hash(state.disk.secret, _tenant(state, tenant), session), branch)
    flying = state.board.get(key)
    if flying is not None and flying.stage is not Stage.FAILED:
        flying.dropped = True
    entry = state.books.entry(key)
    if entry is not None:
        discard(state, [entry])


def discard(state: StoreState, entries: Sequence[Entry]) -> None:
    """Out of the index now, unlinked by the janitor."""
    for entry in entries:
        state.books.drop(entry.index_key)
        state.books.dying_bytes += entry.n_bytes
        state.touched.pop(entry.file.name, None)
    state.bury([Burial(entry.file, entry.n_bytes, Gate(1)) for entry in entries])


def admit_record_read(state: StoreState, job: int, tenant: str, session: str, branch: str, done: Done) -> None:
    wish = wish_for(state.disk, state.home.identity, tenant, session, branch)
    read = Read(job, NO_SLOT, done, state.clock(), record=wish)
    index_key = layout.record_index_key(wish.home.session, branch)
    entry = state.books.entry(index_key)
    reason = refuse_read(state, read, 0)
    if not reason and (entry is None or entry.unusable):
        reason = "quarantined" if state.books.quarantined.get(index_key[:8]) else "missing"
    if reason or entry is None:
        state.answer(done, ReadOver(read, (ReadOutcome(reason, "admission"),)))
        return
    read.files, read.held = (entry.file,), (entry.index_key,)
    state.books.pin(read.held)
    state.reads.put(job, read, session=f"{tenant}\n{session}", klass=0)
    state.for_readers.notify()


def settle_record_read(state: StoreState, read: Read, last: ReadOutcome) -> RecordResult:
    """Lock held; refusals have been booked."""
    entry = state.books.entry(read.held[0]) if read.held else None
    if last.record is not None and entry is not None and last.file is not None and entry.file.name == last.file.name:
        learn(state, entry, last.record.keys, last.record.ttl_s)
        recency = state.books.next_recency(state.wall_ns())
        for touched in state.books.touch_record(entry, recency):
            state.touched[touched.file.name] = (touched.file, recency)
    return RecordResult(read.job, last.reason, last.record, last.n_bytes)
