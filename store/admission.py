"""Taking in jobs: what is refused at once, what waits, what is booked. On the loop thread, lock held, no I/O."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvalet.store import layout
from kvalet.store.config import KLASSES
from kvalet.store.entries import Entry, keys_of
from kvalet.store.ids import ChunkMeta, TailRef
from kvalet.store.janitor import Burial, Gate
from kvalet.store.reading import MAX_TAIL_CANDIDATES, ReadOutcome
from kvalet.store.state import Done, Read, ReadOver, StoreState, WriteOver
from kvalet.store.writeboard import Stage, Write

SECRET_BYTES = 32
log = logging.getLogger("kvalet.store")


def admit_read(state: StoreState, read: Read, session: str) -> None:
    meta = read.meta
    assert meta is not None
    entry = state.books.entry(layout.index_key(meta))
    reason = refuse_read(state, read, meta.n_pages)
    if not reason and (entry is None or entry.unusable):
        why = state.books.quarantined.get(meta.key[:8])
        reason = "quarantined" if why else "missing"
    if reason or entry is None:
        state.answer(read.done, ReadOver(read, (ReadOutcome(reason, "admission"),)))
        return
    state.books.learn(entry.index_key, bytes(meta.key), parent_key(state, meta.parent))
    _queue(state, read, [entry], session)


def admit_tail_read(state: StoreState, read: Read, candidates: Sequence[TailRef], session: str) -> None:
    found = (state.books.entry(bytes.fromhex(ref.key_hex16)) for ref in candidates[:MAX_TAIL_CANDIDATES])
    parent = read.wish.parent if read.wish is not None else b""
    entries = [entry for entry in found if entry is not None and entry.file.parent == parent and not entry.unusable]
    tokens = max((entry.file.n_tokens for entry in entries), default=0)
    reason = refuse_read(state, read, state.home.geometry.pages_for(tokens))
    if not reason and (read.wish is None or len(read.wish.secret) != SECRET_BYTES):
        reason = "key"  # no tail's key can be checked without it; nothing is held against the files
    if not reason and not entries:
        reason = "missing"
    if reason:
        state.answer(read.done, ReadOver(read, (ReadOutcome(reason, "admission"),)))
        return
    _queue(state, read, entries, session)


def refuse_read(state: StoreState, read: Read, n_pages: int) -> str:
    if state.closed or not state.config.cap_bytes:
        return "closed"
    if state.read_breaker.is_open(state.clock()):
        return "io"
    if len(state.reads) >= state.config.queue_limit:
        return "resources"
    geometry = state.home.geometry
    need = geometry.bytes_of(read.meta) if read.meta is not None else geometry.file_bytes(n_pages)
    if read.record is None and len(read.slot) < need:
        log.error("store: read job %d has a slot of %d bytes where %d are needed", read.job, len(read.slot), need)
        return "internal"
    return ""


def _queue(state: StoreState, read: Read, entries: Sequence[Entry], session: str) -> None:
    read.files = tuple(entry.file for entry in entries)
    read.held = tuple(entry.index_key for entry in entries)
    state.books.pin(read.held)
    state.reads.put(read.job, read, session=session, klass=read.klass)
    state.for_readers.notify()


def admit_write(state: StoreState, job: int, meta: ChunkMeta, slot: memoryview, done: Done, klass: int) -> None:
    klass = min(max(klass, 0), KLASSES - 1)
    index_key = layout.index_key(meta)
    flying = state.board.get(index_key)
    if flying is not None and flying.stage not in (Stage.FAILED, Stage.DURABLE):
        flying.followers.append((job, done))
        state.board.raise_klass(flying, klass)
        return
    entry = state.books.entry(index_key)
    present = (entry is not None and not entry.unusable) or (flying is not None and flying.stage is Stage.DURABLE)
    if present and not state.closed and state.config.cap_bytes:
        state.books.learn(index_key, bytes(meta.key), parent_key(state, meta.parent))
        state.answer(done, WriteOver(job, "", skipped=True))
        return
    n_bytes = state.home.geometry.bytes_of(meta)
    parent_index = parent_key(state, meta.parent)
    reason = refuse_write(state, n_bytes, klass) or _refuse_chunk(state, meta, slot, n_bytes, parent_index)
    if reason:
        state.answer(done, WriteOver(job, reason))
        return
    room = state.books.reserve(n_bytes, state.spare_bytes)
    if not room.granted:
        state.answer(done, WriteOver(job, "full"))
        return
    file = layout.file_name(meta, layout.tenant_tag(state.disk.secret, meta.namespace))
    gates = gates_for(state, room.victims, file.name)
    parent = state.board.get(parent_index)
    recency = parent.recency if parent is not None else state.books.recency_under(parent_index, state.wall_ns())
    state.books.add_child(parent_index)
    state.budget.book(n_bytes)
    state.board.add(Write(job, meta, file, slot, done, klass, n_bytes, recency, gates, parent=parent_index))
    state.for_writers.notify()


def gates_for(state: StoreState, victims: Sequence[Entry], name: str) -> list[Gate]:
    """What must be deleted before this write may begin: what it pushed out, an older file of the same name, and, so that the
    disk never holds more than the cap, all that is being deleted while the books are above it."""
    own = bury_victims(state, victims)
    if state.books.used_bytes > state.config.cap_bytes:
        return list(dict.fromkeys(state.dying.values()))
    gates = (own, state.dying.get(name))
    return [gate for gate in gates if gate is not None]


def parent_key(state: StoreState, parent: bytes) -> bytes:
    """What the index calls the piece with this whole key: a tail is known by its first 8 bytes."""
    short = bytes(parent[:8])
    return short if state.books.entry(short) is not None or state.board.get(short) is not None else bytes(parent)


def refuse_write(state: StoreState, n_bytes: int, klass: int) -> str:
    if state.closed:
        return "closed"
    if not state.config.cap_bytes or state.write_breaker.is_open:
        return "read_only"
    if state.board.waiting() >= state.config.queue_limit:
        return "resources"
    if not state.budget.allows(n_bytes, klass, state.clock()):
        return "budget"
    return ""


def _refuse_chunk(state: StoreState, meta: ChunkMeta, slot: memoryview, n_bytes: int, parent_index: bytes) -> str:
    if slot.readonly or len(slot) < n_bytes:
        log.error("store: a write of %d bytes has a slot of %d bytes, readonly=%s", n_bytes, len(slot), slot.readonly)
        return "internal"
    if meta.parent == state.books.root or state.books.has(meta.parent):
        return ""
    parent = state.board.get(parent_index)
    return "" if parent is not None and parent.stage is not Stage.FAILED else "ancestor"


def bury_victims(state: StoreState, victims: Sequence[Entry]) -> Gate | None:
    """Evicted entries: out of the index already, unlinked by the janitor. The gate opens when all are gone."""
    if not victims:
        return None
    gate = Gate(len(victims))
    state.gone += keys_of(victims)
    for victim in victims:
        state.touched.pop(victim.file.name, None)
    state.bury([Burial(victim.file, victim.n_bytes, gate) for victim in victims])
    return gate


def evict_to_cap(state: StoreState) -> None:
    """At open: the cap may be lower than what is there. A tier that is switched off deletes nothing."""
    if state.config.cap_bytes:
        over = min(state.books.used_bytes - state.config.cap_bytes, state.books.live_bytes)
        bury_victims(state, state.books.evict(over) or ())


def cancel(state: StoreState, job: int) -> None:
    read = state.reads.remove(job)
    if read is not None:
        state.answer(read.done, ReadOver(read, (ReadOutcome("cancelled", "queue"),)))
        return
    write = state.board.remove_queued(job)
    if write is None:
        return
    for one in state.board.fail(write, "cancelled"):
        for done, over in state.finish_write(one):
            state.answer(done, over)
        if one.tmp:
            state.tmp_garbage.append(one)
