"""``kvalet doctor``: what was found on this machine, and what is wrong with it for serving.

Every check looks for itself and never raises: what cannot be found out is told as such. The exit status is 1 if something is
wrong, 0 if all is well or could only be better.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import mmap
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import orjson
from kvalet.api.device_choice import cuda_fault, describe_cards
from kvalet.api.fetch_model import DEFAULT_MODEL, file_sha256, model_path
from kvalet.api.machine import available_memory
from kvalet.api.model_place import NoModel, find_model, folder_report

GIB = 1 << 30
MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = GIB
MIN_DISK_BYTES = 2 * GIB
MIN_DESCRIPTORS = 1024
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
PACKAGES = ("torch", "tokenizers", "llguidance", "hypercorn", "starlette", "uvloop", "pydantic")
DIRECT_BYTES = 4096


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, but slower or with less than could be."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """``advice``: what to do, "" where nothing is to be done."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at: the model's file and the store's folder ("" = none)."""

    model: Path
    is_default_model: bool
    store: str
    proc: Path = Path("/proc")


def check_python(subject: Subject) -> Finding:
    verdict = Verdict.OK if sys.version_info >= (3, 11) else Verdict.WRONG
    return Finding(
        "python", verdict, f"{platform.python_version()} at {sys.executable}", "" if verdict else "use 3.11 or newer"
    )


def check_packages(subject: Subject) -> Finding:
    """Imported, not only listed: a broken install shows here."""
    versions: list[str] = []
    missing: list[str] = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except (ImportError, OSError) as error:
            missing.append(f"{name}: {error}")
    if missing:
        return Finding("packages", Verdict.WRONG, "; ".join(missing), "install kvalet again, for example with `make install`")
    return Finding("packages", Verdict.OK, ", ".join(versions))


def check_device(subject: Subject) -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("device", Verdict.WRONG, f"torch cannot be imported: {error}")
    return device_finding(describe_cards() if torch.cuda.is_available() else "", cuda_fault())


def device_finding(cards: str, fault: str) -> Finding:
    """``cards``: those that torch sees, "" = none; ``fault``: why `--device cuda` would not start, "" = it would."""
    if not fault:
        return Finding("device", Verdict.OK, f"cuda: {cards} (serve with --device cuda)")
    if cards:
        return Finding("device", Verdict.NOTE, f"cuda: {cards}, but not usable", fault)
    return Finding("device", Verdict.OK, f"cpu only: {fault}")


def check_cpu(subject: Subject) -> Finding:
    cores = len(os.sched_getaffinity(0))
    flags = cpu_flags(subject.proc / "cpuinfo")
    present = [flag for flag in CPU_FLAGS if flag in flags]
    found = f"{cores} of {os.cpu_count()} cores, {', '.join(present) or 'no vector units known here'}"
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        return Finding("cpu", Verdict.OK, found)
    return Finding("cpu", Verdict.NOTE, found, "no bfloat16 arithmetic in this CPU: --weights fp32 may be faster")


def cpu_flags(path: Path) -> frozenset[str]:
    """Flags of the first core; empty where they cannot be read."""
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def check_model(subject: Subject) -> Finding:
    path = subject.model
    if path.is_dir():
        wrong, found = folder_report(path)
        advice = "give a folder with config.json and safetensors files" if wrong else ""
        return Finding("model", Verdict.WRONG if wrong else Verdict.OK, found, advice)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        size = path.stat().st_size
        digest = file_sha256(path)
    except OSError as error:
        advice = (
            "run `python -m kvalet.api.fetch_model`"
            if subject.is_default_model
            else "give the path of a GGUF file or a model folder"
        )
        return Finding("model", Verdict.WRONG, f"{path}: {error.strerror}", advice)
    found = f"{path}, {size / 1e6:.1f} MB, sha256 {digest}"
    if magic != b"GGUF":
        return Finding("model", Verdict.WRONG, found, "this is no GGUF file")
    if subject.is_default_model and digest != DEFAULT_MODEL.sha256:
        return Finding("model", Verdict.WRONG, found, "damaged: run `python -m kvalet.api.fetch_model`")
    return Finding("model", Verdict.OK, found)


def check_memory(subject: Subject) -> Finding:
    memory = available_memory()
    found = f"{memory.available_bytes / GIB:.1f} GiB available (limited by {memory.limited_by})"
    if memory.available_bytes < MIN_MEMORY_BYTES:
        return Finding("memory", Verdict.WRONG, found, "at least 1 GiB is needed for the default model")
    return Finding("memory", Verdict.OK, found)


def check_locked_memory(subject: Subject) -> Finding:
    """The RAM tier is registered with a GPU; most drivers do not look at this limit, some do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", Verdict.OK, "no limit")
    return Finding("locked memory", Verdict.OK, f"{soft // (1 << 20):,} MiB (raise `ulimit -l` if registering a slab fails)")


def check_descriptors(subject: Subject) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files, can be raised to {'any number' if hard == resource.RLIM_INFINITY else hard}"
    enough = hard == resource.RLIM_INFINITY or hard >= MIN_DESCRIPTORS
    return Finding("descriptors", Verdict.OK if enough else Verdict.NOTE, found, "" if enough else "raise `ulimit -n`")


def check_store_space(subject: Subject) -> Finding:
    folder = existing_parent(Path(subject.store or "."))
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB at {folder}"
    if usage.free < MIN_DISK_BYTES:
        return Finding(
            "disk space", Verdict.WRONG if subject.store else Verdict.NOTE, found, "free some space or use another disk"
        )
    return Finding("disk space", Verdict.OK, found)


def check_direct_io(subject: Subject) -> Finding:
    """Writes and reads one aligned block past the page cache, where the store would be."""
    folder = existing_parent(Path(subject.store or "."))
    try:
        direct_round_trip(folder)
    except OSError as error:
        found = f"not possible at {folder}: {error.strerror}"
        if not os.access(folder, os.W_OK):
            return Finding(
                "direct i/o", Verdict.WRONG if subject.store else Verdict.NOTE, found, "choose a folder you may write"
            )
        return Finding("direct i/o", Verdict.NOTE, found, "the store works through the page cache here; it costs memory")
    return Finding("direct i/o", Verdict.OK, f"works at {folder}")


def direct_round_trip(folder: Path) -> None:
    """OSError where O_DIRECT, the write or the read fails, or other bytes come back. Nothing is left behind."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvalet-doctor-") as probe, mmap.mmap(-1, DIRECT_BYTES) as block:
        file = os.open(probe.name, os.O_RDWR | os.O_DIRECT)
        try:
            block[:] = os.urandom(DIRECT_BYTES)
            written = bytes(block)
            os.pwritev(file, [block], 0)
            block[:] = bytes(DIRECT_BYTES)
            os.preadv(file, [block], 0)
            if bytes(block) != written:
                raise OSError(5, "other bytes came back than were written")
        finally:
            os.close(file)


def existing_parent(path: Path) -> Path:
    """``path``, or the first folder above it that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    check_python,
    check_packages,
    check_device,
    check_cpu,
    check_memory,
    check_locked_memory,
    check_model,
    check_store_space,
    check_direct_io,
    check_descriptors,
)


def place_of(model: str, environment: Mapping[str, str]) -> Path:
    """Where the model is; the text as a path where it is nowhere, so that the check says so."""
    try:
        return find_model(model, environment).path
    except NoModel:
        return Path(model)


def examine(subject: Subject) -> list[Finding]:
    return [check(subject) for check in CHECKS]


def report(findings: Iterable[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict.upper():5}  {finding.name}: {finding.found}")
        if finding.advice:
            lines.append(f"       -> {finding.advice}")
    return "\n".join(lines)


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser("kvalet doctor", description="What was found on this machine, and what is wrong.")
    parser.add_argument(
        "model",
        nargs="?",
        default=environment.get("KVALET_MODEL", ""),
        help="a GGUF file, a model folder, or OWNER/NAME that was pulled",
    )
    parser.add_argument("--store", default=environment.get("KVALET_STORE", ""), help="folder that the disk tier would use")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    asked = parser.parse_args(list(arguments))
    default = model_path(environment=environment)
    model = place_of(asked.model, environment) if asked.model else default
    findings = examine(Subject(model, model.absolute() == default.absolute(), asked.store))
    wrong = any(finding.verdict is Verdict.WRONG for finding in findings)
    if asked.json:
        print(orjson.dumps({"ok": not wrong, "findings": [asdict(finding) for finding in findings]}).decode())
    else:
        print(report(findings))
    return int(wrong)
