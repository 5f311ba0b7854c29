"""How a real server process ends: signals, streams under way, deadlines, the loss of the device."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from kvalet.api.serve import drained_words
from kvalet.sched.status import DrainReport
from scriptedproc import ScriptedProcess, Wire, chat_request, raw_request, until

QUICK_S = 5.0
"""What takes milliseconds may take this long on a machine that is busy with other tests."""


def test_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    """P51: also with idle keep-alive connections open."""
    with ScriptedProcess(tmp_path) as server, Wire(server.address) as idle:
        idle.send(raw_request("GET", "/health"))
        idle.read_until(b"ok")
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.exit_status(60) == 0
        assert time.monotonic() - began < QUICK_S
        assert not server.ready.exists()
        assert f"kvalet: listening on {server.url}\n" in server.log
        assert "drained: nothing is left to do" in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_may_finish_while_new_work_is_refused(tmp_path: Path, number: int) -> None:
    with ScriptedProcess(tmp_path, drain_s=30.0) as server, Wire(server.address) as stream, Wire(server.address) as other:
        stream.send(chat_request("text:a later:5.0 text:b stop"))
        stream.read_until(b'"content":"a"')
        other.send(raw_request("GET", "/ready"))
        assert other.read_until(b"ready").startswith(b"HTTP/1.1 200")
        server.signal(number)
        until("it is not ready any more", lambda: refuses(server))
        with Wire(server.address) as late:
            late.send(chat_request("text:a stop"))
            head = late.read_until(b"}}").lower()
            assert head.startswith(b"http/1.1 503")
            assert b"retry-after: 5\r\n" in head
        assert b'"finish_reason":"stop"' in stream.read_until(b"data: [DONE]\n\n")
        assert server.exit_status(60) == 0
        assert "Traceback" not in server.log


def refuses(server: ScriptedProcess) -> bool:
    with Wire(server.address) as wire:
        wire.send(raw_request("GET", "/ready"))
        return wire.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 503")


def test_an_endless_stream_ends_with_an_error_and_a_closed_body(tmp_path: Path) -> None:
    """P51: within the drain time + 2 s, whole answers and streams alike."""
    with ScriptedProcess(tmp_path, drain_s=0.7) as server, Wire(server.address) as stream, Wire(server.address) as whole:
        whole.send(chat_request("wait", stream=False))
        until("the whole one runs", lambda: server.turns_started() == 1)
        stream.send(chat_request("text:a wait"))
        stream.read_until(b'"content":"a"')
        began = time.monotonic()
        server.signal()
        seen = stream.read_all()
        assert b'"code":"shutdown"' in seen
        assert seen.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert whole.read_all().startswith(b"HTTP/1.1 503")
        assert server.exit_status(60) == 0
        assert 0.6 < time.monotonic() - began < 0.7 + 2.0 + QUICK_S


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (DrainReport(True, 0), "nothing is left to do"),
        (DrainReport(False, None), "how much did not reach the disk is not known"),
        (DrainReport(True, 3, records_left=2), "3 chunks did not reach the disk, 2 sessions are not recorded to their end"),
        (DrainReport(True, 0, lost_pages=1, lost_chunks=4), "nothing is left to do, 1 pages and 4 chunks went with the device"),
    ],
)
def test_what_a_drain_left_behind_is_said_in_words(report: DrainReport, words: str) -> None:
    assert drained_words(report) == words


def test_a_second_signal_hurries(tmp_path: Path) -> None:
    with ScriptedProcess(tmp_path, drain_s=60.0) as server, Wire(server.address) as stream:
        stream.send(chat_request("text:a wait"))
        stream.read_until(b'"content":"a"')
        server.signal()
        until("the drain has begun", lambda: refuses(server))
        server.signal()
        assert server.exit_status(60) == 0


def test_the_loss_of_the_device_ends_the_process_with_70(tmp_path: Path) -> None:
    with ScriptedProcess(tmp_path, drain_s=5.0) as server, Wire(server.address) as wire:
        wire.send(chat_request("text:a lose stop"))
        wire.read_until(b"[DONE]")
        assert server.exit_status(60) == 70
        assert "the device is lost (the script says so)" in server.log


def test_a_defect_cuts_the_stream_and_leaves_the_server_alive(tmp_path: Path) -> None:
    with ScriptedProcess(tmp_path) as server:
        with Wire(server.address) as stream:
            stream.send(chat_request("text:a break"))
            seen = stream.read_all()
        assert b'"content":"a"' in seen
        assert b"[DONE]" not in seen
        assert b"Traceback" not in seen
        assert not seen.endswith(b"0\r\n\r\n")
        with Wire(server.address) as whole:
            whole.send(chat_request("break", stream=False))
            answer = whole.read_until(b"}}")
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"the script broke" not in answer
        assert "the script broke" in server.log
        assert server.health()
