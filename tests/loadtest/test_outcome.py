"""Outcomes: what chunks add up to, what counts as content, what makes an answer whole (case P56's definitions)."""

from __future__ import annotations

from typing import Any

import pytest
from kvalet.loadtest.outcome import Collector, Outcome, ToolCall


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def collect(*chunks: dict[str, Any], status: int = 200, retry_after: str = "") -> Outcome:
    """One chunk a second, from 1.0 on; wanted at 0.0, sent at 0.25."""
    collector = Collector()
    for number, chunk in enumerate(chunks):
        collector.add(chunk, number + 1.0)
    return collector.outcome(0.0, 0.25, len(chunks) + 1.0, status, retry_after)


@pytest.mark.parametrize(
    ("chunk", "content"),
    [
        (delta(role="assistant"), False),
        (delta(role="assistant", content=""), False),
        (delta(content=None), False),
        ({"choices": [{"index": 0, "text": ""}]}, False),
        ({"choices": []}, False),
        ({"choices": None, "usage": {"completion_tokens": 3}}, False),
        (FINISH, False),
        ({}, False),
        (delta(content=" "), True),
        (delta(content="x"), True),
        (delta(reasoning_content="hm"), True),
        (delta(reasoning="hm"), True),
        (delta(refusal="no"), True),
        (delta(tool_calls=[{"index": 0, "function": {"arguments": ""}}]), True),
        ({"choices": [{"index": 0, "text": "x"}]}, True),
        ({"choices": [{"index": 0, "message": {"content": "whole"}}]}, True),
    ],
)
def test_content_is_text_reasoning_or_a_part_of_a_tool_call(chunk: dict[str, Any], content: bool) -> None:
    """Time to first token is counted to the first such chunk, and only such chunks have a time."""
    collector = Collector()
    assert collector.add(chunk, 5.0) is content
    assert collector.chunk_s == ([5.0] if content else [])


def test_times_count_from_the_intended_one() -> None:
    outcome = collect(
        delta(role="assistant"), delta(content="a"), delta(content="b"), FINISH, {"usage": {"completion_tokens": 3}}
    )
    assert outcome.chunk_s == (2.0, 3.0)
    assert (outcome.queued_s, outcome.ttft_s, outcome.latency_s) == (0.25, 2.0, 6.0)
    assert outcome.chunk_gaps_s == (1.0,)
    assert outcome.s_per_token == 0.5, "(3.0 - 2.0) / (3 tokens - 1): tokens as the server counts them, not chunks"


@pytest.mark.parametrize(("tokens", "n_chunks"), [(None, 5), (1, 5), (0, 5), (9, 1), (9, 0)])
def test_no_time_per_token_without_two_tokens_and_two_chunks(tokens: int | None, n_chunks: int) -> None:
    usage = [] if tokens is None else [{"usage": {"completion_tokens": tokens}}]
    outcome = collect(*[delta(content="x")] * n_chunks, FINISH, *usage)
    assert outcome.s_per_token is None
    assert outcome.output_tokens == tokens
    assert (outcome.ttft_s is None) == (n_chunks == 0)


def test_tool_calls_are_put_together_by_index() -> None:
    """Deltas of two calls interleaved, the second index first; names and arguments in parts, the id only once."""
    outcome = collect(
        delta(tool_calls=[{"index": 1, "id": "b", "function": {"name": "se", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "read", "arguments": '{"x'}}]),
        delta(tool_calls=[{"index": 1, "function": {"name": "arch", "arguments": "{}"}}, {"index": 0, "function": None}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '": 1}'}}]),
        FINISH,
    )
    assert outcome.tool_calls == (ToolCall("a", "read", '{"x": 1}'), ToolCall("b", "search", "{}"))
    assert outcome.chunk_s == (1.0, 2.0, 3.0, 4.0)


def test_calls_of_a_whole_reply_have_no_index() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("p", "q")]
    whole = {"choices": [{"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}]}
    outcome = collect(whole)
    assert outcome.ok
    assert [call.id for call in outcome.tool_calls] == ["p", "q"]
    assert outcome.finish_reasons == ("tool_calls",)


@pytest.mark.parametrize("error", [{"message": "device lost"}, "device lost"])
def test_an_error_ends_what_came_before_as_a_failure(error: object) -> None:
    """Text stays, and neither a later finish reason nor status 200 makes it whole."""
    outcome = collect(delta(content="half"), {"error": error}, FINISH)
    assert (outcome.ok, outcome.error, outcome.text, outcome.status) == (False, "device lost", "half", 200)


def test_an_error_without_a_message_is_shown_as_it_is() -> None:
    assert "teapot" in collect({"error": {"code": "teapot"}}).error
    assert collect({"error": None}, FINISH).ok, "a null error is none"


@pytest.mark.parametrize(
    ("chunks", "status", "error"),
    [
        ((FINISH,), 200, ""),
        ((FINISH,), 503, "status 503"),
        ((), 200, "0 finish reasons instead of one"),
        ((FINISH, FINISH), 200, "2 finish reasons instead of one"),
        (({"error": "full"},), 429, "full"),
        ((), 0, "status 0"),
    ],
)
def test_what_is_a_whole_answer(chunks: tuple[dict[str, Any], ...], status: int, error: str) -> None:
    outcome = collect(*chunks, status=status, retry_after="3")
    assert (outcome.error, outcome.ok, outcome.retry_after) == (error, not error, "3")


def test_usage_ids_and_record_are_the_server_s_last_word() -> None:
    """A null usage in each chunk (as OpenAI streams it) takes nothing away; a later one replaces an earlier one."""
    early, late = ({"prompt_tokens": 9, "completion_tokens": n, "prompt_tokens_details": None} for n in (1, 4))
    outcome = collect(
        {"choices": [{"delta": {"content": "x"}, "token_ids": [5, 6]}], "usage": early, "prompt_token_ids": [1, 2]},
        {"choices": [{"delta": {"content": "y"}, "token_ids": [7]}], "usage": None, "kvalet": {"ram_tokens": 3}},
        {"choices": [{"delta": {}, "finish_reason": "length", "token_ids": None}], "usage": late, "kvalet": None},
    )
    assert (outcome.token_ids, outcome.prompt_ids, outcome.text) == ((5, 6, 7), (1, 2), "xy")
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (9, 4, None)
    assert outcome.record == {"ram_tokens": 3}


def test_without_usage_counts_are_unknown_not_zero() -> None:
    outcome = collect(delta(content="x"), FINISH)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (None, None, None)
    assert outcome.record == {}
