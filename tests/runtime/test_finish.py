"""Stop strings: whatever the pieces, the same text; nothing of a stop on the wire; nothing held longer than needed (P14)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from kvalet.runtime.finish import StopStrings

TEXT = "The quick brown fox"
LISTS = [
    ["own fox"],
    ["wn f", "n fo"],
    ["fox"],
    ["\nUser:"],
    [],
    [""],
    ["The", "quick", "brown", "fox", "x"],
    ["T"],
    ["quick brown", "brown", "own"],
    ["ck brown fox", "brow!", "k b"],
    ["foxes"],
    ["The quick brown fox"],
]


def plain(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The definition: grow the text by one character until it ends with a stop string; take the longest that it ends with."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    """What is sent after each piece, and at the end."""
    matcher = StopStrings(stops)
    sent = []
    for piece in pieces:
        released = matcher.feed(piece)
        sent.append(released.text)
        if released.stopped:
            return sent, True
    return [*sent, matcher.flush()], False


def cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut at one and at two places, single characters, and whole."""
    places = range(len(text) + 1)
    for one in places:
        for two in range(one, len(text) + 1):
            yield [text[:one], text[one:two], text[two:]]
    yield list(text)
    yield [text]


@pytest.mark.parametrize("stops", LISTS, ids=repr)
def test_every_cut_gives_the_same_text(stops: list[str]) -> None:
    expected = plain(TEXT, stops)
    for pieces in cuts(TEXT):
        sent, stopped = run(pieces, stops)
        assert ("".join(sent), stopped) == expected, pieces


def test_the_client_sees_exactly_what_is_before_the_stop() -> None:
    assert plain(TEXT, ["own fox"]) == ("The quick br", True)
    assert plain(TEXT, ["wn f", "n fo"]) == ("The quick bro", True)


@pytest.mark.parametrize("stops", LISTS, ids=repr)
def test_text_is_held_exactly_as_long_as_it_can_match(stops: list[str]) -> None:
    """After each character, what is not sent yet is the longest ending that begins a stop string."""
    matcher = StopStrings(stops)
    sent = ""
    for end, character in enumerate(TEXT, start=1):
        released = matcher.feed(character)
        sent += released.text
        if released.stopped:
            return
        seen = TEXT[:end]
        held = [n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert len(seen) - len(sent) == max(held, default=0)


def test_random_texts_over_a_small_alphabet() -> None:
    """Overlapping and self-similar stop strings, random cuts, against the definition."""
    seed = 14
    rng = random.Random(seed)
    for case in range(4000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(0, 24)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 7))) for _ in range(rng.randrange(0, 4))]
        places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(0, 5)))
        pieces = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
        sent, stopped = run(pieces, stops)
        assert ("".join(sent), stopped) == plain(text, stops), (seed, case, text, stops, pieces)


def test_a_hostile_stop_string_costs_no_more() -> None:
    """A text that nearly matches everywhere: the work stays in proportion to the text (counted, not timed)."""
    stop = "a" * 500 + "b"
    matcher = StopStrings([stop])
    fallbacks = 0
    automaton = matcher._automata[0]

    class Counting(list[int]):
        def __getitem__(self, index: object) -> int:  # type: ignore[override]
            nonlocal fallbacks
            fallbacks += 1
            return super().__getitem__(index)  # type: ignore[index,return-value]

    automaton.fallbacks = Counting(automaton.fallbacks)
    text = "a" * 5000
    sent = "".join(matcher.feed(character).text for character in text) + matcher.flush()
    assert sent == text
    assert 0 < fallbacks <= 2 * len(text)
