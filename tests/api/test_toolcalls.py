"""The call parser: the same deltas, joined, whatever the cuts (cases P01, P02, P03)."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence

import pytest
from kvalet.api.requests import Delta, TextDelta, ToolCall, ToolCallDelta
from kvalet.api.tool_format import call_text
from kvalet.api.toolcalls import MAX_HEADER_CHARS, CallParser, new_call_id

ARGUMENTS = '{"t":"naïve 日本 😀 \\"q\\"","n":[1,{"a":null}]}'
COMPACT = '<tool_call>{"name":"note","arguments":' + ARGUMENTS + "}</tool_call>"
SPACED = '<tool_call>\n{ "name" : "note", "arguments" : ' + ARGUMENTS + " }\n</tool_call>"
TWO = call_text("add", '{"a": 2, "b": 2}') + "\n" + call_text("get_weather", '{"city": "Oslo"}')


def parser(*, constrained: bool = True) -> CallParser:
    count = itertools.count()
    return CallParser(constrained=constrained, names=("note", "add", "get_weather"), make_id=lambda: f"call_{next(count)}")


def run(pieces: Iterable[str], *, constrained: bool = True, truncated: bool = False) -> tuple[CallParser, list[Delta]]:
    one = parser(constrained=constrained)
    deltas = [delta for piece in pieces for delta in one.feed(piece)]
    return one, deltas + one.finish(truncated=truncated)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def all_cuts(text: str) -> Iterable[list[str]]:
    yield [text]
    yield list(text)
    for place in range(len(text) + 1):
        yield cut(text, [place])
    rng = random.Random(20261201)
    for _ in range(500):
        yield cut(text, [rng.randrange(len(text) + 1) for _ in range(2)])


def joined(deltas: Sequence[Delta]) -> tuple[str, tuple[ToolCall, ...]]:
    """What a client puts together; checks on the way that ids and names come first and once."""
    text: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text.append(delta.text)
        elif delta.index == len(calls):
            assert delta.id, "the first delta of a call carries its id"
            assert delta.name, "the first delta of a call carries its name"
            calls.append((delta.id, delta.name, [delta.arguments]))
        else:
            assert delta.index == len(calls) - 1, "an earlier call is never taken up again"
            assert not delta.id, "the id came before"
            assert not delta.name, "the name came before"
            calls[-1][2].append(delta.arguments)
    return "".join(text), tuple(ToolCall(i, name, "".join(arguments)) for i, name, arguments in calls)


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("call", [COMPACT, SPACED])
@pytest.mark.parametrize("before", ["", "Sure. ", "a < b <tool", "日本 "])
def test_every_cut_gives_the_same_call(before: str, call: str, constrained: bool) -> None:
    for pieces in all_cuts(before + call):
        done, deltas = run(pieces, constrained=constrained)
        text, calls = joined(deltas)
        assert (text, calls) == (before, (ToolCall("call_0", "note", ARGUMENTS),)), pieces
        assert (done.text, done.calls, done.unfinished) == (text, calls, False)
    assert json.loads(ARGUMENTS)["t"] == 'naïve 日本 😀 "q"'


@pytest.mark.parametrize("constrained", [True, False])
def test_two_calls_have_two_indexes_and_ids(constrained: bool) -> None:
    for pieces in all_cuts(TWO):
        _, deltas = run(pieces, constrained=constrained)
        assert joined(deltas) == (
            "",
            (ToolCall("call_0", "add", '{"a": 2, "b": 2}'), ToolCall("call_1", "get_weather", '{"city": "Oslo"}')),
        ), pieces


@pytest.mark.parametrize("constrained", [True, False])
def test_a_marker_inside_an_argument_is_only_text(constrained: bool) -> None:
    arguments = '{"t": "</tool_call> <tool_call> } ] \\\\", "n": "\\"}"}'
    for pieces in all_cuts(call_text("note", arguments)):
        _, deltas = run(pieces, constrained=constrained)
        assert joined(deltas) == ("", (ToolCall("call_0", "note", arguments),)), pieces


def test_arguments_are_passed_on_as_they_come() -> None:
    one = parser()
    deltas = [
        one.feed(piece) for piece in ('<tool_call>\n{"name": "note", "arguments": ', '{"t": "a', ' b"', "}", "}\n</tool_call>")
    ]
    assert deltas == [
        [],
        [ToolCallDelta(0, "", "call_0", "note"), ToolCallDelta(0, '{"t": "a')],
        [ToolCallDelta(0, ' b"')],
        [ToolCallDelta(0, "}")],
        [],
    ]


def test_text_is_passed_on_as_it_comes() -> None:
    one = parser()
    assert one.feed("Hello ") == [TextDelta("Hello ")]
    assert one.feed("you <") == [TextDelta("you ")]
    assert one.feed("b>") == [TextDelta("<b>")]


@pytest.mark.parametrize("constrained", [True, False])
def test_cut_off_by_the_limit_at_every_place(constrained: bool) -> None:
    """P01: what arrived is consistent, no marker leaks, and the call is reported as unfinished unless it was closed."""
    whole = "Sure. " + COMPACT
    for length in range(len(whole)):
        outcomes = set()
        for pieces in ([whole[:length]], list(whole[:length])):
            done, deltas = run(pieces, constrained=constrained, truncated=True)
            text, calls = joined(deltas)
            assert (done.text, done.calls) == (text, calls)
            assert "Sure. ".startswith(text), (length, text)
            outcomes.add((text, calls, done.unfinished))
        assert len(outcomes) == 1, length
        text, calls, unfinished = outcomes.pop()
        assert unfinished == (length >= len("Sure. <tool_call>")), length
        assert all(ARGUMENTS.startswith(call.arguments) for call in calls)


def test_a_marker_begun_at_a_natural_end_is_text() -> None:
    for pieces in (["I mean <tool_"], list("I mean <tool_")):
        _, deltas = run(pieces)
        assert joined(deltas) == ("I mean <tool_", ())


@pytest.mark.parametrize(
    "malformed",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name":"nope","arguments":{}}</tool_call>',
        '<tool_call>{"name":"note","arguments":[1]}</tool_call>',
        '<tool_call>{"name":"note","arguments":{"a":}}</tool_call>',
        '<tool_call>{"name":"note","arguments":{}} and on',
        '<tool_call>{"name":"note","arguments":{"a":1',
        '<tool_call>{"name":"note","arguments":}}</tool_call>',
        "<tool_call>" + " " * (MAX_HEADER_CHARS + 5),
        '<tool_call>{"name":"' + "n" * MAX_HEADER_CHARS + '","arguments":{}}</tool_call>',
    ],
)
def test_what_is_not_a_call_comes_out_as_the_text_it_was(malformed: str) -> None:
    text = f"See {malformed} done"
    cuts = all_cuts(text) if len(text) < 200 else [[text], list(text)]
    for pieces in cuts:
        done, deltas = run(pieces, constrained=False)
        assert joined(deltas) == (text, ()), pieces
        assert done.unfinished is False


def test_a_call_after_a_malformed_one_is_found() -> None:
    for pieces in all_cuts("<tool_call>oops</tool_call> " + COMPACT + "\n" + COMPACT + " bye"):
        _, deltas = run(pieces, constrained=False)
        text, calls = joined(deltas)
        assert text == "<tool_call>oops</tool_call>  bye", pieces
        assert [call.arguments for call in calls] == [ARGUMENTS, ARGUMENTS], pieces


def test_random_texts_never_depend_on_the_cut() -> None:
    """Soups of fragments, most of them nonsense: joined output of random cuts equals that of the whole text."""
    fragments = [
        "<tool_call>",
        "</tool_call>",
        '{"name":"note","arguments":',
        '{"a":"',
        '"}',
        "}",
        "\n",
        " ",
        "x",
        "<",
        '\\"',
        "[",
        "]",
    ]
    for seed in range(400):
        rng = random.Random(seed)
        text = "".join(rng.choice(fragments) for _ in range(rng.randrange(1, 30)))
        for truncated in (False, True):
            whole = joined(run([text], constrained=False, truncated=truncated)[1])
            for _ in range(10):
                pieces = cut(text, [rng.randrange(len(text) + 1) for _ in range(rng.randrange(6))])
                assert joined(run(pieces, constrained=False, truncated=truncated)[1]) == whole, (seed, truncated, pieces)


def test_ids_are_fresh_and_not_guessable() -> None:
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(call_id) == len("call_") + 24 for call_id in ids)
