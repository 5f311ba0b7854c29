"""The client over real sockets: what it measures (case P56), and that every failure is an outcome and no exception."""

from __future__ import annotations

import math

import pytest
from kvalet.loadtest.client import Call, Endpoint, ProtocolError, complete, fetch
from kvalet.loadtest.outcome import Outcome
from kvalet.loadtest.report import summarise
from stubserver import STREAM_HEAD, Step, delta, event, finish, framed, plain, stream, stub, usage

pytestmark = pytest.mark.anyio
ROLE = (0.01, delta(role="assistant", content=""))


async def one(steps: list[Step], **call: object) -> Outcome:
    async with stub(lambda number, request: steps) as url:
        return await complete(Endpoint.of(url), Call("/v1/chat/completions", {"stream": True}, **call))  # type: ignore[arg-type]


async def test_chunks_are_not_tokens_and_the_role_is_no_content() -> None:
    """P56: role chunk at 10 ms, first content at 500 ms, 10 chunks of 4 tokens every 40 ms, usage 40."""
    texts = ["Hel", "lo"] + ["word "] * 8
    chunks = [(0.5 + 0.04 * k, delta(content=text)) for k, text in enumerate(texts)]
    outcome = await one(stream(ROLE, *chunks, (0.86, finish()), (0.86, usage(40)), (0.86, event("[DONE]"))))
    assert outcome.ok, outcome.error
    assert outcome.text == "Hello" + "word " * 8
    assert outcome.output_tokens == 40
    assert outcome.ttft_s == pytest.approx(0.5, abs=0.1)
    assert outcome.s_per_token is not None
    assert outcome.s_per_token * 1e3 == pytest.approx(0.36 / 39 * 1e3, abs=2)
    assert len(outcome.chunk_gaps_s) == 9
    summary = summarise([outcome])
    assert summary.output_tokens == 40
    assert summary.ttft.p50_ms == pytest.approx(500, abs=100)


async def test_tool_call_deltas_are_content() -> None:
    """P56: a stream with nothing but a tool call has a TTFT, gaps and the call."""
    parts = [{"index": 0, "id": "c1", "function": {"name": "read_log", "arguments": ""}}]
    parts += [{"index": 0, "function": {"arguments": text}} for text in ('{"serv', 'ice": 1}')]
    chunks = [(0.1 + 0.05 * k, delta(tool_calls=[part])) for k, part in enumerate(parts)]
    outcome = await one(stream(ROLE, *chunks, (0.2, finish("tool_calls")), (0.2, usage(12)), (0.2, event("[DONE]"))))
    assert outcome.ok, outcome.error
    assert [(c.id, c.name, c.arguments) for c in outcome.tool_calls] == [("c1", "read_log", '{"service": 1}')]
    assert outcome.ttft_s == pytest.approx(0.1, abs=0.05)
    assert len(outcome.chunk_gaps_s) == 2


async def test_failures_stay_out_of_the_percentiles() -> None:
    """P56: an error event and a 429 count as failures and leave the figures as they are."""
    good = stream((0.02, delta(content="x")), (0.02, finish()), (0.02, usage(1)), (0.02, event("[DONE]")))
    error = stream((0.4, delta(content="y")), (0.4, event({"error": {"message": "device lost"}})))
    refused = plain(429, {"error": {"message": "queue full"}}, "retry-after: 7")
    scripts = [good, error, refused]
    outcomes = []
    async with stub(lambda number, request: scripts[number]) as url:
        for _ in scripts:
            outcomes.append(await complete(Endpoint.of(url), Call("/v1/chat/completions", {})))
    assert [o.ok for o in outcomes] == [True, False, False]
    assert outcomes[1].error == "device lost"
    assert (outcomes[2].status, outcomes[2].retry_after, outcomes[2].error) == (429, "7", "queue full")
    summary = summarise(outcomes)
    assert summary.requests == 3
    assert summary.failures == {"error in the stream": 1, "status 429": 1}
    assert summary.ttft.n == 1
    assert summary.ttft.max_ms < 200
    assert summary.as_json()["failures"] == summary.failures


@pytest.mark.parametrize(
    ("steps", "word"),
    [
        (stream((0.0, delta(content="x"))), "without [DONE]"),
        (stream((0.0, delta(content="x")), (0.0, event("[DONE]"))), "0 finish reasons"),
        (stream((0.0, finish()), (0.0, finish()), (0.0, event("[DONE]"))), "2 finish reasons"),
        ([(0.0, STREAM_HEAD), (0.0, delta(content="x"))], "closed"),
        ([(0.0, b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab")], "closed"),
        ([(0.0, b"nonsense\r\n\r\n")], "bad reply"),
        (stream((0.0, event("{not json"))), "not JSON"),
        (stream((0.0, event("[1]"))), "not a JSON object"),
        (plain(500, {"error": "no object"}), "no object"),
        (plain(503, {}), "status 503"),
    ],
)
async def test_each_broken_reply_is_a_failed_outcome(steps: list[Step], word: str) -> None:
    outcome = await one(steps)
    assert not outcome.ok
    assert word in outcome.error


async def test_what_came_before_a_break_is_kept() -> None:
    outcome = await one([(0.0, STREAM_HEAD), (0.05, delta(content="half"))])
    assert (outcome.ok, outcome.text, len(outcome.chunk_s)) == (False, "half", 1)


async def test_time_limit_is_an_outcome() -> None:
    outcome = await one(stream((0.0, delta(content="x")), (30.0, finish())), timeout_s=0.2)
    assert outcome.error == "no whole reply within 0.2 s"
    assert outcome.latency_s < 5


async def test_nobody_listening_is_an_outcome() -> None:
    async with stub(lambda number, request: plain(200, {})) as url:
        endpoint = Endpoint.of(url)
    outcome = await complete(endpoint, Call("/", {}))
    assert "Error" in outcome.error
    assert outcome.status == 0


async def test_whole_replies_are_read_as_well() -> None:
    reply = {
        "choices": [{"message": {"content": "hi"}, "finish_reason": "stop", "token_ids": [7, 8]}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "kvalet": {"ram_tokens": 4},
    }
    outcome = await one(plain(200, reply))
    assert outcome.ok, outcome.error
    assert (outcome.text, outcome.token_ids, outcome.prompt_ids) == ("hi", (7, 8), (1, 2, 3, 4, 5))
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (5, 4, 2)
    assert outcome.record == {"ram_tokens": 4}
    assert outcome.s_per_token is None


async def test_the_request_on_the_wire() -> None:
    seen: list[bytes] = []

    def script(number: int, request: bytes) -> list[Step]:
        seen.append(request)
        return plain(200, {})

    async with stub(script) as url:
        call = Call("/v1/completions", {"prompt": "é"}, {"x-session-id": "a"})
        await complete(Endpoint.of(url + "/base/", key="k"), call)
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1")
    assert b"authorization: Bearer k" in head
    assert b"x-session-id: a" in head
    assert b"connection: close" in head
    assert body == '{"prompt":"é"}'.encode()


async def test_fetch_reads_a_body_and_refuses_half_of_one() -> None:
    async with stub(lambda number, request: plain(200, {"a": 1})) as url:
        assert await fetch(Endpoint.of(url), "/metrics") == (200, b'{"a": 1}')
    async with stub(lambda number, request: [(0.0, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n1")]) as url:
        with pytest.raises(ProtocolError):
            await fetch(Endpoint.of(url), "/metrics")


async def test_events_cut_anywhere_are_put_together() -> None:
    """Every byte in a chunk of its own, with CR LF line ends and comments between."""
    text = ': ping\r\n\r\ndata: {"choices":[{"delta":{"content":"é→"},"finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    steps: list[Step] = [(0.0, framed(bytes([byte]))) for byte in text.encode()]
    outcome = await one(stream(*steps))
    assert outcome.ok, outcome.error
    assert outcome.text == "é→"


@pytest.mark.parametrize("url", ["https://localhost", "localhost:80", "http://", "file:///x"])
def test_only_plain_http_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="http://"):
        Endpoint.of(url)


def test_endpoint_of_an_address() -> None:
    assert Endpoint.of("http://[::1]:81/v/") == Endpoint("::1", 81, "/v")
    assert Endpoint.of("http://host").port == 80


def test_a_summary_of_nothing() -> None:
    summary = summarise([])
    assert math.isnan(summary.ttft.p50_ms)
    assert summary.as_json()["ttft"] == {"n": 0, "p50_ms": None, "p90_ms": None, "p99_ms": None, "max_ms": None}
    assert "0 requests" in summary.table()
