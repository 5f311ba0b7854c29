"""Messages as clients send them (cases P08, P61)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from kvalet.api.errors import ApiError
from kvalet.api.normalise import Message, PastCall, native_messages, normalise
from kvalet.api.template import ChatTemplate
from kvalet.api.tool_format import own_messages


def one(**message: Any) -> Message:
    return normalise([message])[0]


def call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"id": "call_a1b2c3d4e", "type": "function", "function": {"name": "mul", "arguments": arguments}, **more}


def verbatim(past: PastCall) -> str:
    return past.arguments


@pytest.mark.parametrize(
    ("role", "becomes"),
    [("system", "system"), ("developer", "system"), ("user", "user"), ("function", "tool"), ("tool", "tool")],
)
def test_roles(role: str, becomes: str) -> None:
    assert one(role=role, content="x").role == becomes


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "no"}, "plain"], "no\nplain"),
    ],
)
def test_contents(content: Any, text: str) -> None:
    assert one(role="user", content=content).content == text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("text", "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": 3, "content": "x"}, "messages[1].role"),
        ({"role": "boss", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "system", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"a": 1}}, "messages[1].content"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            "messages[1].content[1]",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [3]}, "messages[1].content[0]"),
        ({"role": "user", "content": "half \ud83d"}, "messages[1].content"),
        ({"role": "user", "content": "x", "name": 3}, "messages[1].name"),
        ({"role": "assistant", "content": None, "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": ["x"]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call(), call([1])]}, "messages[1].tool_calls[1].function.arguments"),
        ({"role": "assistant", "tool_calls": [{**call(), "id": 4}]}, "messages[1].tool_calls[0].id"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "messages[1].tool_call_id"),
    ],
)
def test_refusals_name_the_field(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        normalise([{"role": "user", "content": "x"}, message])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_no_messages_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        normalise([])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}, {"content": [], "tool_calls": None}])
def test_an_assistant_may_say_nothing(message: dict[str, Any]) -> None:
    said = one(role="assistant", **message)
    assert (said.content, said.calls) == ("", ())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "{}"),
        ("null", "{}"),
        (" \n", "{}"),
        (None, "{}"),
        ("{}", "{}"),
        ({"a": "é"}, '{"a": "é"}'),
        ("not json", "not json"),
    ],
)
def test_arguments(arguments: Any, text: str) -> None:
    assert one(role="assistant", content=None, tool_calls=[call(arguments)]).calls[0].arguments == text


@pytest.mark.parametrize(("content", "text"), [(None, ""), ("51", "51"), (51, "51"), ({"é": [1]}, '{"é": [1]}')])
def test_tool_results_become_text(content: Any, text: str) -> None:
    assert one(role="tool", content=content).content == text


@pytest.mark.parametrize("content", ["missing", None, "", "Let me see."])
@pytest.mark.parametrize("arguments", ['{"a":17,"b":3}', "", "null", "{}", "not json"])
@pytest.mark.parametrize("native", [False, True])
def test_the_prompt_never_says_none(content: Any, arguments: str, native: bool) -> None:
    """P08, through both ways of rendering: call name, arguments and result are there, the word None is not."""
    assistant: dict[str, Any] = {"role": "assistant", "tool_calls": [call(arguments)]}
    if content != "missing":
        assistant["content"] = content
    history = normalise(
        [
            {"role": "user", "content": "17*3?"},
            assistant,
            {"role": "tool", "tool_call_id": "call_a1b2c3d4e", "content": "51"},
            {"role": "user", "content": "So?"},
        ]
    )
    plain = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] + '' }}"
    calls = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    source = plain + (calls if native else "") + "{% endfor %}"
    messages = native_messages(history, verbatim) if native else own_messages(history, (), verbatim)
    text = ChatTemplate(source).render(messages, now=datetime(2026, 12, 1)).text
    assert "None" not in text
    assert "null" not in text
    assert "mul" in text
    assert "51" in text
    if arguments == "not json":
        assert "not json" in text
    elif "17" in arguments:
        assert '"a": 17' in text if native else '"a":17' in text


def test_native_shape() -> None:
    history = normalise(
        [
            {"role": "assistant", "content": "x", "tool_calls": [call('{"a": 1}'), call("oops")], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "call_a1b2c3d4e", "name": "mul", "content": "51"},
        ]
    )
    assert native_messages(history, verbatim) == [
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [
                {"id": "call_a1b2c3d4e", "type": "function", "function": {"name": "mul", "arguments": {"a": 1}}},
                {"id": "call_a1b2c3d4e", "type": "function", "function": {"name": "mul", "arguments": "oops"}},
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "51", "tool_call_id": "call_a1b2c3d4e", "name": "mul"},
    ]
