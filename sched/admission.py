"""Who gets in, who gets pages, who has to go back: admission, growth, preemption, the watermark.

Order of every settling: running turns get the pages they grow into, oldest first; then the queue, oldest of the highest class
first; a turn that does not fit now may be passed by smaller ones ``MAX_PASSES`` times, then nobody passes. The oldest
running turn of the highest class is never preempted, so somebody always finishes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from kvalet.sched import lifecycle, resume, spill
from kvalet.sched.board import Board
from kvalet.sched.calls import calls_of
from kvalet.sched.commands import Accept, Refuse
from kvalet.sched.matching import Match, find_match, pages_needed
from kvalet.sched.session import Turn
from kvalet.sched.states import TurnState
from kvalet.sched.turns import EndReason, Refusal, TurnSpec

MAX_PASSES = 8
MAX_LOOKS = 16
LOOK_AGAIN = 256
RETRY_AFTER_S = 1.0


def submit(board: Board, spec: TurnSpec) -> None:
    """Answered by exactly one Accept or Refuse."""
    refusal = _refusal(board, spec)
    session = None
    if refusal is None:
        session = board.sessions.open(spec)
        if session is None:
            refusal = (Refusal.SESSIONS_FULL, f"{board.config.max_sessions} sessions are open and all have turns")
    if refusal is not None or session is None:
        assert refusal is not None
        board.counters.refused += 1
        retry = RETRY_AFTER_S if refusal[0] in (Refusal.QUEUE_FULL, Refusal.SESSIONS_FULL) else 0.0
        board.out.append(Refuse(spec.turn, refusal[0], refusal[1], retry))
        return
    if spec.turn in board.turns:
        raise board.story.defect(f"turn {spec.turn} was submitted twice")
    config = board.config
    pool_tokens = board.ledger.total * config.page_tokens
    n_prompt = len(spec.prompt)
    max_tokens = min(spec.params.max_tokens, config.context_tokens - n_prompt, pool_tokens - n_prompt + 1)
    params = replace(spec.params, max_tokens=max_tokens)
    turn = Turn(spec, session, params, board.now, list(spec.prompt))
    if session.name and not session.looked:
        resume.load(board, session)
    turn.recalled = session.loading is None
    if turn.recalled:
        _recall(board, turn)
    session.turns.add(turn.id)
    board.turns[turn.id] = turn
    board.counters.accepted += 1
    board.out.append(Accept(turn.id))
    lifecycle.enqueue(board, turn)


def _refusal(board: Board, spec: TurnSpec) -> tuple[Refusal, str] | None:
    config = board.config
    n_prompt = len(spec.prompt)
    pages = -(-n_prompt // config.page_tokens) + 1
    if board.device_lost:
        return Refusal.DEVICE_LOST, board.device_lost
    if board.drain_deadline is not None:
        return Refusal.CLOSING, "the server is shutting down"
    if n_prompt == 0:
        return Refusal.NEVER_FITS, "the prompt is empty: there is nothing to compute from"
    if n_prompt + 1 > config.context_tokens:
        return (
            Refusal.NEVER_FITS,
            f"the prompt has {n_prompt} tokens, the context {config.context_tokens}: no room for one more",
        )
    if pages > board.ledger.total:
        return Refusal.NEVER_FITS, f"the prompt needs {pages} pages with one of growth; the pool has {board.ledger.total}"
    if len(board.queue) >= config.queue_limit:
        return Refusal.QUEUE_FULL, f"{len(board.queue)} turns are waiting"
    return None


def go_on(board: Board, turn: Turn) -> None:
    """Its session's records have been read, or it has waited long enough for them."""
    turn.recalled = True
    _recall(board, turn)
    if not turn.blocked:
        lifecycle.forget_want(board, turn)
        lifecycle.remember_want(board, turn)


def _recall(board: Board, turn: Turn) -> None:
    """What the session's history says about this prompt: where it diverges, which positions were decoded."""
    _recall_branch(board, turn)
    if board.config.deterministic:
        turn.calls = calls_of(turn, board.config.deterministic_piece)


def _recall_branch(board: Board, turn: Turn) -> None:
    nearest = turn.session.nearest(turn.spec.prompt, turn.spec.secret)
    if nearest is None or nearest[1] == 0:
        return
    branch, shared = nearest
    if shared < min(len(branch.ids), turn.n_prompt):
        turn.report = type(turn.report)(diverged_at=shared)
        board.counters.diverged_turns += 1
    turn.branch = branch
    turn.replaces = branch if shared >= branch.boundary else None
    turn.decoded = [(start, min(stop, shared)) for start, stop in branch.decoded if start <= min(shared, turn.n_prompt)]


def settle(board: Board) -> None:
    """Restores that are through begin to feed; running turns grow; the queue is looked at; the watermark is kept."""
    _begin_restored(board)
    while True:
        short = _grow(board)
        wanted = short or _admit_queue(board)
        free = board.ledger.free
        if not wanted:
            board.slot_wait_since = board.lines.pin_wait_since = None
            break
        _preempt_paused(board, wanted)
        spill.make_room(board, wanted, urgent=True)
        if board.ledger.free <= free:
            break
    _keep_watermark(board)


def _keep_watermark(board: Board) -> None:
    free = board.ledger.free
    board.spilling = free < board.low_pages or (board.spilling and free < board.high_pages)
    if board.spilling:
        _preempt_paused(board, board.high_pages)
        spill.make_room(board, board.high_pages, urgent=False)
    elif board.rows and any(t.state is TurnState.PAUSED for t in board.rows.values()):
        _preempt_paused_for_rows(board)


def _begin_restored(board: Board) -> None:
    for turn in list(board.rows.values()):
        if turn.state is TurnState.RESTORING and not turn.restores:
            lifecycle.finish_restoring(board, turn)


def _grow(board: Board) -> int:
    """Give running turns the pages they are about to need. Returns how many are missing, after preempting for them."""
    while True:
        short = 0
        grower: Turn | None = None
        for turn in board.running():
            lack = lifecycle.pages_wanted(board, turn) - turn.n_pages
            while lack > 0 and (page := board.ledger.take()) is not None:
                turn.spare.append(page)
                lack -= 1
            if lack > 0:
                short += lack
                grower = grower or turn
        if grower is None or board.ledger.free + spill.coming_free(board) + board.index.n_idle >= short:
            return short
        _preempt_for(board, grower)


def _preempt_for(board: Board, grower: Turn) -> None:
    """Everything idle would not be enough: a paused turn goes, else the newest of the lowest class, but never the oldest."""
    admitted = sorted(board.rows.values(), key=lambda t: t.order)
    paused = [t for t in admitted if t.state is TurnState.PAUSED]
    victim = paused[-1] if paused else admitted[-1]
    if len(admitted) > 1:
        lifecycle.requeue(board, victim, preempted=True)
    elif grower.duplicates:
        lifecycle.requeue(board, grower, preempted=False)
    else:
        lifecycle.end(board, grower, EndReason.LENGTH, "the pool is full: nothing else is left to give up")


def _preempt_paused(board: Board, wanted: int) -> None:
    """Slow readers' pages are the first to go: paused turns give up their claim, newest first, while room is short."""
    paused = sorted((t for t in board.rows.values() if t.state is TurnState.PAUSED), key=lambda t: t.order)
    while paused and board.ledger.free + spill.coming_free(board) < wanted:
        lifecycle.requeue(board, paused.pop(), preempted=True)
        spill.make_room(board, wanted, urgent=False)


def _preempt_paused_for_rows(board: Board) -> None:
    """The engine's rows are all open and one waits: a paused turn gives up its row."""
    opened = sum(t.opened for t in board.rows.values())
    if opened >= board.config.max_rows and any(t.running and not t.opened for t in board.rows.values()):
        paused = [t for t in board.rows.values() if t.state is TurnState.PAUSED and t.opened]
        if paused:
            lifecycle.requeue(board, max(paused, key=lambda t: t.order), preempted=True)


def _admit_queue(board: Board) -> int:
    """Admit who fits. Returns the pages that the first turn who does not fit needs, if evicting can bring them; else 0.

    Cheap however long queue and prompts are: at most ``MAX_LOOKS`` turns are considered, and one that did not fit is only
    matched again when as many pages are free as it asked for, or after ``LOOK_AGAIN`` events (its match may have grown).
    """
    stuck: list[Turn] = []
    wanted = considered = 0
    for turn in list(islice(board.queue, 2 * MAX_LOOKS)):
        if len(board.rows) >= 2 * board.config.max_rows or considered >= MAX_LOOKS:
            break  # an admitted turn beyond max_rows restores while others run; its row opens when one closes
        if stuck and (stuck[0].passed >= MAX_PASSES or board.ledger.free == 0):
            break
        if turn.blocked or not turn.recalled:
            continue
        considered += 1
        returns = _may_return(board, turn)
        match = _look(board, turn) if returns and _worth_a_look(board, turn) else None
        if match is not None and turn.need <= board.ledger.free:
            for other in stuck:
                other.passed += 1
            _admit(board, turn, match, turn.need)
            if match.sources:
                break  # laying out a long restore takes milliseconds: the next one at the next event, which will come
            continue
        if not stuck and returns and _can_be_had(board, turn):
            wanted = turn.need
        stuck.append(turn)
    return wanted


def _worth_a_look(board: Board, turn: Turn) -> bool:
    since = board.counters.events - turn.looked_at
    return turn.need <= board.ledger.free or since >= LOOK_AGAIN or (not board.rows and since > 0)


def _look(board: Board, turn: Turn) -> Match:
    """Match, and remember what it asks for."""
    began = board.stopwatch()
    match = find_match(board, turn)
    turn.lookup_ms += (board.stopwatch() - began) * 1e3
    turn.need = pages_needed(board, turn, match)
    turn.need_own = sum(node.pins == 0 for node in match.path)
    turn.need_own += match.partial is not None and match.partial[0].pins == 0
    turn.looked_at = board.counters.events
    return match


def _admit(board: Board, turn: Turn, match: Match, need: int) -> None:
    lifecycle.admit(board, turn, match, board.ledger.take_all(need))


def _may_return(board: Board, turn: Turn) -> bool:
    """After more than ``max_preemptions`` a turn waits until an older one has ended, or it is the oldest itself."""
    if turn.preemptions <= board.config.max_preemptions or turn.older_ended:
        return True
    return all(other.order >= turn.order for other in board.rows.values())


def _can_be_had(board: Board, turn: Turn) -> bool:
    """Evicting what is idle, and what slow readers hold, would bring the pages."""
    paused = sum(t.n_pages for t in board.rows.values() if t.state is TurnState.PAUSED)
    return board.ledger.free + spill.coming_free(board) + board.index.n_idle + paused - turn.need_own >= turn.need
