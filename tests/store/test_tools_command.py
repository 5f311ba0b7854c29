"""`kvalet store` as a command: starts without torch, statuses, sentences, interrupts, readers that go away, hostile names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvalet.api import store_command
from kvalet.api.sizes import parse_age, size_text
from kvalet.api.store_answer import shown, when
from storekit import Rig
from storetool import child, picture, tool

REST = {"rm": ("session",), "export": ("session", "-o", "never.tar")}
"""What these commands need besides a store."""
EVERY = ["check", "export", "gc", "ls", "rm"]
HEAVY = ("torch", "pydantic", "starlette", "hypercorn", "tokenizers", "rich")
WAIT_S = 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stores") / "s"
    with Rig(directory) as rig:
        rig.write([*rig.chain(3, tail=5), *rig.chain(2, seed=1, ns="bob")])
    return directory


@pytest.mark.parametrize(
    "arguments", [["ls"], ["check", "--read-data"], ["gc", "--dry-run"], ["rm", "a", "--dry-run"]], ids=lambda words: words[0]
)
def test_starts_without_torch_and_other_heavy_things(store: Path, arguments: list[str]) -> None:
    program = (
        f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
        "from kvalet.__main__ import main\n"
        f"status = main(['store', *{arguments!r}, '--store', sys.argv[1], '--json'])\n"
        f"assert all(sys.modules[name] is None for name in {HEAVY!r})\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program, str(store)], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (int(arguments[0] == "rm"), "")  # it has no session of that name
    assert json.loads(done.stdout)["store"] == str(store)


@pytest.mark.parametrize("words", [[], ["nonsense"], ["--json"]])
def test_wrong_usage_of_the_command_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert store_command.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: kvalet store COMMAND")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_tells_commands_and_statuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        store_command.main(words)
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "exit status: 0 good; 1 damage found" in out
    assert all(f"\n  {name} " in out for name in EVERY)


@pytest.mark.parametrize("command", EVERY)
def test_each_command_explains_itself_and_its_statuses(command: str) -> None:
    ran = tool(command, "x", "--help")
    assert ran.status == 0
    assert "exit status: 0 good; 1 damage found" in ran.out
    assert "--json" in ran.out


@pytest.mark.parametrize("command", ["ls", "check", "gc"])
def test_without_a_store_the_sentence_says_how_to_name_one(
    command: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVALET_STORE", raising=False)
    assert store_command.main([command]) == 2
    assert capsys.readouterr().err == (
        f"kvalet store {command}: say which store: --store DIR, or KVALET_STORE in the environment\n"
    )
    monkeypatch.setenv("KVALET_STORE", str(store))
    assert store_command.main([command, "--json"]) == 0


WRONG = [
    ("check", "--subset", "0/3"),
    ("check", "--subset", "4/3"),
    ("check", "--subset", "1"),
    ("check", "--threads", "0"),
    ("check", "--no-such"),
    ("gc", "--cap", "many"),
    ("gc", "--cap=-1"),
    ("gc", "--older-than", "5x"),
    ("ls", "extra"),
    ("rm",),
    ("rm", "a", "b"),
    ("export", "a"),
    ("export", "-o", "never.tar"),
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_arguments_end_with_2_and_change_nothing(store: Path, words: tuple[str, ...]) -> None:
    before = picture(store)
    ran = tool(words[0], store, *words[1:])
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.strip()
    assert picture(store) == before


@pytest.mark.parametrize("command", EVERY)
def test_what_is_no_store_is_refused_in_one_sentence_and_untouched(tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "photos").mkdir(mode=0o700)
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    (tmp_path / "project" / "c").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    os.mkfifo(tmp_path / "pipe")
    before = picture(tmp_path)
    for name in ("empty", "photos", "project", "file", "link", "pipe", "missing", "x" * 10_000, "nul\0"):
        ran = tool(command, tmp_path / name, *REST.get(command, ()))
        assert (ran.status, ran.out) == (2, ""), name
        assert ran.err.count("\n") == 1
        assert ran.err.startswith(f"kvalet store {command}: The")
        assert ran.err.endswith(".\n")
    assert picture(tmp_path) == before


def test_a_store_of_another_user_is_looked_at_and_not_changed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may check a server's store: its files are right if they are the owner's. Deleting is the owner's."""
    monkeypatch.setattr(os, "geteuid", lambda: store.stat().st_uid + 1)
    before = picture(store)
    assert tool("check", store, "--read-data").status == 0
    ran = tool("gc", store, "--cap", "0")
    assert (ran.status, ran.out) == (2, "")
    assert f"belongs to user {store.stat().st_uid}; run this as that user." in ran.err
    assert picture(store) == before


def test_ls_sums_by_tenant_and_kind(store: Path) -> None:
    ran = tool("ls", store, "--json", "--files")
    data = ran.data
    assert (ran.status, data["cap_bytes"], data["server_pid"]) == (0, None, None)
    assert sorted((one["kind"], one["files"]) for one in data["sums"]) == [("chunks", 2), ("chunks", 3), ("tails", 1)]
    assert sum(one["bytes"] for one in data["sums"]) == data["bytes"] == sum(one["bytes"] for one in data["list"])
    on_disk = {str(path.relative_to(store)) for path in store.rglob("*") if path.parent.parent.name in ("c", "t")}
    assert {one["path"] for one in data["list"]} == on_disk
    assert all(one["oldest_use"] <= one["newest_use"] for one in data["sums"])
    assert data["free_bytes"] > 0
    lines = tool("ls", store, "--files").out
    assert all(path in lines for path in on_disk)
    assert "stands in no file" in lines


def test_ls_changes_nothing_and_says_what_is_odd(store: Path, tmp_path: Path) -> None:
    before = picture(store)
    tool("ls", store)
    assert picture(store) == before
    with Rig(tmp_path / "s"):
        pass
    (tmp_path / "s" / "c" / "zz").write_bytes(b"")
    ran = tool("ls", tmp_path / "s")
    assert ran.status == 0
    assert "findings: 1 (`kvalet store check` names them)" in ran.out


def test_a_reader_that_goes_away_is_no_error(store: Path) -> None:
    """`kvalet store ls | head -0`: quiet, and the status is the command's own."""
    for arguments in (["ls", "--files"], ["check"]):
        process = child(*arguments, "--store", str(store))
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 0
        process.stderr.close()
        assert process.stdin is not None
        process.stdin.close()


INTERRUPTED = """
import os, signal, sys
from kvalet.store import inspect_file
look = inspect_file.Reader._refuse_payload
sent = []
def slow(self, fd, head):
    if not sent:
        sent.append(os.kill(os.getpid(), signal.SIGINT))
    while not self._stopped():
        pass
    return look(self, fd, head)
inspect_file.Reader._refuse_payload = slow
from kvalet.__main__ import main
sys.exit(main(["store", "check", "--read-data", "--threads", "1", "--store", sys.argv[1]]))
"""


def test_an_interrupt_ends_with_130_in_one_line(store: Path) -> None:
    before = picture(store)
    done = subprocess.run([sys.executable, "-P", "-c", INTERRUPTED, str(store)], capture_output=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr == b"kvalet store check: interrupted\n"
    assert picture(store) == before


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain-1.2", "plain-1.2"),
        ("ümläut ☃", "ümläut ☃"),
        ("a\nb\tc\x1b[0m", "a\\nb\\tc\\x1b[0m"),
        ("back\\slash", "back\\\\slash"),
        ("\udcff", "\\xff"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("x" * 300, "x" * 100 + "..." + "x" * 100),
    ],
)
def test_names_are_shown_harmlessly(text: str, safe: str) -> None:
    assert shown(text) == safe


def test_sizes_ages_and_times() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 5_898_240, 10**12, 10**16)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "5.9 MB",
        "1.0 TB",
        "10000.0 TB",
    ]
    ages = {"45s": 45, "90m": 5400, "12h": 43_200, "30d": 2_592_000, "2w": 1_209_600, "1.5h": 5400}
    assert {text: parse_age(text) for text in ages} == ages
    for text in ("", "5", "d", "-1d", "5y", "1e3s", "5 d d"):
        with pytest.raises(ValueError, match="is no age"):
            parse_age(text)
    assert [when(ns) for ns in (1_764_590_000 * 10**9, 0, -1, 1 << 120)] == ["2025-12-01 11:53:20", "-", "-", "-"]
