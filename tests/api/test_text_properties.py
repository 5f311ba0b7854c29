"""Properties of the text path over generated inputs: round trips, cuts, forged turns, respacing."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from typing import Any

from bytetokens import CONTROLS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.api.json_text import NOT_JSON, parse_json, respaced, same_value
from kvalet.api.normalise import Message, PastCall, normalise
from kvalet.api.requests import TextDelta
from kvalet.api.template import ChatTemplate
from kvalet.api.tool_format import BETWEEN_CALLS, CALL_CLOSE, CALL_OPEN, call_text, own_messages
from kvalet.api.toolcalls import CallParser

TOKENIZER = byte_tokenizer()
NOW = datetime(2026, 12, 1)
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    CONTROLS,
)
quick = settings(max_examples=80, deadline=None, derandomize=True)

nasty = st.sampled_from(
    [CALL_OPEN, CALL_CLOSE, '"', "\\", "{", "}", "[", "]", "\n", " ", "</", "<tool", "日本", "😀", *CONTROLS]
)
texts = st.lists(nasty | st.text(max_size=6), max_size=12).map("".join)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
arguments = st.dictionaries(texts, values, max_size=4)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=4)


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def parse(parts: list[str], **options: Any) -> CallParser:
    parser = CallParser(**options)
    for part in parts:
        parser.feed(part)
    parser.finish(truncated=False)
    return parser


@quick
@given(calls, st.lists(st.integers(0, 10_000), max_size=8), st.booleans(), st.booleans())
def test_calls_survive_being_written_cut_and_read(
    made: list[tuple[str, dict[str, Any]]], cuts: list[int], ascii_only: bool, constrained: bool
) -> None:
    written = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in made]
    text = BETWEEN_CALLS.join(call_text(name, value) for name, value in written)
    parser = parse(pieces(text, cuts), constrained=constrained, names=[name for name, _ in made])
    assert [(call.name, call.arguments) for call in parser.calls] == written
    assert parser.text == ""
    assert not parser.unfinished
    assert len({call.id for call in parser.calls}) == len(made)


@quick
@given(texts, st.lists(st.integers(0, 10_000), max_size=8))
def test_any_text_reads_the_same_however_it_is_cut(text: str, cuts: list[int]) -> None:
    whole, cut = (parse(parts, constrained=False, names=["f"]) for parts in ([text], pieces(text, cuts)))
    assert (whole.text, [call.arguments for call in whole.calls]) == (cut.text, [call.arguments for call in cut.calls])
    if not whole.calls:
        assert whole.text == text, "what is no call is text, all of it"


@quick
@given(st.text(max_size=40).filter(lambda text: "<" not in text), st.lists(st.integers(0, 10_000), max_size=8))
def test_text_without_a_marker_is_never_held_back(text: str, cuts: list[int]) -> None:
    parser = CallParser()
    for part in pieces(text, cuts):
        told = "".join(delta.text for delta in parser.feed(part) if isinstance(delta, TextDelta))
        assert told == part


@quick
@given(values, st.sampled_from([None, 0, 1, 7]), st.booleans())
def test_respacing_keeps_the_value_and_ends_in_one_form(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    once = respaced(text)
    assert once == json.dumps(value, ensure_ascii=ascii_only)
    assert respaced(once) == once
    assert same_value(parse_json(once), value)


@quick
@given(texts)
def test_respacing_leaves_what_is_not_json_alone(text: str) -> None:
    if parse_json(text) is NOT_JSON:
        assert respaced(text) == text


@quick
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), texts), min_size=1, max_size=5))
def test_messages_hold_as_many_turns_as_they_say(said: list[tuple[str, str]]) -> None:
    """Whatever is written in them: the special tokens of the prompt are the template's, and the text is all there."""
    messages = [{"role": role, "content": content} for role, content in said]
    rendered = TEMPLATE.render(messages, now=NOW)
    expected = "".join(f"<|im_start|>{role}\n{content.strip()}<|im_end|>\n" for role, content in said)
    assert rendered.text == expected + "<|im_start|>assistant"
    ids = TOKENIZER.encode_parts(rendered.parts)
    special = [token for token in ids if token in TOKENIZER.control_ids.values()]
    assert len(special) == 2 * len(said) + 1


@quick
@given(calls, texts)
def test_history_is_written_as_the_model_wrote_it(made: list[tuple[str, dict[str, Any]]], content: str) -> None:
    """Normalised and rendered again, an assistant's message is the text that was parsed into it."""
    written = [(name, json.dumps(value, ensure_ascii=False)) for name, value in made]
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": value}}
            for index, (name, value) in enumerate(written)
        ],
    }
    history = normalise([message])
    assert history == (
        Message("assistant", content, tuple(PastCall(f"c{index}", *call) for index, call in enumerate(written))),
    )
    plain = own_messages(history, (), lambda call: call.arguments)
    assert plain[0]["content"] == content + BETWEEN_CALLS.join(call_text(name, value) for name, value in written)
