"""Real connections to a real server process: clients that leave, stall, trickle and pile up."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scriptedproc import ScriptedProcess, Wire, chat_request, raw_request, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    with ScriptedProcess(tmp_path_factory.mktemp("server"), ping_s=0.3) as running:
        yield running
        assert "Traceback" not in running.log, running.log


def ended_as(server: ScriptedProcess, n_before: int, n: int) -> list[dict[str, Any]]:
    """The next ``n`` records; they come soon after the client's leaving."""
    until(f"{n} more records", lambda: len(server.requests_logged()) >= n_before + n)
    return server.requests_logged()[n_before:]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", ["close", "reset", "half"])
def test_a_client_that_leaves_ends_its_turn(server: ScriptedProcess, stream: bool, leave: str) -> None:
    before, started = len(server.requests_logged()), server.turns_started()
    with Wire(server.address) as wire:
        wire.send(chat_request("text:ab wait", stream=stream))
        until("the turn runs", lambda: server.turns_started() > started)
        {"close": wire.socket.close, "reset": wire.reset, "half": lambda: wire.socket.shutdown(1)}[leave]()
        record = ended_as(server, before, 1)[0]
    assert record["status"] == 499
    assert record["reason"] == "cancelled"
    assert record["stream"] is stream


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_clients_that_leave_at_once(server: ScriptedProcess, stream: bool, leave: str) -> None:
    """P52: connect, send, leave. Whatever was started is ended, and nothing is left open."""
    began, started = len(server.requests_logged()), server.turns_started()
    for _ in range(50):
        wire = Wire(server.address)
        wire.send(chat_request("wait", stream=stream))
        wire.reset() if leave == "reset" else wire.socket.close()
    with Wire(server.address) as wire:
        wire.send(chat_request("text:z stop", stream=False))
        assert b'"content":"z"' in wire.read_until(b"usage")
    until("every turn is over", lambda: over(server, began) == server.turns_started() - started)
    assert server.health()


def over(server: ScriptedProcess, began: int) -> int:
    return sum("turn_id" in record for record in server.requests_logged()[began:])


def test_a_disconnect_behind_pipelined_bytes_is_seen(server: ScriptedProcess) -> None:
    """P52: hypercorn alone never sees it while a whole answer is awaited."""
    before, started = len(server.requests_logged()), server.turns_started()
    with Wire(server.address) as wire:
        wire.send(chat_request("wait", stream=False) + raw_request("GET", "/v1/models"))
        until("the turn runs", lambda: server.turns_started() > started)
        wire.socket.close()
        assert ended_as(server, before, 1)[0]["status"] == 499


def test_pipelined_requests_are_answered_in_order(server: ScriptedProcess) -> None:
    with Wire(server.address) as wire:
        wire.send(chat_request("text:first stop", stream=False) + chat_request("text:second stop", stream=False))
        seen = wire.read_until(b"second")
        assert seen.index(b"first") < seen.index(b"second")
        assert seen.count(b"HTTP/1.1 200") == 2


def test_headers_come_at_once_and_silence_is_broken(server: ScriptedProcess) -> None:
    with Wire(server.address) as wire:
        wire.send(chat_request("wait"))
        head = wire.read_until(b"\r\n\r\n")
        assert b"text/event-stream" in head
        assert wire.read_until(b": ping\n\n").count(b": ping") == 1
        assert b'"role":"assistant"' in wire.seen


def test_a_connection_is_used_again_after_refusals(server: ScriptedProcess) -> None:
    """P43: whatever was refused, the next request on the connection works."""
    bad = [b"[]", b"{", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"model":"m","messages":[]}', b"null", b"123"]
    with Wire(server.address) as wire:
        for body in bad:
            wire.seen = b""
            wire.send(raw_request("POST", "/v1/chat/completions", body))
            assert wire.read_until(b'"error"').startswith(b"HTTP/1.1 400"), (body, wire.seen)
            wire.read_until(b"}}")
        wire.seen = b""
        wire.send(chat_request("text:ok stop", stream=False))
        assert b'"content":"ok"' in wire.read_until(b"usage")


def test_a_body_over_the_limit_is_refused_and_the_refusal_arrives(tmp_path: Path) -> None:
    with ScriptedProcess(tmp_path, max_body_bytes=100_000) as server:
        for declared in (True, False):
            with Wire(server.address) as wire:
                body = b"x" * 3_000_000
                if declared:
                    wire.send(raw_request("POST", "/v1/chat/completions", body))
                else:
                    head = raw_request("POST", "/v1/chat/completions", content_type="application/json",
                                       transfer_encoding="chunked")  # fmt: skip
                    wire.send(head + b"".join(b"%x\r\n%s\r\n" % (30_000, b"x" * 30_000) for _ in range(100)) + b"0\r\n\r\n")
                assert wire.read_until(b"}}").startswith(b"HTTP/1.1 413"), wire.seen
                wire.seen = b""
                wire.send(chat_request("text:ok stop", stream=False))
                assert b'"content":"ok"' in wire.read_until(b"usage")


def test_protocol_errors_carry_the_error_object(server: ScriptedProcess) -> None:
    both = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}"
    endless = b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for data in (b"nonsense\r\n\r\n", both, endless, http2):
        with Wire(server.address) as wire:
            wire.send(data)
            seen = wire.read_all()
        assert seen.startswith(b"HTTP/1.1 4"), seen
        error = json.JSONDecoder().raw_decode(seen.partition(b"\r\n\r\n")[2].decode())[0]["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert server.health()


def test_an_upgrade_is_ignored(server: ScriptedProcess) -> None:
    for wish in ("websocket", "h2c"):
        with Wire(server.address) as wire:
            wire.send(raw_request("GET", "/health", connection="upgrade", upgrade=wish))
            assert wire.read_until(b'"ok"').startswith(b"HTTP/1.1 200"), wire.seen


def test_a_reader_that_stalls_is_cut_off(tmp_path: Path) -> None:
    """P24: memory stays bounded meanwhile, others go on, and after the write timeout the turn is ended."""
    with ScriptedProcess(tmp_path, write_timeout_s=1.5) as server:
        with Wire(server.address, receive_buffer=4096) as stalled:
            stalled.send(chat_request("big:200000"))
            stalled.read_until(b"xxx")
            before = rss_bytes(server)
            with Wire(server.address) as other:
                other.send(chat_request("text:fine stop"))
                assert b"[DONE]" in other.read_until(b"[DONE]")
            record = ended_as(server, 1, 1)[0]
            assert rss_bytes(server) - before < 64 << 20
        assert (record["status"], record["error_code"]) == (499, "write_timeout")
        assert "Traceback" not in server.log


def test_a_slow_reader_gets_everything(server: ScriptedProcess) -> None:
    with Wire(server.address, receive_buffer=4096) as wire:
        wire.send(chat_request("big:300 stop"))
        wire.read_until(b"xxx")
        assert wire.read_until(b"[DONE]").count(b'"content":"x') == 300


def test_descriptors_stay_bounded(tmp_path: Path) -> None:
    """P50: 2,000 one-shot connections under a limit of 1,024 descriptors, with a keep-alive of 75 s."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

    with ScriptedProcess(tmp_path, preexec=limit, keep_alive_s=75.0) as server:
        idle = server.descriptors()
        most = 0
        for index in range(2000):
            with Wire(server.address) as wire:
                wire.send(raw_request("GET", "/health"))
                assert b"200" in wire.read_until(b"ok")
            if index % 100 == 0:
                most = max(most, server.descriptors())
        assert most < idle + 50, most
        until("all are closed", lambda: server.descriptors() <= idle + 1)
        assert "Traceback" not in server.log, server.log


def test_connections_over_the_bound_are_closed_at_once(tmp_path: Path) -> None:
    with ScriptedProcess(tmp_path, max_connections=3) as server:
        kept = [Wire(server.address) for _ in range(3)]
        for wire in kept:
            wire.send(raw_request("GET", "/health"))
            wire.read_until(b"ok")
        assert not answers(server)
        kept.pop().socket.close()
        until("there is room again", lambda: answers(server))
        for wire in kept:
            wire.socket.close()


def answers(server: ScriptedProcess) -> bool:
    try:
        with Wire(server.address) as wire:
            wire.send(raw_request("GET", "/health"))
            return b"200 " in wire.read_until(b"ok")
    except ConnectionError:
        return False


def rss_bytes(server: ScriptedProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
