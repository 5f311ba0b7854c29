"""The whole-state check. What must hold after every event, in one place; run after each event in tests. In production the same
is looked at in slices, when nothing runs (``patrol.py``).

1. Pages: free, held and leased only sum to the pool, and the claims booked equal those counted from the index, the turns,
   the steps in flight and the transfers.
2. Index: closed under prefixes, whole pages inside, pins, leaves and idle counts as counted from the turns.
3. Slots: each in one condition; keys and holders as counted from chunks and transfers.
4. Chunks: each has a reason to be in the map; what is only in RAM has all its ancestors somewhere; both directions of
   every link agree.
5. Turns: a queued one owns nothing; each other one is exactly where its state says; rows, sessions and queue agree.
6. Transfers: live ones only, each known to its chunk and its askers.
7. Lines: one beside each branch of a session whose branches the disk is to know, in the books under its own pieces; what is
   queued lives; what is pinned in the store until a record is durable is so for a reason.
8. Reports: computed + resident + RAM + disk == prompt, once a turn has begun to be fed.
"""

from __future__ import annotations

from collections import Counter

from kvalet.sched.board import Board
from kvalet.sched.chunks import Chunk
from kvalet.sched.lines import Line
from kvalet.sched.pages import LedgerError
from kvalet.sched.prefix import Node
from kvalet.sched.ranking import RamClass
from kvalet.sched.session import Session, Turn
from kvalet.sched.states import TransferState, TurnState
from kvalet.sched.transfer_record import TransferKind
from kvalet.store.ids import ChunkKey
from kvalet.store.ram import RamBookError


def check(board: Board) -> None:
    """Raises CoreDefect with the story at the first invariant that does not hold."""
    try:
        _check_pages(board)
        _check_index(board)
        _check_slots(board)
        _check_chunks(board)
        check_turns(board)
        check_transfers(board)
        _check_lines(board)
    except (AssertionError, LedgerError, RamBookError) as error:
        raise board.story.defect(f"{type(error).__name__}: {error}") from error


def demand(condition: bool, what: str, *about: object) -> None:
    if not condition:
        raise AssertionError(f"{what}: {', '.join(map(str, about))}")


def _check_pages(board: Board) -> None:
    owners = [0] * board.config.n_pages
    leases = [0] * board.config.n_pages
    for node in board.index.nodes():
        owners[node.page] += 1
    for turn in board.turns.values():
        for page in turn.table:
            owners[page] += 1
        for page in turn.spare:
            owners[page] += 1
    for record in board.steps:
        for page in record.leases:
            leases[page] += 1
    for transfer in board.transfers.values():
        for page in transfer.pages:
            leases[page] += 1
    board.ledger.check(owners, leases)


def _check_index(board: Board) -> None:
    index = board.index
    pins = pins_of_turns(board)
    n_nodes = n_idle = n_leaves = 0
    for node in index.nodes():
        n_nodes += 1
        n_idle += node.pins == 0
        n_leaves += not node.children
        check_node(board, node, pins)
    demand(n_nodes == len(index.by_page), "nodes by page", n_nodes, len(index.by_page))
    demand((n_nodes, n_idle, n_leaves) == (index.n_nodes, index.n_idle, len(index.leaves)), "index counts", n_nodes, n_idle)


def pins_of_turns(board: Board) -> Counter[Node]:
    """How often each node, and each above it, is stood on."""
    pins: Counter[Node] = Counter()
    for turn in board.rows.values():
        for at in (turn.cursor, turn.source):
            while at is not None:
                pins[at] += 1
                at = at.parent
    return pins


def check_node(board: Board, node: Node, pins: Counter[Node]) -> None:
    index, size = board.index, board.config.page_tokens
    demand(node.pins == pins[node], "pins", node, pins[node])
    demand((node in index.leaves) == (not node.children), "leaf", node)
    assert node.parent is not None
    demand(index.by_page.get(node.page) is node, "another node has the page", node)
    demand(node.parent.children.get(node.key) is node, "parent does not know", node)
    demand(len(node.ids) == size or (0 < len(node.ids) < size and not node.children), "page of odd size", node)
    demand(node.end == node.parent.end + len(node.ids), "end", node)
    demand(node.chunk is None or node.chunk.node is node, "chunk link", node, node.chunk)
    if node.end % board.config.chunk_tokens == 0:
        demand(node.chunk is not None, "a whole chunk on the device is not in the map", node)


def _check_slots(board: Board) -> None:
    board.chunks.book.check()
    board.staging.check()
    holders: Counter[int] = Counter(t.slot for t in board.transfers.values() if t.slot is not None)
    for book in (board.chunks.book, board.staging):
        for slot in book.slots:
            demand(book.holders(slot) == holders[slot], "holders of slot", slot, book.holders(slot), holders[slot])
    for key, slot in board.chunks.book.filled():
        chunk = board.chunks.get(key)
        demand(chunk is not None and chunk.slot == slot, "slot holds a chunk that the map does not have there", slot, chunk)


def _check_chunks(board: Board) -> None:
    in_ram = board.chunks.in_ram
    demand(sum(in_ram.counts.values()) == sum(1 for _ in board.chunks.book.filled()), "classes in RAM", in_ram.counts)
    for chunk in board.chunks:
        check_chunk(board, chunk)


def check_chunk(board: Board, chunk: Chunk) -> None:
    where = chunk.node or chunk.slot is not None or chunk.incoming or chunk.outgoing or chunk.children
    demand(bool(where), "no reason to be in the map", chunk)
    demand(chunk.tail == (len(chunk.ids) < board.config.chunk_tokens), "tail", chunk)
    demand(not chunk.tail or not chunk.children, "a tail has children", chunk)
    if chunk.node is not None:
        demand(chunk.node.chunk is chunk and chunk.node.end == chunk.end, "node link", chunk)
    kind = RamClass.CLEAN if chunk.on_disk else RamClass.SHADOWED if chunk.node is not None else RamClass.ONLY
    demand(board.chunks.in_ram.class_of(chunk) is (None if chunk.slot is None else kind), "class in RAM", chunk)
    if chunk.slot is not None:
        demand(board.chunks.book.key_of(chunk.slot) == chunk.key, "slot link", chunk)
        demand(board.chunks.book.is_clean(chunk.slot) == chunk.on_disk, "clean", chunk)
        _check_ancestors(chunk)
    if chunk.parent is not None:
        demand(board.chunks.get(chunk.parent.key) is chunk.parent, "parent is not in the map", chunk)
        demand(chunk.parent.children.get(chunk.key) is chunk, "parent does not know", chunk)


def _check_ancestors(chunk: Chunk) -> None:
    """What RAM alone holds can be used: all before it exists."""
    parent = chunk.parent
    if parent is not None and not chunk.on_disk and chunk.slot is not None:
        demand(parent.exists, "an ancestor is lost", chunk, parent)


def _check_lines(board: Board) -> None:
    lines = board.lines
    known: set[Line] = set()
    pinned: Counter[ChunkKey] = Counter()
    for session in board.sessions:
        check_session(board, session)
        known.update(session.lines.values())
        if session.pinned:
            for line in session.lines.values():
                pinned.update(line.pieces)
    demand(pinned == lines.pinned, "pinned pieces", pinned - lines.pinned, lines.pinned - pinned)
    for queue in (lines.checkpoints, lines.stalled, *lines.by_end.values()):
        demand(set(queue) <= known, "a line of nobody is queued", set(queue) - known)
    for job in lines.jobs.values():
        demand(job.line.sending is job.saved, "a record under way that its line does not know", job)


def check_session(board: Board, session: Session) -> None:
    lines = board.lines
    branches = {branch.id: branch for branch in session.branches}
    demand(set(session.lines) <= set(branches), "a line without a branch", session)
    demand(not session.closed, "a closed session is in the book", session)
    demand(session.loading is None or session in lines.loads[session.loading].sessions, "nobody loads", session)
    for name, line in session.lines.items():
        branch = branches[name]
        demand(line.session is session and line.branch is branch, "line and branch differ", line, branch)
        whole, rest = divmod(branch.kv_len, board.config.chunk_tokens)
        demand(len(line.keys) == whole and (line.tail is None) == (rest == 0), "pieces and kv_len differ", line)
        demand(line in lines.by_end.get(line.last, ()), "nobody would notice its last piece", line)
        demand(not line.held or session.pinned or line.sending is not None, "keys are held for nothing", line)


def check_turns(board: Board) -> None:
    lag = board.config.lag
    demand(len(board.steps) <= lag + 1, "steps in flight", board.steps)
    demand(board.queue == sorted(board.queue, key=lambda t: t.order), "queue order", board.queue)
    queued = {t.id for t in board.turns.values() if t.state is TurnState.QUEUED}
    demand(queued == {t.id for t in board.queue} and len(queued) == len(board.queue), "queue", queued)
    admitted = [t for t in board.turns.values() if t.state is not TurnState.QUEUED]
    demand({t.row for t in admitted} == set(board.rows) and len(admitted) == len(board.rows), "rows", admitted)
    for turn in board.turns.values():
        demand(turn.id in turn.session.turns, "session does not know", turn)
        demand(turn.state is not TurnState.ENDED, "ended turn is alive", turn)
        _check_turn(turn, lag)
        if turn.want_node is not None:
            demand(turn in turn.want_node.wanters, "wanter", turn)


def _check_turn(turn: Turn, lag: int) -> None:
    report = turn.report
    if turn.prefilled_once:
        parts = report.computed_tokens + report.resident_tokens + report.ram_tokens + report.disk_tokens
        demand(parts == turn.n_prompt and report.computed_tokens > 0, "sum of the report", report, turn)
    if turn.state is TurnState.QUEUED:
        owns = turn.table or turn.spare or turn.restores or turn.cursor or turn.source or turn.row is not None
        demand(not owns, "a queued turn owns something", turn)
        return
    demand(turn.cursor is not None and turn.row is not None, "an admitted turn stands nowhere", turn)
    demand(turn.want_node is None, "an admitted turn still wants", turn)
    if turn.state is TurnState.RESTORING:
        demand(not turn.table and bool(turn.restores), "restoring", turn)
        return
    demand(not turn.restores, "restores of a turn that is fed", turn)
    demand(0 <= turn.kv_len <= turn.fed <= len(turn.ids) + turn.pending, "lengths", turn)
    demand(0 <= turn.pending <= lag + 1, "pending", turn)
    demand((turn.state is TurnState.PAUSED) == turn.blocked, "blocked and paused differ", turn)


def check_transfers(board: Board) -> None:
    restores = [t for t in board.transfers.values() if t.kind is TransferKind.RESTORE and not t.abandoned]
    demand(board.restoring_pages == sum(len(t.pages) for t in restores), "restoring pages", board.restoring_pages)
    demand(board.spill_frees == sum(t.frees for t in board.transfers.values()), "spill frees", board.spill_frees)
    for kind, n in board.under_way.items():
        demand(n == sum(t.kind is kind for t in board.transfers.values()), f"{kind.value} under way", n)
    waiting = [t for t in restores if t.state is TransferState.RESERVED]
    demand({t for t in waiting if t.slot is None} == set(board.waiting_reads), "waiting reads", waiting)
    demand({t for t in waiting if t.slot is not None} == set(board.waiting_copies), "waiting copies", waiting)
    out = [t for t in board.transfers.values() if t.kind is TransferKind.RESTORE and t.state is TransferState.COPYING]
    demand(board.copies_in == sum(not t.arrived for t in out), "copies to the device", board.copies_in)
    for transfer in board.transfers.values():
        demand(transfer.live, "a transfer that is over is booked", transfer)
        chunk = transfer.chunk
        if transfer.kind is TransferKind.RESTORE:
            demand(transfer.abandoned == (not transfer.askers), "askers", transfer)
            demand(all(transfer in turn.restores for turn in transfer.askers), "asker does not know", transfer)
            if not transfer.abandoned and chunk is not None:
                demand(chunk.incoming is not None, "the chunk does not know", transfer)
        else:
            demand(chunk is not None and chunk.outgoing is transfer, "the chunk does not know", transfer)
        if transfer.state in (TransferState.READING, TransferState.WRITING):
            demand(transfer.slot is not None, "no slot", transfer)
    for turn in board.rows.values():
        for transfer in turn.restores:
            known = transfer.id in board.transfers or not transfer.live  # not live: another asker has joined it already
            demand(turn in transfer.askers and known, "restore without transfer", turn, transfer)
