"""Grammars: refused with reason and place, or enforced to the last token (cases P05 and P46)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from kvalet.runtime.grammar import MAX_FORCED, MAX_GRAMMAR_BYTES, GrammarCache, GrammarError, Matcher
from kvalet.runtime.plan import EndedBy, GrammarSpec, RowId, RowOpen, SamplingParams
from kvalet.runtime.rows import RowState, TextContext
from kvalet.runtime.sampler import sample
from kvalet.runtime.tokenizer import CONTROL, NORMAL, Tokenizer, TokenizerArrays, build_tokenizer
from smollm import read_tokenizer

TREE = {
    "$defs": {
        "T": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}},
            "required": ["v"],
        }
    },
    "$ref": "#/$defs/T",
}
TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}, "days": {"type": "integer"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Rows of 49k are too small for several threads, which would only wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return read_tokenizer(model_path)


@pytest.fixture(scope="module")
def cache(tokenizer: Tokenizer) -> GrammarCache:
    return GrammarCache(tokenizer)


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def opened(cache: GrammarCache, spec: GrammarSpec) -> Matcher:
    matcher = cache.matcher(spec)
    assert matcher is not None
    return matcher


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(matcher.bitmask().view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"type": "not-a-type"}, "", "not-a-type"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/Gone"}}}, "properties.a", "does not exist"),
        ({"$defs": {"N": {"$ref": "#/$defs/N"}}, "$ref": "#/$defs/N"}, "", "without an end"),
        ({"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}, "properties.x", "regex parse error"),
        ({"type": "string", "pattern": "(?=x)y"}, "", "look-around"),
        ({"type": "string", "format": "made-up"}, "", "Unknown format"),
        ({"enum": []}, "", "Unsatisfiable"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"uniqueItems": True}}]}, "anyOf[1].items", "uniqueItems"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "", "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}, "", "oneOf"),
        (False, "", "Unsatisfiable"),
        ([1], "", "object or a boolean"),
        ("text", "", "object or a boolean"),
        ({"type": 5}, "", "type must be"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(cache: GrammarCache, schema: Any, path: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)) as caught:
        cache.compile(schema_spec(schema))
    assert caught.value.path == path
    assert "<state>" not in str(caught.value)
    assert cache.matcher(schema_spec(schema)) is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("json_schema", "{"), "not JSON"),
        (GrammarSpec("json_schema", "[" * 100_000), "nested too deeply"),
        (GrammarSpec("json_schema", '{"const": "\\ud800"}'), "hex escape"),
        (GrammarSpec("regex", "("), "unclosed group"),
        (GrammarSpec("regex", "a(?=b)"), "look-around"),
        (GrammarSpec("lark", 'start: "a" foo'), "unknown name"),
        (GrammarSpec("lark", ""), "Empty grammar"),
        (GrammarSpec("lark", "start: a\na: a"), "no text satisfies it"),
        (GrammarSpec("lark", r"start: /[^\s\S]/"), "no text satisfies it"),
        (GrammarSpec("ebnf", "x"), "kind 'ebnf'"),
        (GrammarSpec("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "longer than"),
        (GrammarSpec("json_schema", '{"items":' * 200 + "{}" + "}" * 200), "recursion|nested"),
    ],
)
def test_other_faults_are_clear_errors(cache: GrammarCache, spec: GrammarSpec, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        cache.compile(spec)
    assert "<" not in str(caught.value)


ENFORCED: list[dict[str, Any]] = [
    TREE,
    TOOL,
    {"type": "object", "properties": {"x": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
    {"type": "object", "properties": {"x": {"type": ["string", "null"]}}},
    {"type": "string", "pattern": r"^hello there\\!$"},
    {"type": "array", "minItems": 2, "items": {"type": "boolean"}},
    {"minItems": 2},
    {"type": "object", "properties": {"a": {"type": "number", "minimum": 3, "maximum": 4}}, "required": ["a"]},
    {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}, "required": ["d"]},
    {"const": {"é": ["日", 1.5, None]}},
]


def generate(text: TextContext, params: SamplingParams, seed: int) -> tuple[str, EndedBy | None]:
    """A row over random logits at temperature 1: the worst model there is. Ends of turn and closing marks are likely enough
    that it gets to an end."""
    row = RowState(RowOpen(RowId(1), (1,), 1, 0, (), params), text)
    rng = np.random.default_rng(seed)
    out = ""
    while row.ended is None:
        logits = torch.from_numpy(rng.standard_normal((1, text.vocab_size), dtype=np.float32))
        logits[0, [2, 1, 92, 77, 18]] += 9.0
        (choice,) = sample(logits, [row.sampling()])
        out += row.accept(choice.token_id, choice.logprob).text
    return out, row.ended


@pytest.mark.parametrize("schema", ENFORCED, ids=range(len(ENFORCED)))
@pytest.mark.parametrize("forced_runs", [False, True], ids=["alone", "forced"])
def test_every_finished_answer_validates(
    tokenizer: Tokenizer, cache: GrammarCache, schema: dict[str, Any], forced_runs: bool
) -> None:
    text = TextContext(tokenizer, tokenizer.vocab_size, tokenizer.end_ids, cache, forced_runs)
    finished = 0
    for seed in range(8):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=100, grammar=schema_spec(schema))
        answer, why = generate(text, params, seed)
        assert why in (EndedBy.STOP, EndedBy.LENGTH), (seed, answer)
        if why is EndedBy.STOP:
            finished += 1
            jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())
    assert finished >= 3, "too few answers came to an end to say anything"


def test_the_end_is_allowed_exactly_where_the_text_may_end(tokenizer: Tokenizer, cache: GrammarCache) -> None:
    matcher = opened(cache, GrammarSpec("regex", "[0-9]{2,3}"))
    digit = tokenizer.encode("7", allow_special=False)[0]
    ends = []
    for _ in range(3):
        ends.append((bool(allowed(matcher) & tokenizer.end_ids), matcher.may_end, matcher.finished))
        assert matcher.consume(digit)
    assert ends == [(False, False, False), (False, False, False), (True, True, False)]
    assert matcher.finished
    assert allowed(matcher) == tokenizer.end_ids


@pytest.mark.parametrize("end", [0, 2])
def test_both_end_of_turn_ids_finish_a_text(cache: GrammarCache, end: int) -> None:
    matcher = opened(cache, GrammarSpec("regex", "a*"))
    assert not matcher.finished
    assert matcher.consume(end)
    assert matcher.finished
    assert not matcher.error


def test_a_failed_matcher_allows_nothing(tokenizer: Tokenizer, cache: GrammarCache) -> None:
    matcher = opened(cache, GrammarSpec("regex", "[0-9]+"))
    assert not matcher.consume(tokenizer.encode("x", allow_special=False)[0])
    assert not matcher.bitmask().any()
    assert matcher.forced() == []
    assert not matcher.finished
    assert not matcher.may_end
    assert matcher.error
    assert not matcher.consume(tokenizer.encode("7", allow_special=False)[0])


def test_a_matcher_that_hits_a_limit_allows_nothing(tokenizer: Tokenizer, cache: GrammarCache) -> None:
    """A rule that never ends: the forced run is endless, the parser's limit stops it, and the row must not look finished."""
    matcher = opened(cache, GrammarSpec("lark", 'start: "a" b\nb: "x" b'))
    for token_id in matcher.forced():
        if not matcher.consume(token_id):
            break
    assert "limit" in matcher.error
    assert not matcher.bitmask().any()
    assert matcher.forced() == []
    assert not matcher.finished


def test_white_space_is_free_but_short(tokenizer: Tokenizer, cache: GrammarCache) -> None:
    matcher = opened(cache, schema_spec(TOOL))
    space, brace = (tokenizer.encode(text, allow_special=False)[0] for text in (" ", "{"))
    matcher.consume(brace)
    spaces = 0
    while space in allowed(matcher) and spaces < 100:
        assert matcher.consume(space)
        spaces += 1
    assert spaces == 24
    assert allowed(matcher), "then the text must go on"


def test_a_schema_may_fix_its_white_space(tokenizer: Tokenizer, cache: GrammarCache) -> None:
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    matcher = opened(cache, schema_spec({**TOOL, "x-guidance": spacing}))
    forced = matcher.forced()
    assert tokenizer.decode(forced).startswith('{"city": "'[: len(tokenizer.decode(forced))])
    assert len(forced) >= 2


def test_matchers_of_one_grammar_are_independent(tokenizer: Tokenizer, cache: GrammarCache) -> None:
    spec = GrammarSpec("regex", "(yes|no), sir")
    one, other = opened(cache, spec), opened(cache, spec)
    before = allowed(other)
    assert one.consume(tokenizer.encode("yes", allow_special=False)[0])
    assert allowed(other) == before != allowed(one)


def test_forced_tokens_are_the_tokenizer_s_own(tokenizer: Tokenizer, cache: GrammarCache) -> None:
    matcher = opened(cache, GrammarSpec("regex", "(yes|no), sir, at once"))
    matcher.consume(tokenizer.encode("yes", allow_special=False)[0])
    forced = matcher.forced()
    assert tokenizer.decode(forced) == ", sir, at once"
    assert forced == tokenizer.encode(", sir, at once", allow_special=False)
    assert matcher.forced() == forced, "asking does not advance"


def test_a_long_forced_run_is_cut(tokenizer: Tokenizer, cache: GrammarCache) -> None:
    sentence = "one word after the other, " * 20
    matcher = opened(cache, GrammarSpec("regex", sentence.strip()))
    ids = tokenizer.encode(sentence.strip(), allow_special=False)
    assert len(ids) > MAX_FORCED
    assert matcher.forced() == ids[:MAX_FORCED]


def test_a_model_that_cannot_end_a_turn_takes_no_grammars() -> None:
    tokens = ("a", "b", "<pad>")
    endless = build_tokenizer(TokenizerArrays("gpt2", "smollm", tokens, (NORMAL, NORMAL, CONTROL), ()))
    with pytest.raises(GrammarError, match="no end-of-turn id"):
        GrammarCache(endless).compile(GrammarSpec("regex", "a"))


def test_the_least_recently_used_grammar_is_forgotten(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    small = GrammarCache(tokenizer, capacity=2)
    built: list[str] = []
    build = small._build

    def counting(spec: GrammarSpec) -> Any:
        built.append(spec.text)
        return build(spec)

    monkeypatch.setattr(small, "_build", counting)
    for text in ("a", "b", "a", "c", "a", "b"):
        small.compile(GrammarSpec("regex", text))
    assert built == ["a", "b", "c", "b"]
    assert opened(small, GrammarSpec("regex", "c")).may_end is False


def test_compiling_in_many_threads(tokenizer: Tokenizer) -> None:
    shared = GrammarCache(tokenizer, capacity=4)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            start.wait(timeout=30)
            for i in range(25):
                matcher = opened(shared, GrammarSpec("regex", f"[{(number + i) % 6}]x"))
                digit = tokenizer.encode(str((number + i) % 6), allow_special=False)[0]
                assert matcher.consume(digit)
        except BaseException as failure:  # noqa: BLE001 - carried to the test's thread
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
