"""The invariants in slices, for a process that serves: a whole check of a large pool would hold the loop for 100 ms and more.

Each call looks at all turns and transfers (few, when nothing runs), at the sums, and at the next few pages, chunks, slots and
sessions; a *round* has looked at everything. What is looked at by itself is what ``invariants`` looks at; what it counts from
all nodes is held by the sums here: pages held, idle and leased, and slots by condition. A page that is lost, or free twice,
unbalances a sum at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice

from kvalet.sched import invariants
from kvalet.sched.board import Board
from kvalet.sched.invariants import demand

SLICE = 128
"""Pages, chunks, slots and sessions of one call: less than a millisecond of Python."""


class Patrol:
    """``step`` for the next slice. State may change between two calls; what came and went in between is not looked at."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._round: Iterator[None] | None = None
        self._events = -1

    def step(self) -> bool:
        """True when a round that began after the last event is complete. Raises CoreDefect at what does not hold."""
        board = self._board
        if self._round is None:
            self._round, self._events = self._walk(), board.counters.events
        try:
            self._sums()
            invariants.check_turns(board)
            invariants.check_transfers(board)
            deque(islice(self._round, SLICE), maxlen=0)
            return self._is_through()
        except (AssertionError, KeyError) as error:
            raise board.story.defect(f"{type(error).__name__}: {error}") from error

    def _is_through(self) -> bool:
        assert self._round is not None
        if next(self._round, self) is not self:
            return False
        self._round = None
        return self._events == self._board.counters.events

    def _sums(self) -> None:
        """What must balance whatever the slice is."""
        board = self._board
        index, ledger, book, in_ram = board.index, board.ledger, board.chunks.book, board.chunks.in_ram
        owned = {page for turn in board.turns.values() for page in (*turn.table, *turn.spare)}
        leased = {page for record in board.steps for page in record.leases}
        leased.update(page for transfer in board.transfers.values() for page in transfer.pages)
        mine = sum(page not in index.by_page for page in owned)
        demand(ledger.held == index.n_nodes + mine, "pages held", ledger, index.n_nodes, mine)
        alone = sum(page not in index.by_page and page not in owned for page in leased)
        demand(ledger.leased_only == alone, "pages leased only", ledger, alone)
        demand(index.n_nodes == len(index.by_page), "nodes by page", index.n_nodes, len(index.by_page))
        if not board.rows:
            demand(index.n_idle == index.n_nodes, "idle nodes", index.n_idle, index.n_nodes)
        keyless = {t.slot for t in board.transfers.values() if t.slot is not None and not t.staging}
        keyless = {slot for slot in keyless if book.key_of(slot) is None}
        demand(book.free + book.n_filled + len(keyless) == book.n_slots, "slots", book.free, book.n_filled, keyless)
        demand(sum(in_ram.counts.values()) == book.n_filled, "classes in RAM", in_ram.counts)

    def _walk(self) -> Iterator[None]:
        """Everything there is, one by one."""
        yield from self._pages()
        for chunk in list(self._board.chunks):
            if self._board.chunks.get(chunk.key) is chunk:
                invariants.check_chunk(self._board, chunk)
            yield
        for book in (self._board.chunks.book, self._board.staging):
            for slot in book.slots:
                holders = sum(t.slot == slot for t in self._board.transfers.values())
                demand(book.holders(slot) == holders, "holders of slot", slot, book.holders(slot), holders)
                key = book.key_of(slot)
                chunk_or_none = self._board.chunks.get(key) if key is not None else None
                demand(key is None or (chunk_or_none is not None and chunk_or_none.slot == slot), "key of slot", slot)
                yield
        for session in list(self._board.sessions):
            if self._board.sessions.holds(session):
                invariants.check_session(self._board, session)
            yield

    def _pages(self) -> Iterator[None]:
        board = self._board
        events, pins, owners, leases = -1, invariants.pins_of_turns(board), Counter[int](), Counter[int]()
        for page in range(1, board.config.n_pages):
            if events != board.counters.events:
                events, pins = board.counters.events, invariants.pins_of_turns(board)
                owners = Counter(p for turn in board.turns.values() for p in (*turn.table, *turn.spare))
                leases = Counter(p for record in board.steps for p in record.leases)
                leases.update(p for transfer in board.transfers.values() for p in transfer.pages)
            node = board.index.by_page.get(page)  # type: ignore[call-overload]  # PageId is an int
            counted = (owners[page] + (node is not None), leases[page])
            demand(board.ledger.claims(page) == counted, "claims of page", page, counted)  # type: ignore[arg-type]
            if node is not None:
                invariants.check_node(board, node, pins)
            yield
