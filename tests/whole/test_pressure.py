"""Clients that vanish, prompts that never fit, seeds beside neighbours: the server stays whole (P18, P22, P25, P34, P44)."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlparse

import pytest
from serverproc import Server

PAGE = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--weights", "fp32", "--pool-tokens", "1024", "--ram-bytes", "0", "--max-rows", "8") as running:
        yield running


def prompt_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(n)]


def settle(server: Server, seconds: float = 10.0) -> dict[str, float]:
    """Poll until nothing runs or waits; the bound is 10x the second of P22."""
    deadline = time.monotonic() + seconds
    while True:
        now = {name: server.metric(f"vllm:num_requests_{name}") for name in ("running", "waiting")}
        if not any(now.values()):
            return now
        assert time.monotonic() < deadline, now


@pytest.mark.parametrize("n", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 8 * PAGE])
@pytest.mark.parametrize("max_tokens", [1, 16])
def test_whole_prompt_cached(server: Server, n: int, max_tokens: int) -> None:
    """P25: the second answer has the ids of the first; at least one token is always computed."""
    ids = prompt_of(n, seed=n * 31 + max_tokens)
    first = server.complete(ids, max_tokens)
    second = server.complete(ids, max_tokens)
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached <= n - 1
    assert cached > 0 or n < PAGE
    longer = server.complete([*ids, *first["choices"][0]["token_ids"], 5, 6, 7], 1)
    assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] >= (n // PAGE) * PAGE


def test_request_larger_than_the_pool_is_refused_and_blocks_nobody(server: Server) -> None:
    """P34."""
    status, reply = server.request(
        "/v1/completions", {"model": server.model, "prompt": prompt_of(1500), "max_tokens": 4, "temperature": 0}
    )
    assert status == 400
    assert "pool" in reply["error"]["message"]
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda i: server.complete(prompt_of(40, i), 3), range(10)))
    assert all(len(r["choices"][0]["token_ids"]) == 3 for r in replies)
    outgrown = server.complete(prompt_of(900, 5), 400)
    assert outgrown["choices"][0]["finish_reason"] == "length"
    assert 1 <= len(outgrown["choices"][0]["token_ids"]) <= 400


def test_context_edges(server: Server) -> None:
    """P16 with a pool smaller than the context: the sizes around the pool's limit answer by the same rule every time."""
    for max_tokens in (0, -1, 1.5, "16"):
        status, reply = server.request(
            "/v1/completions", {"model": server.model, "prompt": [1, 2, 3], "max_tokens": max_tokens, "temperature": 0}
        )
        assert status == 400, (max_tokens, reply)
        assert reply["error"]["param"] == "max_tokens"
    one = server.complete([1, 2, 3], 1)
    assert one["choices"][0]["finish_reason"] == "length"


def raw_request(server: Server, body: dict[str, Any]) -> socket.socket:
    address = urlparse(server.url)
    assert address.hostname
    assert address.port
    sock = socket.create_connection((address.hostname, address.port), timeout=20)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_vanished_clients_leave_nothing_behind(server: Server) -> None:
    """P22, P52: closed or reset at once, while queued, in prefill, after the first token; stream and whole."""
    model = server.model
    before = server.metric("kvalet_turns_ended_total", reason="cancelled")
    sockets = []
    for i in range(20):
        body = {"model": model, "prompt": prompt_of(200, i), "max_tokens": 4000, "stream": i % 2 == 0, "ignore_eos": True}
        sock = raw_request(server, body)
        if i % 4 == 0:
            reset(sock)
        elif i % 4 == 1:
            sock.close()
        else:
            sockets.append(sock)
    for i, sock in enumerate(sockets):
        if i < 2:
            try:
                sock.recv(1)
            except TimeoutError:
                pass
        reset(sock) if i % 2 else sock.close()
    settle(server)
    assert server.metric("kvalet_turns_ended_total", reason="cancelled") > before
    assert server.metric("kvalet_pages", state="leased") == 0
    start = time.monotonic()
    server.complete([1, 2, 3], 2)
    assert time.monotonic() - start < 10


def test_bad_sampling_values_name_their_field_beside_a_running_request(server: Server) -> None:
    """P44."""
    bad: list[tuple[str, Any]] = [
        ("temperature", -1),
        ("temperature", "0.5"),
        ("temperature", 1e9),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("presence_penalty", 10),
        ("logit_bias", {"49152": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"x": 1}),
        ("stop_token_ids", [49152]),
        ("stop_token_ids", [-1]),
        ("min_tokens", 99),
        ("prompt", [49152]),
        ("seed", "x"),
        ("stop", [""]),
    ]
    with ThreadPoolExecutor(1) as pool:
        alone = server.complete(prompt_of(30), 24)
        running = pool.submit(server.complete, prompt_of(30), 24)
        for field, value in bad:
            body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 4, field: value}
            status, reply = server.request("/v1/completions", body)
            assert status == 400, (field, value, reply)
            assert str(reply["error"]["param"]).startswith(field), (field, value, reply)
        assert running.result()["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    for text in (b'{"model": "m", "temperature": NaN}', b'{"temperature": 1e400}', b"[]", b"", b"{", b"\xff\xfe", b"null"):
        assert server.request("/v1/completions", text)[0] == 400
    tiny = server.complete([1, 2, 3], 4, temperature=1e-8)
    assert tiny["choices"][0]["token_ids"] == server.complete([1, 2, 3], 4)["choices"][0]["token_ids"]


def test_seeded_request_ignores_its_neighbours(server: Server) -> None:
    """P18 at fp32: one random stream per request, whatever shares the batch."""

    def sampled(seed: int | None) -> list[int]:
        extra = {} if seed is None else {"seed": seed}
        reply = server.complete([504, 3575, 282, 4649, 314], 24, temperature=0.8, **extra)
        ids: list[int] = reply["choices"][0]["token_ids"]
        return ids

    alone = sampled(42)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(sampled, seed) for seed in (42, None, None, 7, None, None, 42, None)]
        replies = [future.result() for future in futures]
    assert replies[0] == replies[6] == alone
    unseeded = [tuple(replies[i]) for i in (1, 2, 4, 5, 7)]
    assert len(set(unseeded)) > 1
