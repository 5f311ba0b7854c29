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
from kvalet.sched.record import restored
from kvalet.sched.session import Turn
from kvalet.sched.states import TransferCause, TransferState
from kvalet.sched.transfer_record import Transfer, TransferKind


def begin(board: Board, turn: Turn, match: Match) -> None:
    """Attach ``turn`` to every source of its match; new restores take their pages from its spare ones, which suffice."""
    for source in match.sources:
        transfer = source.attach or _reserve(board, turn, match, source)
        transfer.askers.append(turn)
        turn.restores.append(transfer)
        if source.attach is not None:
            board.waiting_reads.note(transfer)
            board.waiting_copies.note(transfer)
        elif transfer.slot is not None:
            board.waiting_copies.add(transfer)
        else:
            board.waiting_reads.add(transfer)
    turn.restore_from = board.now
    turn.restore_until = board.now + board.config.restore_deadline_s
    board.wake(turn.restore_until)


def _reserve(board: Board, turn: Turn, match: Match, source: Source) -> Transfer:
    """Pages are leased, and the RAM slot is held where there is one: nothing is on its way yet."""
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
    transfer.pages = [turn.spare.popleft() for _ in range(source.n_pages)]
    transfer.n_pages = source.n_pages
    board.ledger.lend_all(transfer.pages)
    board.restoring_pages += source.n_pages
    if chunk is not None and source.from_disk:
        transfer.pinned = True
        board.out.append(PinDisk((chunk.key,)))
    elif chunk is not None and chunk.slot is not None:
        _hold_in_ram(board, transfer, chunk.slot)
    return transfer


def _hand_back(board: Board, transfer: Transfer, turn: Turn, pages: list[PageId]) -> None:
    board.restoring_pages -= len(pages)
    for page in pages:
        board.ledger.own(page)
        board.ledger.unlease(page)
        turn.spare.append(page)
        transfer.pages.remove(page)


def pump(board: Board) -> None:
    """Send the reads that wait for a slot, as slots allow, and the copies that wait for the link, up to ``copies_ahead``; of
    the oldest asker first. What RAM holds by now is not read."""
    reads, copies = board.waiting_reads, board.waiting_copies
    while (transfer := reads.first() if reads else None) is not None:
        chunk = transfer.chunk
        if chunk is not None and chunk.slot is not None:
            reads.discard(transfer)
            _hold_in_ram(board, transfer, chunk.slot)
            board.unpin_disk(transfer)
            copies.add(transfer)
        elif not _read(board, transfer):
            break
    while copies and board.copies_in < board.config.copies_ahead and (transfer := copies.first()) is not None:
        copies.discard(transfer)
        _copy_in(board, transfer)


def _hold_in_ram(board: Board, transfer: Transfer, slot: SlotId) -> None:
    """The bytes are in RAM and stay there until they are copied."""
    board.chunks.book.hold(slot)
    transfer.slot, transfer.staging, transfer.from_disk = slot, False, False


def _read(board: Board, transfer: Transfer) -> bool:
    """Whether a slot was free. One staging slot is left for ancestor copies where there are several."""
    reserve = 1 if board.staging.n_slots > 1 else 0
    staging = board.take_staging_slot() if board.staging.free > reserve else None
    slot = staging if staging is not None else (board.take_ram_slot() if transfer.chunk is not None else None)
    if slot is None:
        return False
    transfer.slot, transfer.staging = slot, staging is not None
    board.advance(transfer, TransferCause.READ)
    board.waiting_reads.discard(transfer)
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
    board.copies_in += 1
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


def on_copy_done(board: Board, transfer: Transfer, event: CopyDone) -> bool:
    """True: nothing that is decided elsewhere has changed. All its askers wait for more, no page came free, and nobody may have
    waited for its slot."""
    board.copies_in -= 1
    transfer.copy_ms = event.copy_ms
    if transfer.abandoned:
        board.finish_transfer(transfer, TransferCause.COMPLETE)
        return False
    free = board.ledger.free
    transfer.arrived = True
    if transfer.slot is not None:
        board.book_of(transfer).release(transfer.slot)
        transfer.slot = None
    askers = list(transfer.askers)
    for turn in askers:
        _join_arrived(board, turn)
    awaited = transfer.staging or board.slot_wait_since is not None
    return not awaited and board.ledger.free == free and all(turn.restores for turn in askers)


def on_copy_failed(board: Board, transfer: Transfer) -> list[Turn]:
    """Returns the turns that must go back to the queue."""
    board.copies_in -= 1
    return fail(board, transfer, "copy")


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
        restored(turn, transfer, board.config.page_bytes)


def _join(board: Board, turn: Turn, transfer: Transfer, chunk: Chunk) -> None:
    """The pages enter the index after the turn's cursor; a page whose ids are in it already is given back."""
    node = turn.cursor
    assert node is not None
    size = board.config.page_tokens
    skip = (node.end - chunk.first_token) // size - transfer.first_page  # pages that are on the device by now
    at = (transfer.first_page + skip) * size
    ids, pages = chunk.ids[at : at + len(transfer.pages[skip:]) * size], transfer.pages[skip:]
    if turn.calls:  # deterministic mode knows the calls of this turn's tokens only
        ids = ids[: common_prefix(ids, tuple(turn.ids[node.end : node.end + len(ids)]))]
        pages = pages[: -(-len(ids) // size)]
    for i, page in enumerate(pages if turn.calls else ()):
        child = board.insert_page(node, turn, ids[i * size : i * size + size], page)
        if child is None:
            break
        node = child
    if not turn.calls and pages:
        node = board.index.insert_run(node, ids, pages, board.now)
    board.index.ranking.push(node)
    if node.end == chunk.end and node.chunk is None and chunk.node is None:
        board.chunks.join(chunk, node)
    board.counters.restored_pages += len(transfer.pages)
    board.counters.restored_chunks_disk += transfer.from_disk
    board.counters.restored_chunks_ram += not transfer.from_disk
    board.finish_transfer(transfer, TransferCause.COMPLETE)


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
