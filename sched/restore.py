"""Restores: chunks from RAM or disk back into pages, for the turns that ask.

A restore leases its pages from the moment it is reserved, takes a slot when one is free (RAM's copy is its own slot),
and ends by joining the page index, in order from token 0. It is keyed by chunk: a second asker attaches, a leaving one
detaches, and the last one takes it down. What is before a bad chunk is used, what comes after is recomputed.

Failure: the pages of a failed restore pass to its oldest asker, which goes on without it; every other asker is answered
by ``fail``'s return value: it must go back to the queue and match again. No failure is an error to a client.
"""

from __future__ import annotations

from kvalet.runtime.plan import PageId, SlotId
from kvalet.sched.board import Board
from kvalet.sched.chunks import Chunk
from kvalet.sched.commands import CopyIn, PinDisk, ReadChunk, ReadTail
from kvalet.sched.events import CopyDone, ReadDone
from kvalet.sched.matching import Match, Source
from kvalet.sched.prefix import common_prefix
from kvalet.sched.session import Turn
from kvalet.sched.states import TransferCause, TransferState
from kvalet.sched.transfer_record import Transfer, TransferKind


def begin(board: Board, turn: Turn, match: Match) -> None:
    """Attach ``turn`` to every source of its match; new restores take their pages from its spare ones, which suffice."""
    for source in match.sources:
        transfer = source.attach or _reserve(board, turn, match, source)
        transfer.askers.append(turn)
        turn.restores.append(transfer)
    turn.restore_from = board.now
    turn.restore_until = board.now + board.config.restore_deadline_s
    board.wake(turn.restore_until)


def _reserve(board: Board, turn: Turn, match: Match, source: Source) -> Transfer:
    chunk = source.chunk
    if chunk is None and source.key is not None:
        parent = turn.restores[-1].chunk if turn.restores else None
        if parent is None and source.start:
            parent = match.path[source.start // board.config.page_tokens - 1].chunk
        chunk = board.chunks.ensure(match.root, parent, source.ids, board.now, source.key)
    if chunk is not None and source.from_disk:
        chunk.on_disk = True
    transfer = board.start_transfer(TransferKind.RESTORE, chunk)
    transfer.first_page, transfer.from_disk, transfer.question = source.first_page, source.from_disk, source.question
    for _ in range(source.n_pages):
        _lease(board, transfer, turn.spare.popleft())
    transfer.n_pages = len(transfer.pages)
    if chunk is not None and source.from_disk:
        transfer.pinned = True
        board.out.append(PinDisk((chunk.key,)))
    elif chunk is not None and chunk.slot is not None:
        _copy_from_ram(board, transfer, chunk, chunk.slot)
    if transfer.state is TransferState.RESERVED:
        board.waiting_reads[transfer.id] = transfer
    return transfer


def _lease(board: Board, transfer: Transfer, page: PageId) -> None:
    board.ledger.lease(page)
    board.ledger.disown(page)
    transfer.pages.append(page)
    board.restoring_pages += 1


def _hand_back(board: Board, transfer: Transfer, turn: Turn, pages: list[PageId]) -> None:
    board.restoring_pages -= len(pages)
    for page in pages:
        board.ledger.own(page)
        board.ledger.unlease(page)
        turn.spare.append(page)
        transfer.pages.remove(page)


def pump(board: Board) -> None:
    """Send the reads that wait for a slot, as slots allow, of the oldest asker first. What RAM holds by now is not read."""
    if not board.waiting_reads:
        return
    for transfer in sorted(board.waiting_reads.values(), key=lambda t: (min(a.order for a in t.askers), t.id)):
        chunk = transfer.chunk
        if chunk is not None and chunk.slot is not None:
            _copy_from_ram(board, transfer, chunk, chunk.slot)
        elif not _read(board, transfer):
            return


def _copy_from_ram(board: Board, transfer: Transfer, chunk: Chunk, slot: SlotId) -> None:
    board.chunks.book.hold(slot)
    board.waiting_reads.pop(transfer.id, None)
    transfer.slot, transfer.staging, transfer.from_disk = slot, False, False
    board.unpin_disk(transfer)
    _copy_in(board, transfer)


def _read(board: Board, transfer: Transfer) -> bool:
    """Whether a slot was free. One staging slot is left for ancestor copies where there are several."""
    reserve = 1 if board.staging.n_slots > 1 else 0
    staging = board.take_staging_slot() if board.staging.free > reserve else None
    slot = staging if staging is not None else (board.take_ram_slot() if transfer.chunk is not None else None)
    if slot is None:
        return False
    transfer.slot, transfer.staging = slot, staging is not None
    board.advance(transfer, TransferCause.READ)
    del board.waiting_reads[transfer.id]
    session = min(transfer.askers, key=lambda t: t.order).spec.session
    if transfer.chunk is not None:
        board.out.append(ReadChunk(transfer.id, board.chunks.meta(transfer.chunk), slot, session))
    elif transfer.question is not None:
        asked = transfer.question
        board.out.append(
            ReadTail(
                transfer.id, board.chunks.parent_bytes(asked.parent), asked.ordinal, asked.first_token, asked.ids,
                asked.candidates, slot, session, secret=asked.secret,
            )
        )  # fmt: skip
    return True


def _copy_in(board: Board, transfer: Transfer) -> None:
    board.advance(transfer, TransferCause.COPY)
    assert transfer.slot is not None
    places = tuple(range(transfer.first_page, transfer.first_page + len(transfer.pages)))
    board.out.append(CopyIn(transfer.id, transfer.slot, places, tuple(transfer.pages)))


def on_read_done(board: Board, transfer: Transfer, event: ReadDone) -> list[Turn]:
    """Returns the turns that must go back to the queue."""
    transfer.read_ms, transfer.verify_ms, transfer.n_bytes = event.read_ms, event.verify_ms, event.n_bytes
    board.counters.read_bytes += event.n_bytes
    if transfer.abandoned:
        board.finish_transfer(transfer, TransferCause.COMPLETE)
        return []
    board.unpin_disk(transfer)
    if transfer.question is not None and not _answered(board, transfer, event):
        return fail(board, transfer, "no_prefix")
    chunk = transfer.chunk
    assert chunk is not None
    assert transfer.slot is not None
    board.chunks.remember_tail(chunk)
    if not transfer.staging and chunk.slot is None:
        board.chunks.fill(chunk, transfer.slot)
    _copy_in(board, transfer)
    return []


def _answered(board: Board, transfer: Transfer, event: ReadDone) -> bool:
    """The reader found a tail: give it its chunk and keep only the pages it fills. False if it is of no use."""
    asked = transfer.question
    assert asked is not None
    turn = transfer.askers[0]
    parent = board.chunks.get(asked.parent) if asked.parent else None
    shared = common_prefix(event.ids, asked.ids)
    pages = -(-shared // board.config.page_tokens) - transfer.first_page
    if pages < 1 or (asked.parent is not None and parent is None):
        return False
    chunk = board.chunks.ensure(board.index.root(asked.secret), parent, event.ids, board.now, event.key)
    chunk.on_disk = True
    transfer.chunk = chunk
    if chunk.incoming is None:
        chunk.incoming = transfer
    _hand_back(board, transfer, turn, transfer.pages[pages:])
    transfer.n_pages = len(transfer.pages)
    return True


def on_copy_done(board: Board, transfer: Transfer, event: CopyDone) -> None:
    transfer.copy_ms = event.copy_ms
    if transfer.abandoned:
        board.finish_transfer(transfer, TransferCause.COMPLETE)
        return
    transfer.arrived = True
    if transfer.slot is not None:
        board.book_of(transfer).release(transfer.slot)
        transfer.slot = None
    for turn in list(transfer.askers):
        _join_arrived(board, turn)


def _join_arrived(board: Board, turn: Turn) -> None:
    """Join what has arrived and has all before it in, and step the turn down onto it."""
    while turn.restores and turn.restores[0].arrived:
        transfer = turn.restores[0]
        chunk = transfer.chunk
        assert chunk is not None
        assert turn.cursor is not None
        if chunk.first_token + transfer.first_page * board.config.page_tokens > turn.cursor.end:
            cut_short(board, turn, 0, "other_calls")  # deterministic mode: what is before it could not join
            return
        turn.restores.pop(0)
        if transfer.live:
            _join(board, turn, transfer, chunk)
        ids = turn.known_ids()
        for node in board.index.walk(turn.cursor, ids, min(len(ids) - 1, chunk.end), turn.calls):
            turn.cursor = board.index.step_down(node)
        transfer.askers.remove(turn)
        _record(board, turn, transfer)


def _join(board: Board, turn: Turn, transfer: Transfer, chunk: Chunk) -> None:
    """The pages enter the index after the turn's cursor; a page whose ids are in it already is given back."""
    node = turn.cursor
    assert node is not None
    size = board.config.page_tokens
    at = transfer.first_page * size
    for page in transfer.pages:
        if chunk.first_token + at == node.end:
            ids = chunk.ids[at : at + size]
            if turn.calls:  # deterministic mode knows the calls of this turn's tokens only
                ids = ids[: common_prefix(ids, tuple(turn.ids[node.end : node.end + size]))]
            child = board.insert_page(node, turn, ids, page) if ids else None
            if child is None:
                break
            node = child
        at += size
    board.index.ranking.push(node)
    if node.end == chunk.end and node.chunk is None and chunk.node is None:
        board.chunks.join(chunk, node)
    board.counters.restored_pages += len(transfer.pages)
    board.counters.restored_chunks_disk += transfer.from_disk
    board.counters.restored_chunks_ram += not transfer.from_disk
    board.finish_transfer(transfer, TransferCause.COMPLETE)


def _record(board: Board, turn: Turn, transfer: Transfer) -> None:
    turn.read_ms += transfer.read_ms
    turn.verify_ms += transfer.verify_ms
    turn.copy_ms += transfer.copy_ms
    assert transfer.chunk is not None
    turn.tiers.append((transfer.chunk.end, transfer.from_disk))
    if transfer.from_disk:
        turn.bytes_from_disk += transfer.n_bytes
    else:
        turn.bytes_from_ram += transfer.n_pages * board.config.page_bytes


def fail(board: Board, transfer: Transfer, reason: str) -> list[Turn]:
    """An answer was a failure: the run of every asker ends before this chunk. Returns those to be queued again."""
    if transfer.abandoned:
        board.finish_transfer(transfer, TransferCause.FAIL)
        return []
    oldest = min(transfer.askers, key=lambda turn: turn.order)
    others = [turn for turn in transfer.askers if turn is not oldest]
    for turn in others:
        detach(board, turn)
    if transfer.from_disk and transfer.chunk is not None:
        transfer.chunk.on_disk = board.disk.has(transfer.chunk.key)
    cut_short(board, oldest, oldest.restores.index(transfer), reason, failed=transfer)
    return others


def cut_short(board: Board, turn: Turn, keep: int, reason: str, failed: Transfer | None = None) -> None:
    """``turn`` gives up its restores from number ``keep`` on. Pages nobody else waits for become its spare ones, unless a
    copy into them is unfinished."""
    given_up, turn.restores = turn.restores[keep:], turn.restores[:keep]
    for transfer in given_up:
        transfer.askers.remove(turn)
        n_tokens = len(transfer.pages) * board.config.page_tokens
        turn.lost[reason] = turn.lost.get(reason, 0) + n_tokens
        if transfer.askers:
            continue
        if transfer is failed or transfer.state is not TransferState.COPYING or transfer.arrived:
            _hand_back(board, transfer, turn, list(transfer.pages))
        _take_down(board, transfer, over=transfer is failed)


def detach(board: Board, turn: Turn) -> None:
    """``turn`` leaves all its restores; those without other askers are taken down."""
    for transfer in turn.restores:
        transfer.askers.remove(turn)
        if not transfer.askers:
            _take_down(board, transfer, over=False)
    turn.restores.clear()


def _take_down(board: Board, transfer: Transfer, *, over: bool) -> None:
    """``over``: no command is out. Pages that no copy is writing are free at once; the rest when the answer comes."""
    if not transfer.live:
        return  # another asker, which had all before it in, has joined it already
    if over or transfer.state is TransferState.RESERVED or transfer.arrived:
        board.finish_transfer(transfer, TransferCause.FAIL)
        return
    board.cancel_transfer(transfer)
    board.restoring_pages -= len(transfer.pages)
    transfer.abandoned = True
    if transfer.state is TransferState.READING:
        board.free_pages(transfer)
    board.unpin_disk(transfer)
    board.detach_chunk(transfer)
