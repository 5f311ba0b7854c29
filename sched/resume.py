"""How a session comes back after a restart: by its records, read once when it is opened by name.

Until they are read, at most ``record_wait_s``, its turns wait in the queue (they can be cancelled there); then they go on with
what is known. What a record tells are hints: ids to compare a prompt with, never keys to look KV up by. Its branches are only
seen by turns of the same tenant space. A record that is damaged, or whose parts do not fit together, costs the history it
would have told; one whose chunks are partly gone resumes at the longest prefix that is left, as the match finds it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from kvalet.sched.board import Board
from kvalet.sched.calls import codes_of
from kvalet.sched.commands import ReadRecords, TellSession
from kvalet.sched.events import AskSession, ForkSession, RecordsRead
from kvalet.sched.growth import pin
from kvalet.sched.lines import Ask, Line, Load, Saved
from kvalet.sched.records import number, stored, trim
from kvalet.sched.session import MAX_BRANCHES, Branch, Session, Turn
from kvalet.sched.session_state import SessionState
from kvalet.store.record import Record

MAX_ASKS = 64
"""Questions that wait for one session's records; one more is answered with what is known."""


def load(board: Board, session: Session) -> None:
    """Ask the disk, once, for the records of a session that was just opened."""
    session.looked = True
    branches = tuple(islice(stored(board, session.tenant, session.name), MAX_BRANCHES))
    if branches:
        transfer = number(board, len(branches))
        session.loading, session.load_until = transfer, board.now + board.config.record_wait_s
        board.lines.loads[transfer] = Load([session])
        board.out.append(ReadRecords(transfer, session.tenant, session.name, branches))
        board.wake(session.load_until)


def on_read(board: Board, event: RecordsRead) -> list[Turn]:
    """Returns the turns that may go on now. An answer that comes too late for them still completes the session."""
    load = board.lines.loads.pop(event.transfer, None)
    if load is None:
        raise board.story.defect(f"records for {event.transfer}, which nobody waits for")
    board.counters.read_records += len(event.records)
    board.counters.record_read_failures.update(event.failures)
    turns = []
    for session in load.sessions:
        if board.sessions.find(session.tenant, session.name) is session:  # not closed or forgotten meanwhile
            _take_in(board, session, event.records)
        turns += _loaded(board, session)
    _answer_all(board, load)
    return turns


def expire(board: Board) -> list[Turn]:
    """The disk takes too long: the turns go on without their records."""
    turns = []
    for load in board.lines.loads.values():
        late = [s for s in load.sessions if s.loading is not None and board.now >= s.load_until]
        for session in late:
            board.counters.record_read_failures["deadline"] += 1
            turns += _loaded(board, session)
        if late:
            _answer_all(board, load)
    return turns


def _loaded(board: Board, session: Session) -> list[Turn]:
    session.loading = None
    return [board.turns[turn] for turn in sorted(session.turns) if not board.turns[turn].recalled]


def _take_in(board: Board, session: Session, records: tuple[Record, ...]) -> None:
    """Branches of the records, oldest first, before those that the session has by now; one that it has stays as it is."""
    known = {branch.id for branch in session.branches}
    room = MAX_BRANCHES - len(session.branches)
    back: list[Branch] = []
    own = [record for record in records if (record.tenant, record.session) == (session.tenant, session.name)]
    if any(record.pinned for record in own):
        board.lines.set_pinned(session, True)
    for record in records[: max(room, 0)]:
        if not fits(record, board.config.chunk_tokens):
            board.counters.record_read_failures["refused"] += 1
        elif record.branch not in known:
            branch = Branch(
                record.ids, record.boundary, record.kv_len, b"", record.decoded, record.branch, record.parent, record.fork_at,
                record.space,
            )  # fmt: skip
            line = Line(session, branch, record.chunk_keys, record.tail_key)
            if record in own:
                line.saved = Saved(branch, record.kv_len, record.pinned)
                line.told = replace(record, ids=(), decoded=(), chunk_keys=(), tail_key=None, state_keys=())
            session.lines[branch.id] = line
            board.lines.add(line)
            back.append(branch)
            known.add(branch.id)
    session.branches[:0] = reversed(back)


def fits(record: Record, chunk_tokens: int) -> bool:
    """The parts of the record agree with each other (rule 5); else none of it is used."""
    whole, rest = divmod(record.kv_len, chunk_tokens)
    pieces = len(record.chunk_keys) == whole and (record.tail_key is not None) == (rest > 0)
    lengths = 0 < record.boundary <= len(record.ids) and 0 < record.kv_len <= len(record.ids)
    ends = [at for pair in record.decoded for at in pair]
    return pieces and lengths and ends == sorted(ends) and all(0 <= at <= len(record.ids) for at in ends)


def open_stored(board: Board, tenant: str, name: str) -> Session | None:
    """The open session of that name, or one that the disk has records of; None if there is neither, or no room."""
    session = board.sessions.find(tenant, name)
    if session is None and stored(board, tenant, name):
        session = board.sessions.open_named(tenant, name)
        if session is not None:
            load(board, session)
    return session


def fork(board: Board, event: ForkSession) -> None:
    """The child is given the parent's branches, with lines of its own for them, and waits for what is still read of it."""
    parent = open_stored(board, event.tenant, event.parent)
    if parent is None or not board.sessions.fork(parent, event.tenant, event.child):
        return
    child = board.sessions.find(event.tenant, event.child)
    assert child is not None
    trim(board, child)
    for branch in child.branches:
        source = parent.lines.get(branch.id)
        if source is not None and branch.id not in child.lines:
            line = Line(child, branch, source.keys, source.tail, source.node, used=source.used)
            child.lines[branch.id] = line
            board.lines.add(line)
    load_under_way = None if parent.loading is None else board.lines.loads.get(parent.loading)
    if load_under_way is not None and child.loading is None and child is not parent:
        load_under_way.sessions.append(child)
        child.looked, child.loading, child.load_until = True, parent.loading, parent.load_until


# what is asked about a session


def ask(board: Board, event: AskSession) -> None:
    """Only a wish to pin makes a session that nobody knows."""
    session = open_stored(board, event.tenant, event.session)
    if session is None and event.pinned:
        session = board.sessions.open_named(event.tenant, event.session)
    if session is None:
        full = bool(event.pinned or stored(board, event.tenant, event.session))
        board.out.append(TellSession(event.request, None if full else SessionState()))
        return
    if not session.looked:
        load(board, session)
    question = Ask(event.request, event.pinned)
    waiting = None if session.loading is None else board.lines.loads.get(session.loading)
    if waiting is not None and waiting.sessions[0] is session and len(waiting.asks) < MAX_ASKS:
        waiting.asks.append(question)
    else:
        _answer(board, session, question)


def _answer_all(board: Board, load: Load) -> None:
    asks, load.asks = load.asks, []
    for question in asks:
        _answer(board, load.sessions[0], question)


def _answer(board: Board, session: Session, question: Ask) -> None:
    if question.pinned is not None and not session.closed:
        pin(board, session, question.pinned)
    board.out.append(TellSession(question.request, SessionState() if session.closed else state_of(board, session)))


def state_of(board: Board, session: Session) -> SessionState:
    latest = session.branches[-1] if session.branches else None
    line = session.lines.get(latest.id) if latest is not None else None
    return SessionState(
        known=True,
        pinned=session.pinned,
        branches=len(session.branches),
        turns=len(session.turns),
        tokens=latest.kv_len if latest is not None else 0,
        saved_tokens=line.saved_tokens if line is not None else 0,
        refused=next((other.refused for other in session.lines.values() if other.refused), ""),
        pages=_resident_pages(board, latest) if latest is not None else (),
    )


def _resident_pages(board: Board, branch: Branch) -> tuple[int, ...]:
    root = board.index.roots.get(branch.secret)
    if root is None:
        return ()
    ranges = (*branch.decoded, (len(branch.ids), len(branch.ids)))
    calls = codes_of(ranges, board.config.deterministic_piece) if board.config.deterministic else ()
    return tuple(node.page for node in board.index.walk(root, branch.ids, branch.kv_len, calls))
