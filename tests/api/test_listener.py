"""Small parts of the server: sockets, limits, the ready file, the order of the end, errors and log records."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from kvalet.api.config import ServerConfig
from kvalet.api.errors import END_ERRORS, ApiError, ended_badly, error_body, error_type, retry_after
from kvalet.api.exchange import CLIENT_GONE, Exchange, kv_record, usage
from kvalet.api.families import alone, by, counter, gauge, histogram_s
from kvalet.api.gate import lower_headers, request_id
from kvalet.api.listener import SEND_BUFFER_BYTES, Listener, bind, raise_descriptor_limit
from kvalet.api.logprobs import CompletionLogprobs, chat_logprobs
from kvalet.api.serve import Ending, drain, ready_file, serve_engine
from kvalet.runtime.plan import TokenLogprob
from kvalet.sched.histograms import LATENCY_MS, Histogram
from kvalet.sched.turns import EndReason, TurnReport
from scripted_engine import ScriptedEngine, ended


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application that never answers."""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bind(host: str) -> None:
    with bind(host, 0) as bound:
        assert bound.getsockname()[0] == host
        assert bound.getsockname()[1] > 0
        assert not bound.getblocking()


def test_the_kernel_holds_little_for_a_reader_that_stalls() -> None:
    """P24: an accepted socket inherits the bound."""
    with contextlib.closing(bind("127.0.0.1", 0)) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()):
            bound.setblocking(True)
            accepted, _ = bound.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("soft", "hard", "limit"), [(1024, 1024, 1024), (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 5000), (9000, 9000, 9000)]
)
def test_the_limit_on_descriptors_is_never_lowered(soft: int, hard: int, limit: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_descriptor_limit(5000, lambda number: (soft, hard)) == limit
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_the_limit_on_descriptors_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert raise_descriptor_limit(1000) == 1000
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.anyio
async def test_a_listener_can_be_closed_whenever() -> None:
    never_started = Listener(nothing, ServerConfig(port=0))
    await never_started.close(0.1)
    listener = Listener(nothing, ServerConfig(port=0))
    host, port = await listener.start()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(5):
        assert b" 500 " in await reader.readline()  # hypercorn's answer for an application that gives none
    writer.close()
    await listener.close(1.0)
    assert len(listener) == 0
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection(host, port)


@pytest.mark.anyio
async def test_a_connection_that_does_not_end_is_cut() -> None:
    stuck = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        stuck.set()
        await asyncio.Event().wait()

    listener = Listener(app, ServerConfig(port=0))
    host, port = await listener.start()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await stuck.wait()
    async with asyncio.timeout(5):
        await listener.close(0.05)
        assert await reader.read() == b""
    writer.close()


def test_the_ready_file_appears_whole_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    with ready_file(str(path), "http://x:1"):
        assert path.read_text() == "http://x:1\n"
        assert [item.name for item in tmp_path.iterdir()] == ["ready"]
    assert not path.exists()
    with ready_file("", "http://x:1"):
        assert not list(tmp_path.iterdir())


@pytest.mark.anyio
async def test_a_taken_port_is_an_error_before_anything_is_announced() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            await serve_engine(ScriptedEngine(), config, said.append)
    assert said == []


@pytest.mark.anyio
async def test_the_second_signal_ends_the_drain() -> None:
    engine = ScriptedEngine(script=lambda request: [asyncio.Event()])
    await engine.start_chat(None)  # type: ignore[arg-type]  # the script does not look at it
    ending = Ending()
    ending.signalled()
    assert (ending.asked.is_set(), ending.hurry.is_set()) == (True, False)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(drain(engine, 60.0, ending))
        ending.signalled()
    assert ending.hurry.is_set()
    assert engine.running == 1


def test_the_loss_of_the_device_asks_for_the_end() -> None:
    ending = Ending()
    ending.lost("")
    assert (ending.device_lost, ending.asked.is_set(), ending.hurry.is_set()) == ("unknown", True, False)


# errors


@pytest.mark.parametrize(
    ("status", "word"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"), (413, "invalid_request_error"),
     (429, "rate_limit_error"), (500, "server_error"), (503, "server_error")],
)  # fmt: skip
def test_types_of_errors(status: int, word: str) -> None:
    assert error_type(status) == word
    assert error_body(ApiError("m", status=status)) == {"error": {"message": "m", "type": word, "param": None, "code": None}}


@pytest.mark.parametrize(("seconds", "header"), [(0.01, "1"), (1.2, "2"), (59.5, "60"), (200, "60"), (-5, "1")])
def test_retry_after_stays_where_clients_wait(seconds: float, header: str) -> None:
    assert retry_after(seconds) == header


def test_every_bad_end_has_an_error() -> None:
    assert set(END_ERRORS) == set(EndReason) - {EndReason.STOP, EndReason.LENGTH}
    for reason in EndReason:
        error = ended_badly(reason)
        assert error.message
        assert error.status >= 499
        assert (error.retry_after_s > 0) == (error.status == 503)
    assert ended_badly(EndReason.GRAMMAR, "own words").message == "own words"


# records


def test_a_record_has_what_is_known() -> None:
    exchange = Exchange("r", "GET", "/v1/models", status=404, error_code="not_found")
    assert set(exchange.record()) == {"id", "method", "path", "status", "ms", "error_code"}
    exchange.client_gone = True
    assert exchange.record()["status"] == CLIENT_GONE
    exchange.turn_id, exchange.end = "t", ended("length")
    assert exchange.record()["finish"] == "length"
    assert exchange.record()["stream"] is False


def test_the_kv_record_and_usage_agree() -> None:
    report = TurnReport(
        prompt_tokens=10, completion_tokens=2, computed_tokens=3, ram_tokens=7, read_ms=1.00049, lost={"key": 1}
    )
    end = ended("stop", report=report)
    record = kv_record(end)
    assert (record["read_ms"], record["lost"], record["cached_tokens"]) == (1.0, {"key": 1}, 7)
    assert usage(end)["prompt_tokens_details"]["cached_tokens"] == 7
    assert usage(end)["total_tokens"] == 12


def test_header_names_and_repeats() -> None:
    scope = {"headers": [(b"X-Api-Key", b"one"), (b"x-api-key", b"two"), (b"accept", b"\xe9")]}
    assert lower_headers(scope) == {"x-api-key": "one", "accept": "é"}


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("", False), ("x" * 129, False), ("é", False), ("a\tb", False)])
def test_request_ids(given: str, kept: bool) -> None:
    found = request_id({"x-request-id": given})
    assert (found == given) is kept
    assert found.isprintable()


# families and logprobs


def test_families() -> None:
    negative = counter("c", "text", [((), -1.0)])
    assert [sample.value for sample in negative.samples] == [0.0]
    labelled = gauge("g", "text", by({"a": 1.5}), ("kind",))
    assert [(sample.labels, sample.value) for sample in labelled.samples] == [({"kind": "a"}, 1.5)]
    assert alone(3) == [((), 3)]
    times = Histogram(LATENCY_MS)
    times.add(1000.0)
    times.add(1e9)
    family = histogram_s("h", "t", [((), times.snapshot())])
    samples = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert samples["+Inf"] == 2
    assert samples["h_sum"] == pytest.approx(1_000_001.0)
    assert sum(1 for value in samples.values() if value == 1) > 1


def token_bytes(token: int) -> bytes:
    return [b"\xe6\x97", b"\xa5", b""][token]


def test_logprobs_of_half_characters_and_of_no_text() -> None:
    items = [TokenLogprob(token, -1.0 - token, ((token, -1.0), (1, float("-inf")))) for token in range(3)]
    chat = chat_logprobs(items, 1, token_bytes)
    assert b"".join(bytes(item["bytes"]) for item in chat).decode() == "日"
    assert [len(item["top_logprobs"]) for item in chat] == [1, 1, 1]
    assert chat[2]["token"] == ""
    lists = CompletionLogprobs(2, token_bytes)
    first, second = lists.lists(items[:1]), lists.lists(items[1:])
    assert first["text_offset"] + second["text_offset"] == [0, 1, 2]
    assert second["top_logprobs"][1] == {"": -1.0, "\ufffd": -9999.0}
