"""The longest usable match of a turn's ids over device, RAM and disk. Looks only; changes and reserves nothing.

A match is: whole pages on the device (``path``), then either a partial page on the device (``partial``) or chunks that
must come from below (``sources``): whole chunks by key, and at the end at most one chunk of which a part is usable (a
tail, or a chunk in RAM that goes another way). It never covers a turn's last known token, which must be fed to get an answer.

Deterministic mode: a match on the device holds pages that the same calls computed, and every match ends where the calls that
compute what follows are the same wherever the KV before it comes from (``calls.allowed_below``). Where no history is known (a
session that is new, or was forgotten by a restart) the exact end of a stored tail will do: it is somebody's history, and
most likely ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvalet.sched.board import Board
from kvalet.sched.calls import allowed_below
from kvalet.sched.chunks import Chunk
from kvalet.sched.prefix import Node, Root, common_prefix
from kvalet.sched.resident import chunk_keys, resident_path
from kvalet.sched.session import Turn
from kvalet.sched.transfer_record import TailQuestion, Transfer
from kvalet.store.ids import ChunkKey

MAX_TAIL_CANDIDATES = 4


@dataclass(slots=True)
class Source:  # not frozen: a long restore makes hundreds, and a frozen one costs four times as much
    """A chunk below the device that a turn can use the first ``n_tokens`` of (an upper bound for a ``question``).

    ``first_page``: its pages before this one are on the device already. ``n_pages``: pages to copy from there on.
    ``attach``: the live restore that is bringing it. ``exact``: all its ids match and it ends a snapshot.
    """

    start: int
    n_tokens: int
    first_page: int
    n_pages: int
    ids: tuple[int, ...] = ()
    key: ChunkKey | None = None
    chunk: Chunk | None = None
    attach: Transfer | None = None
    from_disk: bool = False
    question: TailQuestion | None = None
    exact: bool = False


@dataclass(slots=True)
class Match:
    root: Root
    path: list[Node]
    partial: tuple[Node, int] | None = None
    sources: list[Source] = field(default_factory=list)

    @property
    def last(self) -> Node:
        return self.path[-1] if self.path else self.root

    @property
    def resident_tokens(self) -> int:
        """Tokens usable from the device."""
        return self.last.end + (self.partial[1] if self.partial else 0)


def resident_match(board: Board, turn: Turn, limit: int) -> Match:
    """What the device holds of the turn's ids up to ``limit`` tokens, cut to an allowed end."""
    root = board.index.root(turn.spec.secret, turn.spec.tenant)
    ids = turn.known_ids()
    path = resident_path(board, root, turn, limit)
    last = path[-1] if path else root
    partial = board.index.best_partial(last, ids, limit, turn.calls)
    if not board.config.deterministic:
        return Match(root, path, partial)
    end = allowed_below(turn, last.end + (partial[1] if partial else 0), board.config.deterministic_piece)
    n_pages, rest = divmod(end, board.config.page_tokens)
    if not rest:
        return Match(root, path[:n_pages])
    source = path[n_pages] if n_pages < len(path) else partial[0] if partial else None
    return Match(root, path[:n_pages], (source, rest) if source else None)


def find_match(board: Board, turn: Turn) -> Match:
    ids = turn.known_ids()
    limit = len(ids) - 1
    match = resident_match(board, turn, limit)
    physical = board.index.walk(match.root, ids, limit, turn.calls) if board.config.deterministic else match.path
    sources = list(_sources(board, match.root, physical, turn, ids, limit))
    if board.config.deterministic:
        sources = _cut_to_allowed(board, turn, sources, limit)
    if sources and _end(sources[-1], limit) > match.resident_tokens:
        return Match(match.root, physical, None, sources)
    return match


def _end(source: Source, limit: int) -> int:
    return min(source.start + source.n_tokens, limit)


def _cut_to_allowed(board: Board, turn: Turn, sources: list[Source], limit: int) -> list[Source]:
    """Sources up to the last allowed end; the one in which it lies is used up to there."""
    while sources:
        last = sources[-1]
        end = _end(last, limit)
        if last.exact and turn.branch is None and last.start + last.n_tokens <= limit:
            return sources
        allowed = allowed_below(turn, end, board.config.deterministic_piece)
        pages = -(-(allowed - last.start) // board.config.page_tokens) - last.first_page
        if pages > 0:
            n_pages = last.n_pages if last.attach is not None else min(pages, last.n_pages)
            return [*sources[:-1], replace(last, n_tokens=allowed - last.start, n_pages=n_pages)]
        sources = sources[:-1]
    return sources


def _sources(board: Board, root: Root, path: list[Node], turn: Turn, ids: tuple[int, ...], limit: int) -> Iterator[Source]:
    """Whole chunks in order from where the device ends, then at most one that is usable in part."""
    size = board.config.chunk_tokens
    resident = path[-1].end if path else 0
    start = resident // size * size
    keys = chunk_keys(board, turn, ids)
    parent_key = keys[start // size - 1] if start else None
    while start + size <= len(ids) and min(start + size, limit) > resident:
        key = keys[start // size]
        source = _whole(board, key, ids[start : start + size], start, resident)
        if source is None:
            break
        yield source
        if source.n_tokens < size:
            return
        start += size
        parent_key = key
    if start < limit:
        partial = _in_part(board, root, parent_key, ids, start, resident, limit)
        own = _own_piece(board, turn, parent_key, ids, start, resident, limit)
        if own is not None and (partial is None or partial.question is not None or partial.n_tokens < own.n_tokens):
            partial = own
        if partial is not None and partial.start + partial.n_tokens > resident:
            yield partial


def _whole(board: Board, key: ChunkKey, ids: tuple[int, ...], start: int, resident: int) -> Source | None:
    page_tokens = board.config.page_tokens
    chunk = board.chunks.get(key)
    first_page = max(0, resident - start) // page_tokens
    source = Source(start, len(ids), first_page, len(ids) // page_tokens - first_page, ids, key, chunk)
    if chunk is not None and chunk.incoming is not None:
        return _attached(board, source, chunk.incoming)
    if chunk is not None and chunk.slot is not None:
        return source
    return replace(source, from_disk=True) if board.disk.has(key) else None


def _attached(board: Board, source: Source, transfer: Transfer) -> Source | None:
    """Join a restore under way, as far as it goes; None if it begins behind what this turn has."""
    if transfer.first_page > source.first_page:
        return None
    end_page = transfer.first_page + len(transfer.pages)
    n_tokens = min(source.n_tokens, end_page * board.config.page_tokens)
    return replace(
        source, n_tokens=n_tokens, n_pages=end_page - source.first_page, attach=transfer, from_disk=transfer.from_disk
    )


def _in_part(
    board: Board, root: Root, parent: ChunkKey | None, ids: tuple[int, ...], start: int, resident: int, limit: int
) -> Source | None:
    """The best tail or diverging chunk after ``parent``: RAM's if it gains anything, else what the disk may have."""
    want = ids[start : min(limit, start + board.config.chunk_tokens)]
    first_page = max(0, resident - start) // board.config.page_tokens
    parent_chunk = board.chunks.get(parent) if parent else None
    best = None
    if parent is None or parent_chunk is not None:
        best = board.chunks.best_child(parent_chunk, root.secret, want)
    disk = _tail_on_disk(board, root, parent, ids, start, first_page, limit)
    if disk is not None and disk.key is not None and (best is None or disk.n_tokens > best[1]):
        return disk
    if best is not None and start + best[1] > resident:
        chunk, shared = best
        pages = -(-shared // board.config.page_tokens)
        source = Source(
            start, shared, first_page, pages - first_page, chunk.ids, chunk.key, chunk, exact=shared == len(chunk.ids)
        )
        return source if chunk.incoming is None else _attached(board, source, chunk.incoming)
    return disk


def _own_piece(
    board: Board, turn: Turn, parent: ChunkKey | None, ids: tuple[int, ...], start: int, resident: int, limit: int
) -> Source | None:
    """The stored tail or chunk of the branch that the turn goes on from, up to the first token that differs: its ids are known,
    so it needs no question, and deterministic mode knows the calls behind it."""
    branch, size = turn.branch, board.config.chunk_tokens
    if branch is None or not start < branch.kv_len or branch.ids[:start] != ids[:start]:
        return None
    piece = branch.ids[start : min(branch.kv_len, start + size)]
    shared = common_prefix(piece, ids[start : min(limit, start + size)])
    first_page = max(0, resident - start) // board.config.page_tokens
    pages = -(-shared // board.config.page_tokens) - first_page
    if pages < 1:
        return None
    key = board.chunks.key_after(turn.spec.secret, parent, piece)
    chunk = board.chunks.get(key)
    source = Source(start, shared, first_page, pages, piece, key, chunk, from_disk=True, exact=shared == len(piece))
    if chunk is not None and chunk.incoming is not None:
        return _attached(board, source, chunk.incoming)
    return source if board.disk.has(key) else None


def _tail_on_disk(
    board: Board, root: Root, parent: ChunkKey | None, ids: tuple[int, ...], start: int, first_page: int, limit: int
) -> Source | None:
    """A stored tail by its exact key if one matches whole (the longest), else the question which of the stored ones shares
    most, which only a reader can answer. Before the first chunk that question is only asked about tails that this process
    wrote or read for the same secret: the others there are the short prompts of everybody, which are not for this turn to
    wait for, or to see."""
    refs = board.disk.tails(board.chunks.parent_bytes(parent))
    want = ids[start : min(limit, start + board.config.chunk_tokens)]
    rest = ids[start : start + board.config.chunk_tokens]
    page_tokens = board.config.page_tokens
    names = {(ref.n_tokens, ref.key_hex16) for ref in refs}
    for n in sorted({ref.n_tokens for ref in refs if ref.n_tokens <= len(rest)}, reverse=True):
        key = board.chunks.key_after(root.secret, parent, rest[:n])
        if (n, key.hex()[:16]) in names:
            chunk = board.chunks.get(key)
            pages = -(-min(n, len(want)) // page_tokens) - first_page
            source = Source(start, n, first_page, pages, rest[:n], key, chunk, from_disk=True, exact=True)
            return _attached(board, source, chunk.incoming) if chunk is not None and chunk.incoming else source
    if parent is None:
        refs = [ref for ref in refs if board.chunks.is_own_tail(root.secret, ref.key_hex16)]
    if not refs or board.config.deterministic:
        return None
    candidates = tuple(refs[:MAX_TAIL_CANDIDATES])
    n = min(len(want), max(ref.n_tokens for ref in candidates))
    pages = -(-n // page_tokens) - first_page
    if pages < 1:
        return None
    question = TailQuestion(parent, root.secret, start // board.config.chunk_tokens, start, want, candidates)
    return Source(start, n, first_page, pages, from_disk=True, question=question)


def pages_needed(board: Board, turn: Turn, match: Match) -> int:
    """Free pages to reserve: prompt and one page of growth, what the match saves taken off, 2^n more after n preemptions.

    While a partial page is copied, source and copy both exist; where the pool is too small for that the match gives the
    partial page up (changing ``match``). A source that comes from below is one of the pages to reserve.
    """
    page_tokens = board.config.page_tokens
    total = board.ledger.total
    limit = len(turn.ids) - 1
    want = min(-(-len(turn.ids) // page_tokens) + 1, -(-turn.feeds_until // page_tokens))
    if want + 1 > total and match.partial is not None:
        give_up_partial(board, turn, match)
    shared = len(match.path)
    for source in match.sources:
        if source.attach is not None:
            shared += _end(source, limit) // page_tokens - source.start // page_tokens - source.first_page
    from_below = bool(match.sources) and _end(match.sources[-1], limit) % page_tokens > 0
    if from_below:
        want = min(want + 1, total)
    if turn.preemptions and not turn.older_ended:
        want = max(want, min(want + 2 ** min(turn.preemptions, 16), total - (match.partial is not None)))
    return want - shared


def give_up_partial(board: Board, turn: Turn, match: Match) -> None:
    """Shrink ``match`` (one without sources) to an allowed end between two pages."""
    while match.partial is not None:
        smaller = resident_match(board, turn, match.last.end)
        match.path, match.partial = smaller.path, smaller.partial
