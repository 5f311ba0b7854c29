"""Packing of segments into one call."""

from __future__ import annotations

import pytest
from kvalet.runtime.batch import Segment, make_batch
from kvalet.runtime.errors import EngineError

DECODE = Segment(1, 17, (7,), (4, 9), True, True)
PIECE = Segment(2, 30, (1, 2, 3, 4), (3, 8, 5), False, False)
LAST = Segment(3, 0, (5, 6), (2,), False, True)


def test_positions_places_and_samples() -> None:
    batch = make_batch([DECODE, PIECE, LAST], 16)
    assert batch.ids.tolist() == [7, 1, 2, 3, 4, 5, 6]
    assert batch.positions.tolist() == [17, 30, 31, 32, 33, 0, 1]
    assert batch.places.tolist() == [9 * 16 + 1, 8 * 16 + 14, 8 * 16 + 15, 5 * 16, 5 * 16 + 1, 2 * 16, 2 * 16 + 1]
    assert batch.sampled.tolist() == [0, 6]
    assert batch.keep is not None
    assert batch.keep.tolist() == [0, 6]
    assert [(span.begin, span.end) for span in batch.spans] == [(0, 1), (1, 5), (5, 7)]
    assert batch.n == 7
    assert batch.padding == 0


def test_all_sampled_needs_no_selection() -> None:
    assert make_batch([DECODE, DECODE], 16).keep is None


def test_nothing_sampled_keeps_nothing() -> None:
    batch = make_batch([PIECE], 16)
    assert batch.keep is not None
    assert batch.keep.tolist() == []


def test_padding_goes_to_the_scratch_page_and_keeps_all() -> None:
    batch = make_batch([DECODE], 16, pad_to=4)
    assert batch.ids.tolist() == [7, 0, 0, 0]
    assert batch.places.tolist()[1:] == [0, 0, 0]
    assert (batch.n, batch.padding, batch.keep, batch.sampled.tolist()) == (4, 3, None, [0])
    with pytest.raises(EngineError, match="5 tokens in a call of 4"):
        make_batch([DECODE, PIECE], 16, pad_to=4)


@pytest.mark.parametrize(
    "segment",
    [
        Segment(1, 31, (7, 8), (4, 9), False, True),
        Segment(1, -1, (7,), (4, 9), True, True),
        Segment(1, 0, (), (4,), False, False),
        Segment(1, 0, (3,), (), True, True),
    ],
)
def test_what_the_pages_do_not_cover_is_a_defect(segment: Segment) -> None:
    with pytest.raises(EngineError, match="do not cover"):
        make_batch([segment], 16)
