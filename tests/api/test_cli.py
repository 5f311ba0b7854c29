"""The command line: dispatch, doctor, the terminal chat, and starts that cannot be."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from kvalet import __version__
from kvalet.__main__ import COMMANDS, main
from kvalet.api import chat_command, doctor
from kvalet.api.chat_command import ChatError, Client, talk
from kvalet.api.doctor import Verdict
from scriptedproc import ScriptedProcess

SAFE = {**{k: v for k, v in os.environ.items() if not k.startswith("KVALET_")}, "PYTHONSAFEPATH": "1"}


def kvalet(*arguments: str, timeout_s: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvalet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**SAFE, **variables}, check=False)


def test_version_is_fast_and_loads_nothing() -> None:
    code = (
        "import sys, kvalet.__main__ as m; m.main(['--version']); print([n for n in ('torch', 'pydantic') if n in sys.modules])"
    )
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=SAFE, timeout=30, check=True)
    assert done.stdout.splitlines() == [f"kvalet {__version__}", "[]"]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 2.0


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["dance"], 2)])
def test_usage(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    said = capsys.readouterr()
    text = said.out + said.err
    assert all(f"  {name}" in text for name in COMMANDS)
    assert ("'dance'" in text) == ("dance" in arguments)


def test_every_command_is_there() -> None:
    for target, _ in COMMANDS.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model at all" * 100])
def test_a_model_that_is_none_ends_with_2_and_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    done = kvalet("serve", str(path), "--port", "0")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stderr.strip().splitlines()
    assert len(said) == 1, done.stderr
    assert said[0].startswith("kvalet: ")


def test_unknown_settings_end_with_2(tmp_path: Path) -> None:
    done = kvalet("serve", KVALET_PROT="5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "KVALET_PROT" in done.stderr


# doctor


def findings(
    arguments: list[str], environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> dict[str, dict[str, str]]:
    status = doctor.main(["--json", *arguments], environment)
    report = orjson.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0)
    return {finding["name"]: finding for finding in report["findings"]}


def test_doctor_finds_its_way(tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings([str(model_path), "--store", str(tmp_path / "not" / "yet")], {}, capsys)
    assert [finding["verdict"] for finding in found.values() if finding["verdict"] == Verdict.WRONG] == []
    assert str(tmp_path) in found["direct i/o"]["found"]
    assert "torch" in found["packages"]["found"]
    assert "sha256 b179c952" in found["model"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings([], {"KVALET_CACHE": str(tmp_path)}, capsys)
    assert found["model"]["verdict"] == Verdict.WRONG
    assert "fetch_model" in found["model"]["advice"]
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nope")
    assert "no GGUF" in findings([str(bad)], {}, capsys)["model"]["advice"]


def test_doctor_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([str(tmp_path / "none.gguf")], {}) == 1
    said = capsys.readouterr().out
    assert "WRONG  model:" in said
    assert "       -> give the path" in said


def test_cpu_flags(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t: other\n")
    assert doctor.cpu_flags(info) == {"fpu", "avx2", "amx_bf16"}
    assert doctor.cpu_flags(tmp_path / "none") == frozenset()


# chat


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    with ScriptedProcess(tmp_path_factory.mktemp("chat")) as running:
        yield running


def conversation(server: ScriptedProcess, *lines: str) -> tuple[str, Client]:
    written: list[str] = []
    left = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    client = Client(server.url + "/v1")
    client.find_model()
    talk(client, "be brief", read, written.append)
    return "".join(written), client


def test_a_conversation(server: ScriptedProcess) -> None:
    said, client = conversation(server, "text:hello stop", "", "text:again stop", "/help", "/quit", "never")
    assert client.model == "m"
    assert said.startswith("hello\n(10 tokens in, 6 of them cached; 3 out)\nagain\n")
    assert "never" not in said
    sessions = {record["session"] for record in server.requests_logged() if record["path"].endswith("completions")}
    assert client.session in sessions


def test_errors_do_not_end_the_conversation(server: ScriptedProcess) -> None:
    said, _ = conversation(server, "refuse", "text:fine stop")
    assert "(error: Too many requests are waiting.)" in said
    assert "fine" in said


def test_a_new_conversation_is_a_new_session(server: ScriptedProcess) -> None:
    client = Client(server.url + "/v1")
    first = client.session
    lines = iter(["/new", "/quit"])
    talk(client, "", lambda prompt: next(lines), print)
    assert client.session != first


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat_command.main(["--url", "http://127.0.0.1:9/v1"], {}) == 2
    assert "start one with `kvalet serve`" in capsys.readouterr().err
    with pytest.raises(ChatError):
        Client("nonsense").find_model()


def test_a_base_url_without_its_end_is_hinted_at(server: ScriptedProcess) -> None:
    with pytest.raises(ChatError, match=f"is the base URL {server.url}/v1"):
        Client(server.url).find_model()
