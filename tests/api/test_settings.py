"""Flags, variables and file into the frozen configurations; what is wrong is said with key and value."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
from kvalet.api.auth import key_name
from kvalet.api.config import EngineConfig, ServerConfig
from kvalet.api.settings import BadSettings, ServeSettings, load, parse_size

RENAMED = {
    "store_dir": "store", "write_timeout_s": "write_timeout_seconds", "drain_s": "drain_seconds", "api_keys": "api_key",
    "flush_s": "flush_seconds", "body_timeout_s": "body_timeout_seconds", "keep_alive_s": "keep_alive_seconds",
    "ping_s": "ping_seconds",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVALET_"):
            monkeypatch.delenv(name)


def test_defaults_are_the_configurations_own(tmp_path: Path) -> None:
    settings = load([], {}, tmp_path)
    assert settings.engine_config() == EngineConfig()
    assert settings.server_config() == ServerConfig()


def test_every_field_can_be_set() -> None:
    """A field that was added to a configuration must not be forgotten here."""
    for config in (EngineConfig, ServerConfig):
        for item in fields(config):
            assert RENAMED.get(item.name, item.name) in ServeSettings.model_fields


def test_flags(tmp_path: Path) -> None:
    settings = load(
        ["m.gguf", "--store", "/s", "--ram-bytes", "2GiB", "--port", "0", "--deterministic", "--drain-seconds", "3",
         "--lag", "0", "--api-key", "alice=ka", "--api-key", "kb", "--weights", "int4"], {}, tmp_path,
    )  # fmt: skip
    engine, server = settings.engine_config(), settings.server_config()
    assert (engine.model, engine.store_dir, engine.ram_bytes) == ("m.gguf", "/s", 2 << 30)
    assert (engine.deterministic, engine.drain_s, server.drain_s, engine.weights, engine.lag) == (True, 3.0, 3.0, "int4", 0)
    assert server.port == 0
    assert server.api_keys == (("alice", "ka"), (key_name("kb"), "kb"))


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvalet.toml").write_text('port = 1\nhost = "::1"\nram_bytes = "1MB"\napi_key = ["a", "b"]\n')
    monkeypatch.setenv("KVALET_PORT", "2")
    monkeypatch.setenv("KVALET_RAM_BYTES", "3")
    settings = load(["--port", "3"], {}, tmp_path)
    assert (settings.port, settings.ram_bytes, settings.host, settings.api_key) == (3, 3, "::1", ["a", "b"])
    assert load([], {}, tmp_path).port == 2


def test_a_variable_may_hold_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_API_KEY", "a, b")
    assert load([], {}, tmp_path).api_key == ["a", "b"]


@pytest.mark.parametrize("how", ["--config FILE", "--config=FILE", "variable"])
def test_a_named_file(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "other.toml"
    file.write_text("port = 7\n")
    environment = {"KVALET_CONFIG": str(file)} if how == "variable" else {}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = [] if how == "variable" else how.replace("FILE", str(file)).split()
    assert load(arguments, environment, tmp_path).port == 7
    file.unlink()
    with pytest.raises(BadSettings, match="is not there"):
        load(arguments, environment, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "toml", "environment", "said"),
    [
        (["--port", "x"], "", {}, ["port", "'x'", "--port"]),
        (["--port", "70000"], "", {}, ["port", "70000"]),
        (["--ram-bytes", "3quux"], "", {}, ["ram_bytes", "3quux"]),
        (["--ping-seconds", "16"], "", {}, ["ping_seconds", "16"]),
        (["--weights", "fp8"], "", {}, ["weights", "fp8"]),
        (["--max-nesting", "254"], "", {}, ["max_nesting", "254"]),
        ([], "prot = 5", {}, ["prot", "5", "kvalet.toml"]),
        ([], "port = 'x'", {}, ["port", "x"]),
        ([], "port = ", {}, ["kvalet.toml"]),
        ([], "", {"KVALET_PROT": "5"}, ["KVALET_PROT", "5"]),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, arguments: list[str], toml: str, environment: dict[str, str], said: list[str]
) -> None:
    if toml:
        (tmp_path / "kvalet.toml").write_text(toml)
    with pytest.raises(BadSettings) as error:
        load(arguments, environment, tmp_path)
    assert all(word in str(error.value) for word in said), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arguments", [["--prot", "5"], ["m.gguf", "second"]])
def test_unknown_flags_end_with_status_2(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        load(arguments, {}, tmp_path)
    assert error.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert any(word in said for word in arguments)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("0", 0), ("-1", -1), ("12", 12), ("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5 gb", 1_500_000_000), ("4K", 4000),
     ("4ki", 4096), ("1TiB", 1 << 40)],
)  # fmt: skip
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2 apples", "1e9", "0x10", "2GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)
