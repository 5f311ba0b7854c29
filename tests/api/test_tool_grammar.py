"""What the grammars allow, and nothing else, checked byte by byte with a tokenizer of single bytes."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from kvalet.api.errors import ApiError
from kvalet.api.requests import ToolCall
from kvalet.api.schema_check import SPACING
from kvalet.api.tool_format import call_text
from kvalet.api.tool_grammar import MAX_CALLS, CallRules, grammar_for, rules_for
from kvalet.api.toolcalls import CallParser
from kvalet.api.tools import MAX_TOOLS, Tool, allowed_tools, parse_tools
from kvalet.runtime.plan import GrammarSpec
from llguidance import LLMatcher, LLTokenizer

BYTES = LLTokenizer("byte")


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


TOOLS = parse_tools(
    [
        function("add", a={"type": "integer"}, b={"type": "integer"}),
        function("get_weather", city={"type": "string"}),
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "any", "parameters": {}}},
    ]
)
ADD = call_text("add", '{"a": 1, "b": 2}')
WEATHER = call_text("get_weather", '{"city": "Oslo </tool_call> <tool_call> 日本"}')
NOW = call_text("now", "{}")
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def matcher(spec: GrammarSpec) -> LLMatcher:
    source = LLMatcher.grammar_from_lark(spec.text) if spec.kind == "lark" else LLMatcher.grammar_from_json_schema(spec.text)
    made = LLMatcher(BYTES, source, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(rules: CallRules, text: str, context: int = 8192) -> bool:
    spec = grammar_for(rules, context)
    if spec is None:
        return True
    made, data = matcher(spec), text.encode()
    return bool(made.try_consume_tokens(list(data)) == len(data) and made.is_accepting())


def rules(choice: str, *, parallel: bool = True, schema: dict[str, Any] | None = None, name: str = "") -> CallRules:
    return rules_for(allowed_tools(TOOLS, choice, name), choice, parallel=parallel, schema=schema)


AUTO, REQUIRED = rules("auto"), rules("required")
SINGLE, NAMED = rules("required", parallel=False), rules("named", name="get_weather")
JSON_OR_CALL = rules("auto", schema=SCHEMA)


@pytest.mark.parametrize(
    ("text", "auto", "required", "single", "named", "json_or_call"),
    [
        ("hello", True, False, False, False, False),
        ("a <tool, </tool_call>", True, False, False, False, False),
        (ADD, True, True, True, False, True),
        (WEATHER, True, True, True, True, True),
        (NOW, True, True, True, False, True),
        (call_text("any", '{"k": [1, {"z": null}]}'), True, True, True, False, True),
        ("Sure. " + ADD, True, False, False, False, False),
        (ADD + "\n" + WEATHER, True, True, False, False, True),
        (WEATHER + "\n" + WEATHER, True, True, False, False, True),
        ('{"x": 1}', True, False, False, False, True),
        ('{"y": 1}', True, False, False, False, False),
        ("<tool_call>", False, False, False, False, False),
        ("<tool_call>hello", False, False, False, False, False),
        (ADD + " ", False, False, False, False, False),
        (ADD + " and on", False, False, False, False, False),
        (ADD.replace("add", "sub"), False, False, False, False, False),
        (ADD.replace('"b"', '"c"'), False, False, False, False, False),
        (ADD.replace("2}", '2, "c": 3}'), False, False, False, False, False),
        (ADD.replace("1,", "1 ,"), False, False, False, False, False),
        (ADD.replace(": 2", ': "2"'), False, False, False, False, False),
        (call_text("any", "[1]"), False, False, False, False, False),
    ],
)
def test_what_each_choice_allows(text: str, auto: bool, required: bool, single: bool, named: bool, json_or_call: bool) -> None:
    given = [accepts(each, text) for each in (AUTO, REQUIRED, SINGLE, NAMED, JSON_OR_CALL)]
    assert given == [auto, required, single, named, json_or_call]


def test_the_number_of_calls_is_bounded() -> None:
    assert accepts(REQUIRED, "\n".join([ADD] * MAX_CALLS))
    assert not accepts(REQUIRED, "\n".join([ADD] * (MAX_CALLS + 1)))


def test_none_is_free_text_or_the_response_format() -> None:
    assert grammar_for(rules("none"), 8192) is None
    assert accepts(rules("none"), ADD)
    assert grammar_for(rules("none", schema=SCHEMA), 8192) == GrammarSpec(
        "json_schema", json.dumps({**SCHEMA, "x-guidance": SPACING})
    )
    assert grammar_for(rules_for((), "auto", parallel=True), 8192) is None


def test_strings_are_bounded_by_the_context() -> None:
    assert accepts(NAMED, call_text("get_weather", json.dumps({"city": "x" * 300})), context=300)
    assert not accepts(NAMED, call_text("get_weather", json.dumps({"city": "x" * 301})), context=300)


def test_random_walks_through_a_grammar_are_valid_calls() -> None:
    """Any text that the grammar lets a model write parses into calls that match their schema, and rendering them again
    gives the very same text. The walk picks any allowed byte, with a bias to close what is open."""
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    spec = grammar_for(REQUIRED, 300)
    assert spec is not None
    for seed in range(40):
        rng = random.Random(seed)
        text = walk(matcher(spec), rng)
        count = itertools.count()
        parser = CallParser(make_id=lambda count=count: f"c{next(count)}")  # type: ignore[misc]
        deltas = [delta for char in text for delta in parser.feed(char)] + parser.finish(truncated=False)
        assert deltas, seed
        assert parser.text == "", seed
        assert parser.calls, seed
        assert not parser.unfinished, seed
        for call in parser.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        assert rendered(parser.calls) == text, seed


def rendered(calls: tuple[ToolCall, ...]) -> str:
    return "\n".join(call_text(call.name, call.arguments) for call in calls)


def walk(made: LLMatcher, rng: random.Random) -> str:
    data = bytearray()
    while len(data) < 4000:
        mask = made.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
        if made.is_accepting() and (not allowed or rng.random() < 0.5):
            return data.decode()
        closing = [byte for byte in allowed if byte in b'"}]>']
        plain = [byte for byte in allowed if byte in b'"}]>' or 32 <= byte < 127 or byte == 10]
        byte = rng.choice(closing) if closing and rng.random() < 0.5 else rng.choice(plain or allowed)
        assert made.consume_token(byte), made.get_error()
        data.append(byte)
    raise AssertionError("the walk did not end")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (["x"], "tools[0]"),
        ([{"type": "function"}], "tools[0].function"),
        ([function("a"), {"type": "function", "function": {"name": ""}}], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": 'a"b'}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a\n"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x" * 129}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": [1]}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "a", "description": 4}}], "tools[0].function.description"),
        ([function("a"), function("a")], "tools[1].function.name"),
        ([function(f"t{i}") for i in range(MAX_TOOLS + 1)], "tools"),
    ],
)
def test_tools_that_are_refused(tools: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_tools(tools)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_other_kinds_of_tools_are_left_out() -> None:
    parsed = parse_tools([{"type": "web_search"}, function("a"), {"type": "namespace", "tools": []}])
    assert [(tool.name, tool.path) for tool in parsed] == [("a", "tools[1].function.parameters")]


@pytest.mark.parametrize(
    ("tools", "choice", "name", "param", "says"),
    [
        ((), "required", "", "tool_choice", "needs at least one tool"),
        (TOOLS, "named", "nope", "tool_choice.function.name", "'nope'"),
        ((), "named", "add", "tool_choice.function.name", "'add'"),
        (TOOLS, "always", "", "tool_choice", "'always'"),
    ],
)
def test_choices_that_are_refused(tools: tuple[Tool, ...], choice: str, name: str, param: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        allowed_tools(tools, choice, name)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_choices() -> None:
    assert allowed_tools(TOOLS, "none", "") == ()
    assert allowed_tools((), "auto", "") == ()
    assert allowed_tools(TOOLS, "auto", "") == TOOLS
    assert [tool.name for tool in allowed_tools(TOOLS, "named", "now")] == ["now"]
