"""Deterministic mode: which call computes which position. A pure function of a turn's history.

Bits depend on the call: a prefill piece by its bounds, a decode row by nothing but being one. A turn's pieces run from
multiple to multiple of ``deterministic_piece``, and end and begin again where decoding did; so the calls that compute its
positions, now or again after a loss, are known when it is submitted. Pages are shared by ids AND calls (``prefix.Node``).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvalet.sched.session import Turn

DECODED = -1
_SPAN = 1 << 32


def piece_code(start: int, end: int) -> int:
    """Code of a position that the prefill piece [start, end) computes."""
    return start * _SPAN + end


def calls_of(turn: Turn, piece: int) -> tuple[int, ...]:
    """One code per position of the turn's ids."""
    return codes_of((*turn.decoded, (turn.n_prompt, len(turn.ids))), piece)


def codes_of(decoded: Sequence[tuple[int, int]], piece: int) -> tuple[int, ...]:
    """One code per position up to the end of the last of the ranges [start, end) that were decoded."""
    codes: list[int] = []
    for start, end in decoded:
        while len(codes) < start:
            at = len(codes)
            stop = min((at // piece + 1) * piece, start)
            codes.extend([piece_code(at, stop)] * (stop - at))
        codes.extend([DECODED] * (end - len(codes)))
    return tuple(codes)


def allowed_below(turn: Turn, upto: int, piece: int) -> int:
    """The largest position up to ``upto`` where a match may end whatever brought the KV before it: a multiple of ``piece``,
    or a place before, between or after tokens of this history that were decoded."""
    best = upto // piece * piece
    for start, end in (*turn.decoded, (turn.n_prompt, len(turn.ids))):
        if start <= min(end, upto):
            best = max(best, min(end, upto))
    return best


def next_piece(turn: Turn, piece: int) -> tuple[int, bool]:
    """(tokens to feed next, whether by a decode row): to the next multiple, to where decoding once began, or to the end of
    what is known; one by one where it was decoded."""
    stop = min((turn.fed // piece + 1) * piece, turn.feed_end)
    for start, end in (*turn.decoded, (turn.n_prompt, turn.feed_end)):
        if start <= turn.fed < end:
            return 1, True
        if start > turn.fed:
            stop = min(stop, start)
    return stop - turn.fed, False
