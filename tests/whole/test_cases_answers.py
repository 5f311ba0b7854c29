"""Text, limits, log-probabilities, usage and validation against a real server over TCP: P13, P14, P16, P20, P21, P43, P44."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlparse

import pytest
from serverproc import Server
from wholekit import (
    CHAT,
    COMPLETIONS,
    ERROR_FIELDS,
    answered,
    both,
    chat,
    ids_of,
    joined,
    random_ids,
    refused,
    said,
    streamed,
    tool,
)

VOCABULARY = 49_152
PAGE = 16
STORY = "Tell me about the sea."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """fp32: the two modes of a request are compared while others share their batches."""
    with Server("--weights", "fp32", "--pool-tokens", "16384", "--ram-bytes", "0") as running:
        yield running
        assert running.metric("kvalet_turns_ended_total", reason="internal") == 0
        assert "Traceback" not in running.log, running.log[-3000:]


def cuts_inside_characters(server: Server, body: dict[str, Any]) -> list[int]:
    """The numbers of tokens after which the answer's bytes end inside a character."""
    items = answered(server, {**body, "logprobs": True})["choices"][0]["logprobs"]["content"]
    cuts, raw = [], b""
    for n, item in enumerate(items, 1):
        raw += bytes(item["bytes"])
        try:
            raw.decode()
        except UnicodeDecodeError:
            cuts.append(n)
    return cuts


@pytest.mark.parametrize("every_k", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_delta_ends_inside_a_character(server: Server, every_k: bool) -> None:
    """P13 over HTTP: both modes equal; U+FFFD only once, at the very end. k = 1 to 40 at full length; else the first places
    where the limit cuts a character, those beside them, and the last."""
    body = chat(server, "Repeat: 😀日本語", max_tokens=40 if every_k else 20)
    most = body["max_tokens"]
    cuts = cuts_inside_characters(server, body)
    assert cuts, "this prompt makes the model say characters of several tokens"
    places = range(1, 41) if every_k else sorted({1, *cuts[:4], *(cut + 1 for cut in cuts[:4] if cut < most), most})

    def one(k: int) -> str:
        shorter = {**body, "max_tokens": k}
        text = said(answered(server, shorter))["content"]
        pieces = [c["choices"][0]["delta"].get("content") or "" for c in streamed(server, shorter)]
        assert "".join(pieces) == text, k
        assert all("\ufffd" not in piece for piece in pieces[:-2]), (k, pieces)
        assert "\ufffd" not in text[:-1], (k, text)
        assert text.endswith("\ufffd") is (k in cuts), (k, text)
        return str(text)

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(one, places))
    assert all(texts[-1].startswith(text.rstrip("\ufffd")) for text in texts)
    assert any(ord(character) > 127 for character in texts[-1])


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
def test_no_part_of_a_stop_string_reaches_the_client(server: Server, step: int) -> None:
    """P14: stops cut out of what the model says anyway, at every ``step``-th position; the same text in both modes. (At every
    one, of scripted text: tests/runtime/test_finish.py.)"""
    text = both(server, chat(server, STORY, max_tokens=16))["content"]
    assert len(text) > 30
    first_piece = next(
        piece for c in streamed(server, chat(server, STORY, max_tokens=1)) if (piece := c["choices"][0]["delta"].get("content"))
    )

    def one(stop: str | list[str]) -> None:
        begins = [at for one in ([stop] if isinstance(stop, str) else stop) if (at := text.find(one)) >= 0]
        answer = both(server, chat(server, STORY, max_tokens=16, stop=stop))
        if begins:
            assert (answer["content"], answer["finish"]) == (text[: min(begins)], "stop"), stop
        else:
            assert (answer["content"], answer["finish"]) == (text, "length"), stop

    stops: list[str | list[str]] = [text[at : at + 7] for at in range(0, len(text) - 7, step)]
    stops += [[text[4:8], text[6:11]], text[-3:], ["\nUser:"], [], first_piece, ["q%", "z%", "x%", "y%", text[9:14]]]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, stops))
    assert both(server, chat(server, STORY, max_tokens=16, stop=None))["content"] == text
    for empty in ("", [""]):
        assert str(refused(server, chat(server, STORY, max_tokens=4, stop=empty))["param"]).startswith("stop")


@pytest.mark.parametrize("value", [0, -1, 1.5, "16", 123456789012345678901234567890])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_token_limits_of_the_wrong_kind_are_refused(server: Server, field: str, value: Any) -> None:
    """P16: 0 is refused too (docs/api.md); a number that no 64 bits hold is no token count."""
    for stream in (False, True):
        assert refused(server, chat(server, "Hi", stream=stream, **{field: value}))["param"] == field
    if field == "max_tokens":
        assert refused(server, {**chat(server, "Hi"), "prompt": "Hi", field: value}, COMPLETIONS)["param"] == field


def test_edges_of_a_context() -> None:
    """P16: what remains of the context is what an answer may have, in both modes; one number more is one number too many."""
    context = 128
    with Server("--context-tokens", str(context), "--pool-tokens", "2048", "--ram-bytes", "0") as server:
        for n_prompt, given, n_answer in (
            (context - 2, None, 2), (context - 2, 1, 1), (context - 2, 2, 2), (context - 2, 10**12, 2),
            (context - 1, None, 1), (context - 1, 1, 1), (context - 1, 2, 1), (10, 1, 1),
        ):  # fmt: skip
            body = {"model": server.model, "prompt": random_ids(n_prompt), "temperature": 0, "ignore_eos": True}
            body |= {} if given is None else {"max_tokens": given}
            reply = answered(server, body, COMPLETIONS)
            assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (n_answer, "length")
            chunks = streamed(server, {**body, "stream_options": {"include_usage": True}}, COMPLETIONS)
            assert chunks[-1]["usage"]["completion_tokens"] == n_answer
            assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        for n_prompt in (context, context + 1):
            for more in ({}, {"max_tokens": 1}, {"max_tokens": 2}, {"stream": True}):
                body = {"model": server.model, "prompt": random_ids(n_prompt), **more}
                error = refused(server, body, COMPLETIONS)
                assert error["code"] == "context_length_exceeded"
                assert f"maximum context length is {context} tokens" in error["message"]
                assert str(n_prompt) in error["message"]
        two = chat(server, "Hi", max_tokens=5, max_completion_tokens=2, ignore_eos=True)
        assert answered(server, two)["usage"]["completion_tokens"] == 2
        absent = answered(server, chat(server, "Hi", max_tokens=None, ignore_eos=True))
        assert absent["usage"]["total_tokens"] == context


@pytest.mark.parametrize("k", [None, 0, 5, 20])
def test_log_probabilities_are_one_per_token(server: Server, k: int | None) -> None:
    """P20, with characters split over tokens."""
    for text, n in (("Repeat: 😀日本語", 9), (STORY, 4)):
        fields = {} if k is None else {"top_logprobs": k}
        body = chat(server, text, max_tokens=n, logprobs=True, **fields)
        reply = answered(server, body)
        items = reply["choices"][0]["logprobs"]["content"]
        assert len(items) == reply["usage"]["completion_tokens"]
        for item in items:
            assert item["logprob"] <= 0
            assert len(item["top_logprobs"]) == (k or 0)
            assert all(set(top) >= {"token", "logprob", "bytes"} and top["logprob"] <= 0 for top in item["top_logprobs"])
        raw = bytes(byte for item in items for byte in item["bytes"] or [])
        assert raw.decode("utf-8", "replace").rstrip("\ufffd") == said(reply)["content"].rstrip("\ufffd")
        choices = [c["choices"][0] for c in streamed(server, body)]
        assert [item["token"] for c in choices if c["logprobs"] for item in c["logprobs"]["content"]] == [
            i["token"] for i in items
        ]
    plain = chat(server, STORY, max_tokens=2)
    assert answered(server, plain)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}]
)
def test_log_probabilities_out_of_range_are_refused(server: Server, fields: dict[str, Any]) -> None:
    """P20."""
    for stream in (False, True):
        assert refused(server, chat(server, STORY, max_tokens=2, stream=stream, **fields))["param"] == "top_logprobs"


ENDS: dict[str, dict[str, Any]] = {
    "stop": {"stop": " "},
    "length": {"max_tokens": 3},
    "tool_calls": {
        "tools": [tool("f", {"type": "object", "properties": {}, "additionalProperties": False})],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 40,
    },
}


@pytest.mark.parametrize("end", ENDS)
def test_usage_comes_once_and_only_when_asked(server: Server, end: str) -> None:
    """P21: after the finish chunk, before [DONE], with the numbers of the other mode; on whole answers no stream options."""
    body = chat(server, STORY, **{"max_tokens": 30, **ENDS[end]})
    usage = answered(server, body)["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}, {"stream_options": {}}):
        chunks = streamed(server, {**body, **options})
        assert all(chunk["choices"] for chunk in chunks)
        assert not any(chunk.get("usage") for chunk in chunks)
    chunks = streamed(server, {**body, "stream_options": {"include_usage": True}})
    assert [chunk["choices"] for chunk in chunks].count([]) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-2]["choices"][0]["finish_reason"] == end
    asked = chunks[-1]["usage"]
    assert {**asked, "prompt_tokens_details": 0} == {**usage, "prompt_tokens_details": 0}
    assert 0 <= asked["prompt_tokens_details"]["cached_tokens"] < asked["prompt_tokens"]
    assert refused(server, {**body, "stream_options": {"include_usage": True}})["param"] == "stream_options"


@pytest.mark.parametrize("n", [600, pytest.param(2000, marks=pytest.mark.long)])
def test_cached_tokens_of_a_long_prompt(server: Server, n: int) -> None:
    """P21: 2,000 tokens at full length, nothing cold, whole pages warm, always less than the prompt, in both modes."""
    body = {"model": server.model, "prompt": random_ids(n, 21 + n), "max_tokens": 2, "temperature": 0}
    seen = [answered(server, body, COMPLETIONS)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    chunks = streamed(server, {**body, "stream_options": {"include_usage": True}}, COMPLETIONS)
    seen.append(chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert seen[0] == 0
    assert n - PAGE <= seen[1] == seen[2] < n


BODIES: list[bytes] = [
    b"[]", b"true", b"null", b"123", b'"str"', b"", b"{", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08\x00",
    b'{"model":NaN}', b'{"model":1e400}', b'{"model":"x","model":5}',
]  # fmt: skip
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hi"}, "messages"), ({"messages": []}, "messages"), ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"model": 5}, "model"), ({"stream": "yes"}, "stream"), ({"tools": {}}, "tools"), ({"stop": 5}, "stop"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
]  # fmt: skip


def test_bodies_that_are_no_requests_leave_the_connection_usable(server: Server) -> None:
    """P43: everything on one keep-alive connection, a good request after each."""
    address = urlparse(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    good = json.dumps(chat(server, "Hi", max_tokens=1, unknown_field={"a": [1]}, user_data="x")).encode()
    head = chat(server, "Hi", max_tokens=1)

    def ask(method: str, path: str, body: bytes | None, **headers: str) -> tuple[int, dict[str, Any]]:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    connection.connect()
    sock = connection.sock
    wrong: list[tuple[int, str, str, bytes | None, dict[str, str]]] = [
        (400, "POST", CHAT, body, {"content_type": "application/json"}) for body in BODIES
    ]
    wrong += [
        (415, "POST", CHAT, good, {"content_type": "text/plain"}),
        (415, "POST", CHAT, good, {"content_type": "application/json", "content_encoding": "gzip"}),
        (405, "GET", CHAT, None, {}),
        (404, "GET", "/v1/nothing", None, {}),
        (404, "POST", CHAT, json.dumps({**head, "model": "unknown"}).encode(), {"content_type": "application/json"}),
    ]
    for status, method, path, body, headers in wrong:
        found, reply = ask(method, path, body, **headers)
        assert found == status, (body, reply)
        assert set(reply["error"]) == ERROR_FIELDS
        assert "Traceback" not in json.dumps(reply)
        assert ask("POST", CHAT, good, content_type="application/json")[0] == 200
    for fields, param in FIELDS:
        found, reply = ask("POST", CHAT, json.dumps({**head, **fields}).encode(), content_type="application/json")
        assert (found, str(reply["error"]["param"])) == (400, param), (fields, reply)
        assert ask("POST", CHAT, good, content_type="application/json")[0] == 200
    assert ask("POST", CHAT, good)[0] in (200, 415), "no content type at all"
    assert connection.sock is sock, "the connection was never closed"
    connection.close()


BAD_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -1), ("temperature", 1e9), ("temperature", "0.5"), ("top_p", 0), ("top_p", 1.0001),
    ("presence_penalty", 10),
    ("logit_bias", {str(VOCABULARY): 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"x": 1}), ("stop_token_ids", [VOCABULARY]),
    ("stop_token_ids", [-1]), ("prompt", [VOCABULARY]), ("prompt", [-1]), ("min_tokens", 99), ("seed", "x"), ("seed", 2**63),
]  # fmt: skip
GOOD_SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1e-8},
    {"top_k": 0},
    {"logit_bias": {"2": -100}},
    {"seed": 0},
    {"seed": -1},
]


def test_bad_sampling_values_name_their_field_and_harm_no_neighbour(server: Server) -> None:
    """P44 (and the odd seeds of P18): each next to a greedy request that runs all the time and is not changed by any."""
    neighbour = random_ids(30, 44)
    alone = ids_of(server.complete(neighbour, 32))
    small = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 4}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, neighbour, 32)
        for field, value in BAD_SAMPLING:
            error = refused(server, {**small, field: value}, COMPLETIONS)
            assert str(error["param"]).startswith(field), (field, value, error)
        for text in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
            raw = json.dumps(small)[:-1].encode() + b', "temperature": ' + text + b"}"
            refused(server, raw, COMPLETIONS)
        for fields in GOOD_SAMPLING:
            assert answered(server, {**small, **fields}, COMPLETIONS)["usage"]["completion_tokens"] <= 4
        assert ids_of(running.result()) == alone
    greedy = ids_of(server.complete([5, 6, 7], 8))
    assert ids_of(server.complete([5, 6, 7], 8, temperature=1e-8)) == greedy


def test_a_banned_token_is_never_chosen(server: Server) -> None:
    """P44: a bias of -100 on each token that greedy decoding chose."""
    greedy = ids_of(server.complete([504, 3575, 282], 6))
    biased = ids_of(server.complete([504, 3575, 282], 6, logit_bias={str(token): -100 for token in set(greedy)}))
    assert not set(greedy) & set(biased)


def test_streams_of_completions_and_chats_have_one_finish(server: Server) -> None:
    """Finish reasons follow one table in both modes (docs/api.md): exactly one chunk carries one."""
    for body, path in (
        (chat(server, STORY, max_tokens=3), CHAT),
        ({"model": server.model, "prompt": STORY, "max_tokens": 3}, COMPLETIONS),
    ):
        chunks = streamed(server, body, path)
        assert [bool(c["choices"][0]["finish_reason"]) for c in chunks].count(True) == 1
    assert joined(streamed(server, chat(server, STORY, max_tokens=3)))["finish"] == "length"
