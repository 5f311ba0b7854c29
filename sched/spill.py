"""Making room: pages out of the device at eviction time, and slots out of RAM.

A victim is a leaf of the page index that nobody stands on. With it go the pages before it, back to the start of its
chunk, as far as nobody else uses them; what is copied is always the whole chunk (or the whole tail) up to the leaf. If RAM
or disk cover those ids already, nothing is copied.

RAM gives a slot by: a free one; the lowest-ranked chunk that a copy below or above covers; and where RAM cannot drain (no
disk that takes writes) the lowest-ranked chunk of all, if it ranks below the victim. Otherwise the victim waits for the
disk, and is dropped after ``slot_wait_s`` if somebody needs its pages (tokens are kept, the KV is computed again).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

from kvalet.runtime.plan import PageId, SlotId
from kvalet.sched.board import Board
from kvalet.sched.chunks import Chunk
from kvalet.sched.commands import CopyOut
from kvalet.sched.events import CopyDone
from kvalet.sched.policy import Rank, rank_chunk, rank_pages
from kvalet.sched.prefix import Node
from kvalet.sched.ranking import RamClass
from kvalet.sched.states import TransferCause, TransferState
from kvalet.sched.transfer_record import Transfer, TransferKind

MAX_VICTIMS = 32
"""Of one ``decide``: looking for more would hold the loop for milliseconds."""
MAX_COPY_FAILURES = 3
"""After so many failed copies of one chunk in a row it counts as a victim without a slot."""


class NoSlot(Enum):
    WAIT = auto()
    """RAM is full of what only the disk can take, and it is taking."""
    NEVER = auto()
    """No RAM tier, or the victim ranks below all that RAM holds and RAM cannot drain."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What leaves the device together. ``nodes``: deepest first. ``pages``: all from the chunk's start to the leaf."""

    leaf: Node
    nodes: tuple[Node, ...]
    pages: tuple[PageId, ...]
    ids: tuple[int, ...]
    parent: Chunk | None
    rank: Rank


def unit_of(board: Board, leaf: Node) -> Unit:
    nodes, path = removable(board, leaf)
    parent = path[-1].parent
    assert parent is not None
    path.reverse()
    ids = leaf.chunk.ids if leaf.chunk is not None else tuple(chain.from_iterable([node.ids for node in path]))
    return Unit(leaf, tuple(nodes), tuple([node.page for node in path]), ids, parent.chunk, rank_pages(leaf))


def removable(board: Board, leaf: Node) -> tuple[list[Node], list[Node]]:
    """(the nodes that can leave with ``leaf``, all back to the start of its chunk), deepest first."""
    start = (leaf.end - 1) // board.config.chunk_tokens * board.config.chunk_tokens
    nodes: list[Node] = []
    path: list[Node] = []
    at = leaf
    alone = leaf.pins == 0 and not leaf.children
    while at.end > start:
        if alone and (at is leaf or (at.pins == 0 and len(at.children) == 1 and not at.wanters)):
            nodes.append(at)
        else:
            alone = False
        path.append(at)
        assert at.parent is not None
        at = at.parent
    return nodes, path


def pick_victim(board: Board, *, spare_pinned: bool = False) -> Unit | None:
    """The lowest-ranked leaf that can leave now: nobody stands on it, no transfer works on it, no step touches it. One that a
    queued turn wants goes only when there is no other. ``spare_pinned``: none that ends a piece of a pinned session."""

    def can_leave(leaf: Node) -> bool:  # the ranking leaves out who is stood on or being copied
        return not board.step_leases(leaf.page) and not (spare_pinned and _is_pinned(board, leaf.chunk))

    leaf = board.index.ranking.least(lambda leaf: not leaf.wanters and can_leave(leaf)) or board.index.ranking.least(can_leave)
    return None if leaf is None else unit_of(board, leaf)


def coming_free(board: Board) -> int:
    """Pages that come free without any further decision: leases about to end, spills under way."""
    return board.ledger.leased_only - board.restoring_pages + board.spill_frees


def make_room(board: Board, wanted: int, *, urgent: bool) -> None:
    """Evict until ``wanted`` pages are free or coming free. ``urgent``: somebody waits for them, so that victims which find
    no slot in time are dropped; else they stay."""
    waited = spare = last_resort = False
    while board.ledger.free + coming_free(board) < wanted:
        if board.victims_left <= 0:
            board.wake(board.now)  # the rest after the loop has had its turn
            return
        board.victims_left -= 1
        unit = pick_victim(board, spare_pinned=True) if spare else pick_victim(board)
        if unit is None and spare:
            waited = True
            spare, last_resort = False, _pins_waited_enough(board)
            unit = pick_victim(board) if last_resort else None
        if unit is None:
            break
        if board.chunks.covered(unit.parent, unit.leaf.root.secret, unit.ids) or not board.chunks.can_link(unit.leaf):
            board.counters.evicted_clean_pages += len(unit.nodes)
            _remove(board, unit)
            continue
        slot = _slot_for(board, unit)
        if not isinstance(slot, NoSlot):
            _start_spill(board, unit, slot)
            board.slot_wait_since = board.lines.pin_wait_since = None
        elif not urgent:
            break
        elif slot is NoSlot.NEVER or _waited_enough(board):
            if _is_pinned(board, unit.leaf.chunk):
                if not last_resort:
                    spare = True  # pinned KV is not dropped while there is anybody else
                    continue
                board.counters.lost_pinned_chunks += 1
            board.counters.dropped_chunks += 1
            board.counters.dropped_pages += len(unit.nodes)
            _remove(board, unit)
            waited = waited or slot is NoSlot.WAIT
        else:
            return
    if urgent and not waited:
        board.slot_wait_since = None


def _waited_enough(board: Board) -> bool:
    if board.slot_wait_since is None:
        board.slot_wait_since = board.now
        board.wake(board.now + board.config.slot_wait_s)
    return board.now >= board.slot_wait_since + board.config.slot_wait_s


def _is_pinned(board: Board, chunk: Chunk | None) -> bool:
    """A pinned session's chain goes through it."""
    return chunk is not None and chunk.key in board.lines.pinned


def _pins_waited_enough(board: Board) -> bool:
    """Nothing but pinned KV is left to evict, and the disk has not taken it for ``pin_wait_s``: then turns come first."""
    lines = board.lines
    if lines.pin_wait_since is None:
        lines.pin_wait_since = board.now
        board.wake(board.now + board.config.pin_wait_s)
    return board.now >= lines.pin_wait_since + board.config.pin_wait_s


def lose_all(board: Board) -> None:
    """The device is lost: every page leaves the index. Counts what had no copy below, and what RAM holds in vain because
    something before it was only on the device."""
    in_ram = _only_in_ram(board)
    while board.index.leaves:
        leaf = next(iter(board.index.leaves))
        unit = unit_of(board, leaf)
        nodes = unit.nodes or (leaf,)
        if not board.chunks.covered(unit.parent, leaf.root.secret, unit.ids):
            board.counters.lost_device_pages += len(nodes)
        for node in nodes:
            board.remove_node(node)
    board.counters.lost_device_chunks += in_ram - _only_in_ram(board)


def _only_in_ram(board: Board) -> int:
    return sum(chunk.slot is not None and not chunk.on_disk for chunk in board.chunks)


def _remove(board: Board, unit: Unit) -> None:
    board.remove_nodes(unit.nodes)


def _slot_for(board: Board, unit: Unit) -> SlotId | NoSlot:
    chunk = unit.leaf.chunk
    if board.chunks.book.n_slots == 0:
        return NoSlot.WAIT if can_drain(board) else NoSlot.NEVER
    if chunk is not None and chunk.copy_failures >= MAX_COPY_FAILURES:
        return NoSlot.NEVER
    slot = board.take_ram_slot()
    if slot is not None:
        return slot
    book = board.chunks.book

    def unheld(chunk: Chunk) -> bool:
        return chunk.slot is not None and book.holders(chunk.slot) == 0

    victim = board.chunks.in_ram.least((RamClass.CLEAN, RamClass.SHADOWED), unheld)
    if victim is None and not can_drain(board):
        victim = board.chunks.in_ram.least((RamClass.ONLY,), lambda chunk: unheld(chunk) and not _is_pinned(board, chunk))
        if victim is None:
            return NoSlot.WAIT
        if rank_chunk(victim) >= unit.rank:
            return NoSlot.NEVER
        board.counters.ram_dropped_chunks += 1
    if victim is None:
        return NoSlot.WAIT
    board.chunks.drop_slot(victim)
    slot = board.take_ram_slot()
    if slot is None:
        raise board.story.defect(f"no slot is free after {victim} gave up its own")
    return slot


def can_drain(board: Board) -> bool:
    """The disk takes writes, as far as is known."""
    return board.disk.accepts_writes() and board.now >= board.write_retry_at


def _start_spill(board: Board, unit: Unit, slot: SlotId) -> None:
    chunk = board.chunks.link(unit.leaf, board.now)
    chunk.last_use = unit.leaf.last_use
    transfer = board.start_transfer(TransferKind.SPILL, chunk)
    transfer.slot = slot
    transfer.pages = list(unit.pages)
    transfer.n_pages = len(unit.pages)
    transfer.frees = len(unit.nodes)
    board.spill_frees += transfer.frees
    board.ledger.lease_all(unit.pages)
    board.advance(transfer, TransferCause.COPY)
    board.out.append(CopyOut(transfer.id, unit.pages, slot, n_tokens=len(unit.ids)))


def keep(board: Board) -> None:
    """Turns have been admitted: spills of what they stand on are not wanted any more."""
    if not board.spill_frees:
        return
    for transfer in board.transfers.values():
        if transfer.kind is not TransferKind.SPILL or transfer.frees == 0 or transfer.chunk is None:
            continue
        node = transfer.chunk.node
        if node is not None and node.pins and transfer.state is TransferState.COPYING:
            board.spill_frees -= transfer.frees
            transfer.frees = 0
            board.counters.cancelled_spills += 1
            board.cancel_transfer(transfer)


def on_copy_done(board: Board, transfer: Transfer, event: CopyDone) -> None:
    """The bytes are in RAM. The pages leave, unless somebody stands on them again; then the copy is a clean one."""
    chunk = transfer.chunk
    assert chunk is not None
    assert transfer.slot is not None
    chunk.copy_failures = 0
    if chunk.slot is None and chunk.exists:
        board.chunks.fill(chunk, transfer.slot)
        board.counters.spilled_chunks += 1
        board.counters.spilled_pages += transfer.n_pages
        _drop_shorter_tails(board, chunk)
    node = chunk.node
    board.let_go(chunk)
    if node is not None and not node.children and node.pins == 0:
        board.remove_nodes(removable(board, node)[0])
    board.finish_transfer(transfer, TransferCause.COMPLETE)


def on_copy_failed(board: Board, transfer: Transfer, message: str) -> None:
    """The pages stay where they are."""
    if transfer.chunk is not None and message != "cancelled":
        transfer.chunk.copy_failures += 1
        board.counters.copy_failures += 1
    board.finish_transfer(transfer, TransferCause.FAIL)


def _drop_shorter_tails(board: Board, chunk: Chunk) -> None:
    """Tails in RAM that ``chunk`` begins with are of no more use."""
    for other in list(board.chunks.children_of(chunk.parent, chunk.secret).values()):
        unused = other.slot is not None and board.chunks.book.holders(other.slot) == 0
        if other is not chunk and unused and len(other.ids) < len(chunk.ids) and chunk.ids[: len(other.ids)] == other.ids:
            board.chunks.drop_slot(other)
