"""What the model wrote and what a client sends back: one text (case P11's part that needs no model)."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from kvalet.api.call_memory import CallMemory
from kvalet.api.json_text import NOT_JSON, nesting, parse_json, respaced, same_value
from kvalet.api.normalise import PastCall, normalise
from kvalet.api.template import ChatTemplate
from kvalet.api.tool_format import call_text, describe, own_messages
from kvalet.api.tools import parse_tools

TOOLS = parse_tools(
    [{"type": "function", "function": {"name": "mul", "description": 'Über "q"', "parameters": {"type": "object"}}}]
)
MODEL_TEXT = '{"b": 1.0, "a": ["é", "\\u65e5", {}], "c": null}'


def assistant(arguments: str, call_id: str = "call_1", content: str | None = None) -> dict[str, Any]:
    calls = [{"id": call_id, "type": "function", "function": {"name": "mul", "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def contents(history: list[dict[str, Any]], memory: CallMemory | None = None) -> list[tuple[str, str]]:
    calls = memory or CallMemory()
    plain = own_messages(normalise(history), (), lambda call: calls.original("", call))
    return [(message["role"], message["content"]) for message in plain]


@pytest.mark.parametrize(
    "resent",
    [
        MODEL_TEXT,
        MODEL_TEXT.replace(" ", ""),
        MODEL_TEXT.replace(", ", ",\n  "),
        json.dumps(json.loads(MODEL_TEXT)),
        json.dumps(json.loads(MODEL_TEXT), ensure_ascii=False, indent=2, sort_keys=True),
        MODEL_TEXT.replace("1.0", "1"),
    ],
)
def test_a_known_call_comes_back_as_the_model_wrote_it(resent: str) -> None:
    memory = CallMemory()
    memory.remember("", "call_1", MODEL_TEXT)
    assert contents([assistant(resent)], memory) == [("assistant", call_text("mul", MODEL_TEXT))]


@pytest.mark.parametrize(
    ("resent", "tenant", "call_id"),
    [
        (MODEL_TEXT.replace("null", "true"), "", "call_1"),
        (MODEL_TEXT.replace("1.0", "true"), "", "call_1"),
        (MODEL_TEXT[:-1], "", "call_1"),
        (MODEL_TEXT, "other", "call_1"),
        (MODEL_TEXT, "", "call_2"),
    ],
)
def test_a_changed_or_foreign_call_is_the_clients(resent: str, tenant: str, call_id: str) -> None:
    memory = CallMemory()
    memory.remember("", "call_1", '{"secret": 1}' if tenant or call_id != "call_1" else MODEL_TEXT)
    assert memory.original(tenant, PastCall(call_id, "mul", resent)) == resent


@pytest.mark.parametrize(
    ("text", "spaced"),
    [
        ('{"a":1,"b":[1,2,{"c":"x, y: z"}]}', '{"a": 1, "b": [1, 2, {"c": "x, y: z"}]}'),
        ('{ "a" :\t1\n}', '{"a": 1}'),
        ('{"a": "\\"q\\", \\\\", "n": -1.50E+3}', '{"a": "\\"q\\", \\\\", "n": -1.50E+3}'),
        ("[true,null,{}]", "[true, null, {}]"),
        ("not json", "not json"),
        ('{"a":1', '{"a":1'),
        ('"x"', '"x"'),
    ],
)
def test_respacing_changes_spaces_only(text: str, spaced: str) -> None:
    assert respaced(text) == spaced
    assert respaced(spaced) == spaced


def test_memory_is_bounded_by_calls_and_by_characters() -> None:
    memory = CallMemory(max_calls=3, max_chars=100)
    for index in range(5):
        memory.remember("", f"c{index}", "{}")
    assert memory.statistics() == {"calls": 3, "chars": 6}
    memory.original("", PastCall("c2", "f", "{}"))
    memory.remember("", "c9", "{}")
    assert memory.original("", PastCall("c3", "f", '{ "x":1}')) == '{"x": 1}'
    memory.remember("", "big", "x" * 99)
    assert memory.statistics() == {"calls": 1, "chars": 99}
    memory.remember("", "big", "y" * 10)
    assert memory.statistics() == {"calls": 1, "chars": 10}
    memory.remember("", "huge", "x" * 101)
    assert memory.statistics() == {"calls": 0, "chars": 0}


def test_results_become_one_user_message_and_text_stays_beside_calls() -> None:
    history = [
        {"role": "user", "content": "go"},
        assistant("{}", content="Let me see."),
        {"role": "tool", "tool_call_id": "call_1", "content": "51"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "52"}]},
        {"role": "user", "content": "So?"},
    ]
    assert contents(history) == [
        ("user", "go"),
        ("assistant", 'Let me see.<tool_call>\n{"name": "mul", "arguments": {}}\n</tool_call>'),
        ("user", "<tool_response>\n51\n</tool_response>\n<tool_response>\n52\n</tool_response>"),
        ("user", "So?"),
    ]


def test_two_calls_are_joined_as_the_grammar_writes_them() -> None:
    message = assistant("{}")
    message["tool_calls"].append(message["tool_calls"][0])
    assert contents([message])[0][1] == call_text("mul", "{}") + "\n" + call_text("mul", "{}")


@pytest.mark.parametrize("first", ["system", "developer", "user"])
def test_tools_stand_in_the_first_system_message(first: str) -> None:
    history = normalise([{"role": first, "content": "Be brief."}, {"role": "system", "content": "Later."}])
    plain = own_messages(history, TOOLS, lambda call: call.arguments)
    if first == "user":
        assert [message["role"] for message in plain] == ["system", "user", "system"]
        assert plain[0]["content"] == describe(TOOLS)
    else:
        assert [message["role"] for message in plain] == ["system", "system"]
        assert plain[0]["content"] == "Be brief.\n\n" + describe(TOOLS)
    assert 'Über \\"q\\"' in plain[0]["content"]
    assert plain[-1]["content"] == "Later."


def test_a_growing_history_only_grows_at_its_end() -> None:
    """Turn k + 1's prompt begins with turn k's prompt and the text that the model wrote."""
    template = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>")
    memory = CallMemory()
    history: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    before = ""
    for index in range(5):
        plain = own_messages(normalise(history), TOOLS, lambda call: memory.original("", call))
        text = template.render(plain, now=datetime(2026, 12, 1)).text.removesuffix("<|assistant|>")
        assert text.startswith(before), index
        arguments = f'{{"n": {index}.0, "t": "\\u00e9"}}'
        memory.remember("", f"call_{index}", arguments)
        before = text + "<|assistant|>" + call_text("mul", arguments) + "<|end|>"
        history.append(assistant(json.dumps(json.loads(arguments), separators=(",", ":")), f"call_{index}"))
        history.append({"role": "tool", "tool_call_id": f"call_{index}", "content": "r" * index})


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [(1, 1.0, True), (1, True, False), (0, False, False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ([1, 2], [2, 1], False),
     ({"a": [True]}, {"a": [1]}, False), ("1", 1, False), (None, None, True), ({"a": 1}, {"a": 1, "b": 1}, False)],
)  # fmt: skip
def test_equal_as_json(one: Any, other: Any, equal: bool) -> None:
    assert same_value(one, other) is equal
    assert same_value(other, one) is equal


def test_parsing_and_nesting_are_bounded() -> None:
    assert parse_json("[" * 100_000) is NOT_JSON
    assert parse_json("{") is NOT_JSON
    assert parse_json("null") is None
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    assert nesting(deep, 10) == 11
    assert nesting({"a": [{"b": ()}, 3]}) == 4
    assert nesting("text") == 0
