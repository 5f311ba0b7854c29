"""Arguments, environment and kvalet.toml -> the frozen configurations. The only place that reads any of them.

Precedence: flags, then ``KVALET_*`` variables, then kvalet.toml, then the defaults, which are those of the configurations
themselves. An unknown key or a bad value stops the start; the sentence names key and value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from kvalet.api.auth import key_name
from kvalet.api.config import EngineConfig, ServerConfig
from kvalet.api.sizes import parse_size
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

PREFIX = "KVALET_"
DEFAULT_FILE = "kvalet.toml"
OTHER_VARIABLES = frozenset({"KVALET_CONFIG", "KVALET_CACHE"})
"""Variables of ours that are no settings of the server."""
ENGINE = EngineConfig()
SERVER = ServerConfig()


class BadSettings(Exception):
    """One sentence for the person who started the program."""


def parse_list(value: Any) -> Any:
    """ "a,b" -> ["a", "b"], for variables; lists pass through."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(parse_size)]
Names = Annotated[list[str], NoDecode, BeforeValidator(parse_list)]
Seconds = Annotated[float, Field(gt=0)]


class ServeSettings(BaseSettings):
    """Serve one model over HTTP (OpenAI's API), with idle sessions spilled to RAM and disk."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_prog_name="kvalet serve",
        cli_hide_none_type=True,
    )

    model: CliPositionalArg[str] = Field(
        "", description="a GGUF file, a model folder, or OWNER/NAME that was pulled; none = the default model"
    )
    served_name: str = Field(ENGINE.served_name, description="name of the model in the API; none = from the file")
    device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="where the model runs; auto = a GPU if there is one")
    device_share: float = Field(ENGINE.device_share, gt=0, le=1, description="of the GPU's memory that may be used in all")
    weights: Literal["auto", "bf16", "fp32", "int4"] = Field("auto", description="weights on the CPU")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy = random weights of the folder's shape")
    context_tokens: int = Field(ENGINE.context_tokens, ge=0, description="context length, 0 = the model's")
    pool_tokens: int = Field(ENGINE.pool_tokens, ge=0, description="device pool in tokens of KV, 0 = choose")
    ram_bytes: Size = Field(ENGINE.ram_bytes, ge=-1, description="RAM tier, such as 2GiB; 0 = off, -1 = choose")
    store: str = Field(ENGINE.store_dir, description="folder of the disk tier; none = no disk tier")
    store_bytes: Size = Field(ENGINE.store_bytes, ge=0, description="most bytes in the store, 0 = choose")
    store_min_free_bytes: Size = Field(ENGINE.store_min_free_bytes, ge=0, description="bytes that stay free on that disk")
    store_optional: bool = Field(ENGINE.store_optional, description="serve without the store when it cannot be opened")
    store_bytes_per_day: Size = Field(ENGINE.store_bytes_per_day, ge=0, description="most bytes written in a day, 0 = any")
    checkpoint: Literal["off", "idle"] = Field("off", description="write sessions to the store: at eviction, or when idle")
    store_readers: int = Field(ENGINE.store_readers, ge=1, le=64, description="threads that read the store")
    store_writers: int = Field(ENGINE.store_writers, ge=1, le=64, description="threads that write the store")
    max_rows: int = Field(ENGINE.max_rows, ge=0, le=4096, description="sequences in one step, 0 = choose")
    step_tokens: int = Field(ENGINE.step_tokens, ge=0, description="tokens of a step in which somebody decodes, 0 = choose")
    idle_step_tokens: int = Field(ENGINE.idle_step_tokens, ge=0, description="tokens of a step of prompts only, 0 = choose")
    queue_limit: int = Field(ENGINE.queue_limit, ge=1, le=1_000_000, description="turns that may wait; more get 429")
    max_sessions: int = Field(ENGINE.max_sessions, ge=1, le=10_000_000, description="session names that are remembered")
    threads: int = Field(ENGINE.threads, ge=0, le=1024, description="threads of the arithmetic, 0 = choose")
    lag: int = Field(ENGINE.lag, ge=-1, le=1, description="steps planned ahead, -1 = the device's default")
    deterministic: bool = Field(ENGINE.deterministic, description="same bits whatever shares the batch; slower")
    decode_rows: int = Field(ENGINE.decode_rows, ge=1, le=4096, description="rows of a decode call under --deterministic")
    default_max_tokens: int = Field(
        ENGINE.default_max_tokens, ge=0, description="answer length where none is asked, 0 = context"
    )
    host: str = Field(SERVER.host, min_length=1, description="address to listen on")
    port: int = Field(SERVER.port, ge=0, le=65535, description="port to listen on, 0 = the system chooses")
    api_key: Names = Field([], description="KEY or NAME=KEY that clients must send; may be repeated")
    max_body_bytes: Size = Field(SERVER.max_body_bytes, ge=1024, le=1 << 30, description="largest request body")
    max_bodies_bytes: Size = Field(SERVER.max_bodies_bytes, ge=1024, description="request bodies in flight together")
    max_nesting: int = Field(SERVER.max_nesting, ge=8, le=200, description="deepest JSON")
    max_connections: int = Field(SERVER.max_connections, ge=1, le=65536, description="most connections at a time")
    body_timeout_seconds: Seconds = Field(SERVER.body_timeout_s, description="longest pause inside a request body")
    write_timeout_seconds: Seconds = Field(SERVER.write_timeout_s, description="longest time a client may take nothing")
    keep_alive_seconds: Seconds = Field(SERVER.keep_alive_s, description="how long an idle connection stays open")
    ping_seconds: float = Field(SERVER.ping_s, gt=0, le=15, description="longest silence on a stream")
    drain_seconds: float = Field(SERVER.drain_s, ge=0, le=3600, description="time for running turns and spills at the end")
    flush_seconds: float = Field(SERVER.flush_s, ge=0, le=3600, description="time to save RAM after the device is lost")
    ready_file: str = Field(SERVER.ready_file, description="file that holds the address while the server runs")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged to standard error")
    config: str = Field("", description=f"settings file; none = {DEFAULT_FILE} in this folder, if there is one")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources: tuple[PydanticBaseSettingsSource, ...] = (init_settings, env_settings)
        if settings_cls.model_config.get("toml_file"):
            sources += (TomlConfigSettingsSource(settings_cls),)
        return sources

    def engine_config(self) -> EngineConfig:
        same = {name: getattr(self, name) for name in EngineConfig.__slots__ if name in type(self).model_fields}
        return EngineConfig(
            **same, store_dir=self.store, write_timeout_s=self.write_timeout_seconds, drain_s=self.drain_seconds
        )

    def server_config(self) -> ServerConfig:
        same = {name: getattr(self, name) for name in ServerConfig.__slots__ if name in type(self).model_fields}
        return ServerConfig(
            **same,
            api_keys=tuple(named_key(key) for key in self.api_key),
            body_timeout_s=self.body_timeout_seconds,
            write_timeout_s=self.write_timeout_seconds,
            keep_alive_s=self.keep_alive_seconds,
            ping_s=self.ping_seconds,
            drain_s=self.drain_seconds,
            flush_s=self.flush_seconds,
        )


def named_key(text: str) -> tuple[str, str]:
    """NAME=KEY or KEY -> (tenant name, key)."""
    name, found, key = text.partition("=")
    return (name, key) if found and name and key else (key_name(text), text)


def load(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> ServeSettings:
    """All settings, checked. BadSettings says what is wrong; argparse ends the process itself for unknown flags (status 2).

    ``environment`` is only looked through for unknown names; values are read from the process's own by pydantic.
    """
    refuse_unknown_variables(environment)
    file = settings_file(arguments, environment, folder)

    class Loaded(ServeSettings):
        __doc__ = ServeSettings.__doc__
        model_config = SettingsConfigDict(toml_file=file)

    try:
        return CliApp.run(Loaded, cli_args=list(arguments))
    except ValidationError as error:
        raise BadSettings(explained(error, file)) from None
    except tomllib.TOMLDecodeError as error:
        raise BadSettings(f"{file} is no valid TOML: {error}") from None
    except SettingsError as error:
        raise BadSettings(str(error)) from None


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """A misspelt variable would be silently without effect."""
    known = {PREFIX + name.upper() for name in ServeSettings.model_fields} | OTHER_VARIABLES
    for name, value in environment.items():
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            raise BadSettings(f"the environment variable {name}={value!r} is no setting of kvalet")


def settings_file(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> Path | None:
    """The file named by --config or KVALET_CONFIG, which must exist, or kvalet.toml in ``folder`` if it is there."""
    named = environment.get("KVALET_CONFIG", "")
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            named = arguments[index + 1]
        elif argument.startswith("--config="):
            named = argument.partition("=")[2]
    if not named:
        default = folder / DEFAULT_FILE
        return default if default.is_file() else None
    path = folder / named
    if not path.is_file():
        raise BadSettings(f"the settings file {named!r} is not there")
    return path


def explained(error: ValidationError, file: Path | None) -> str:
    """The first complaint, with key, value and where the key can be set."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(step) for step in first["loc"]) or "settings"
    if first["type"] == "extra_forbidden":
        return f"{key} = {first['input']!r} in {file or 'the settings'} is no setting of kvalet"
    flag = "--" + key.split(".")[0].replace("_", "-")
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    return f"{key} = {first['input']!r}: {message} (flag {flag}, {PREFIX}{key.split('.')[0].upper()}, or {DEFAULT_FILE})"
