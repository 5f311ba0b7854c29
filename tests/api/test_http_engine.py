"""The HTTP surface over the real engine and the real model: edges of the context, large bodies, both modes alike."""

from __future__ import annotations

import json
import math
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prober import Prober
from scriptedproc import until
from serverproc import Server

CONTEXT = 1024
MOST_HEALTH_S = 0.25
MOST_GAP_S = 5.0
"""Between two pieces of a stream: the shortest freeze that the case tells of. The longest gap that was measured, with five
other programs on two cores, is 0.7 s."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--context-tokens", str(CONTEXT), "--pool-tokens", "4096", "--ram-bytes", "0") as running:
        yield running


def stream_of(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, text = server.request(path, {**body, "stream": True})
    assert status == 200, text
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


def prompt_of(n_tokens: int) -> list[int]:
    draw = random.Random(1)
    return [draw.randrange(1000, 40_000) for _ in range(n_tokens)]


def test_edges_of_the_context(server: Server) -> None:
    """P16: a prompt that leaves no token is refused in the words that agents know; one that leaves one gets one."""
    fields = {"model": server.model, "temperature": 0, "ignore_eos": True}
    for n_prompt, max_tokens, n_answer in (
        (CONTEXT - 2, 1, 1),
        (CONTEXT - 2, 2, 2),
        (CONTEXT - 2, 10**12, 2),
        (CONTEXT - 1, 2, 1),
    ):
        body = {**fields, "prompt": prompt_of(n_prompt), "max_tokens": max_tokens}
        status, reply = server.request("/v1/completions", body)
        assert status == 200, reply
        assert reply["usage"]["completion_tokens"] == n_answer
        assert reply["choices"][0]["finish_reason"] == "length"
    for n_prompt in (CONTEXT, CONTEXT + 1):
        for stream in (False, True):
            body = {**fields, "prompt": prompt_of(n_prompt), "stream": stream}
            status, reply = server.request("/v1/completions", body)
            assert status == 400
            error = reply["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"maximum context length is {CONTEXT} tokens" in error["message"]
            assert str(n_prompt) in error["message"]


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 7, 16])
def test_both_modes_say_the_same(server: Server, n_tokens: int) -> None:
    """P13, P20, P21: text, usage, log-probabilities, and no character cut in two."""
    body = {
        "model": server.model, "messages": [{"role": "user", "content": "Repeat: 😀日本語 é"}], "temperature": 0,
        "max_tokens": n_tokens, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    status, whole = server.request("/v1/chat/completions", body)
    assert status == 200
    chunks = stream_of(server, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    choice = whole["choices"][0]
    assert text == choice["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == n_tokens
    assert "prompt_tokens_details" in whole["usage"]
    items = choice["logprobs"]["content"]
    streamed = [item for c in chunks[:-1] if c["choices"][0]["logprobs"] for item in c["choices"][0]["logprobs"]["content"]]
    assert [item["token"] for item in streamed] == [item["token"] for item in items]
    assert len(items) == n_tokens
    assert all(item["logprob"] <= 0 and len(item["top_logprobs"]) == 2 for item in items)
    assert bytes(byte for item in items for byte in item["bytes"]).decode("utf-8", "replace").startswith(text.rstrip("\ufffd"))


def test_a_prompt_is_cached_in_both_modes(server: Server) -> None:
    """P21: nothing cold, whole pages warm, always less than the prompt."""
    body = {"model": server.model, "prompt": prompt_of(300)[::-1], "max_tokens": 2, "temperature": 0}
    seen = []
    for _ in range(2):
        status, reply = server.request("/v1/completions", body)
        assert status == 200
        seen.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    streamed = stream_of(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})[-1]
    seen.append(streamed["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert seen[0] == 0
    assert seen[1] == seen[2]
    assert 288 <= seen[1] < 300


def read_gaps(server: Server, stop: threading.Event) -> float:
    """Streams until ``stop`` is set, one answer after the other. The longest time between two pieces of one answer (s)."""
    body = {"model": server.model, "prompt": prompt_of(20), "max_tokens": 400, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    longest = 0.0
    while not stop.is_set():
        with urllib.request.urlopen(request, timeout=60) as reply:
            last = 0.0
            for line in reply:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    longest, last = max(longest, now - last if last else 0.0), now
                if stop.is_set():
                    break
    return longest


@pytest.mark.alone
@pytest.mark.parametrize(("n_bytes", "n_messages", "status"), [(5 << 20, 1, 400), (5 << 20, 20_000, 400), (27 << 20, 1, 413)])
def test_large_bodies_do_not_freeze_the_server(server: Server, n_bytes: int, n_messages: int, status: int) -> None:
    """P38: the body is refused (bytes or tokens) while four streams run; /health is answered all the time, 99 of 100 probes
    within 250 ms, and the streams go on."""
    content = "word " * (n_bytes // n_messages // 5)
    body = {"model": server.model, "messages": [{"role": "user", "content": content}] * n_messages}
    data, stop = json.dumps(body).encode(), threading.Event()
    with ThreadPoolExecutor(4) as pool, Prober(server.url, 0.02) as prober:
        streams = [pool.submit(read_gaps, server, stop) for _ in range(4)]
        try:
            until("the streams run", lambda: server.metric("vllm:num_requests_running") == 4, 60)
            for _ in range(1 if status == 400 else 20):  # a refusal by length is over before the second probe
                found, reply = server.request("/v1/chat/completions", data)
                assert (found, reply["error"]["code"]) == (
                    status,
                    "context_length_exceeded" if status == 400 else "body_too_large",
                )
        finally:
            stop.set()
        gaps = [stream.result() for stream in streams]
    times = sorted(prober.times)
    assert times[math.ceil(len(times) * 0.99) - 1] < MOST_HEALTH_S, times[-5:]
    assert max(gaps) < MOST_GAP_S, gaps
    until("the streams are over", lambda: server.metric("vllm:num_requests_running") == 0, 60)


def test_a_scrape_says_that_nothing_runs(server: Server) -> None:
    """P42."""
    model = server.model
    assert server.metric("vllm:num_requests_running", model_name=model) == 0
    assert server.metric("vllm:num_requests_waiting", model_name=model) == 0
    assert 0 <= server.metric("vllm:kv_cache_usage_perc", model_name=model) <= 1
    assert server.metric("kvalet_turns_ended_total", reason="internal") == 0
    pages = sum(server.metric("kvalet_pages", state=state) for state in ("free", "held", "leased"))
    assert pages == server.metric("kvalet_pool_pages")
