"""The event decoder: any cut of the bytes gives the same events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvalet.loadtest import sse
from kvalet.loadtest.sse import SseDecoder, SseError

TEXT = ": hello\n\ndata: one\n\nevent: x\ndata: a\ndata:  b\nid: 3\n\n\n\ndata:\n\nretry: 1\n\ndata: ümläut → 字\n\n"
EVENTS = ["one", "a\n b", "", "ümläut → 字"]


def decode(parts: list[bytes]) -> list[str]:
    decoder = SseDecoder()
    return [event for part in parts for event in decoder.feed(part)]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends(newline: str) -> None:
    assert decode([TEXT.replace("\n", newline).encode()]) == EVENTS


@given(st.lists(st.integers(0, len(TEXT.encode()) * 2), max_size=20), st.sampled_from(["\n", "\r\n"]))
def test_any_cut_gives_the_same_events(cuts: list[int], newline: str) -> None:
    raw = TEXT.replace("\n", newline).encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    assert decode([raw[a:b] for a, b in pairwise(places)]) == EVENTS


def test_an_unfinished_event_is_kept_back() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: x\n") == []
    assert decoder.feed(b"\n") == ["x"]


def test_comments_are_counted() -> None:
    decoder = SseDecoder()
    decoder.feed(b": ping\n\n: ping\n\n")
    assert decoder.comments == 2


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_CHARS", 100)
    decoder = SseDecoder()
    for _ in range(10):
        assert decoder.feed(b"data: 0123456789\n") == []
    with pytest.raises(SseError):
        decoder.feed(b"data: 0123456789\n")
    with pytest.raises(SseError):
        SseDecoder().feed(b"x" * 101)


def test_bytes_that_are_no_text_do_not_stop_the_stream() -> None:
    assert decode([b"data: \xff\xfe\n\ndata: y\n\n"])[1] == "y"


def test_an_empty_read_between_cr_and_lf_ends_no_event() -> None:
    assert decode([b"data: a\r", b"", b"\ndata: b\r", b"", b"", b"\n\r\n"]) == ["a\nb"]
    assert decode([b"data: a\r", b"\n", b"\r\n"]) == ["a"], "a LF alone after the CR"


def test_events_do_not_depend_on_fields_and_comments_between() -> None:
    assert decode([b"data\n\n"]) == [""], "a field without a colon has an empty value"
    assert decode([b"data:x\n:c\nevent: e\ndata:  y\n\n\n\n"]) == ["x\n y"], "one space after the colon goes"
    assert decode([b"event: only\n\n: ping\n\n"]) == [], "no data, no event"


@pytest.mark.parametrize("parts", [[b"data: \xc3", b"\xa4\n\n"], [b"data: \xe5\xad", b"\x97", b"\n\n"]])
def test_a_character_may_be_cut_anywhere(parts: list[bytes]) -> None:
    assert decode(parts) == [b"".join(parts)[6:-2].decode()]
