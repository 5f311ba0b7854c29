"""Says what installing torch would download, and refuses gigabytes of CUDA that nobody asked for.

    torch_plan.py [-c CONSTRAINTS] REQUIREMENT

Run by .ci/setup before the installation, with the new environment's interpreter; standard library only. pip itself makes the
plan (``--dry-run --report``), so that index settings, wheels on disk and a torch that is already there all count.
Exit 0: go on. Exit 1: refused, or pip found no way; the reason was printed.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INSTALL_PAGE = "https://pytorch.org/get-started/locally/"
CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")
HEAD_TIMEOUT_S = 10


def plan(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """What pip would install: its report's entries; empty when all is there. Raises SystemExit if pip fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", str(report), *arguments]
        if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
            raise SystemExit(f"kvalet set-up: pip finds no way to install {arguments[-1]}: its message is above")
        entries: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return entries


def size_bytes(url: str) -> int:
    """Size of the file at ``url`` (file: or http:), 0 when it cannot be learned."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path)).stat().st_size
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=HEAD_TIMEOUT_S, context=context) as reply:
            return int(reply.headers.get("content-length") or 0)
    except (OSError, ValueError):  # no answer, no TLS, no number: the size is only a courtesy
        return 0


def name_of(entry: Mapping[str, Any]) -> str:
    return str(entry["metadata"]["name"]).lower()


def is_large(entry: Mapping[str, Any]) -> bool:
    return name_of(entry) == "torch" or name_of(entry).startswith(CUDA_PREFIXES)


def wants_cuda(entries: Sequence[Mapping[str, Any]]) -> bool:
    """A CUDA build of torch brings packages of NVIDIA's with it; the CPU build brings none."""
    return any(name_of(entry).startswith(CUDA_PREFIXES) for entry in entries)


def describe(entries: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: which torch, how much. Sizes are those of torch and what comes with CUDA; the rest is small."""
    torch = next(entry for entry in entries if name_of(entry) == "torch")
    sizes = [size_bytes(str(entry["download_info"]["url"])) for entry in entries if is_large(entry)]
    build = "CUDA build" if wants_cuda(entries) else "CPU build"
    amount = f"{sum(sizes) / 1e6:,.0f} MB" if all(sizes) else ("some 3,000 MB" if wants_cuda(entries) else "some 200 MB")
    return f"torch {torch['metadata']['version']} ({build}): {amount} to download"


def cuda_is_wanted(environment: Mapping[str, str], device: Path = Path("/dev/nvidiactl")) -> bool:
    """The person asked for it (ALLOW_CUDA=1 or a TORCH of their own), or the machine has an NVIDIA device."""
    return environment.get("ALLOW_CUDA") == "1" or bool(environment.get("TORCH")) or device.exists()


def main(arguments: Sequence[str]) -> int:
    entries = plan(arguments)
    if not any(name_of(entry) == "torch" for entry in entries):
        print("torch is already there", flush=True)
        return 0
    print(describe(entries), flush=True)
    if not wants_cuda(entries) or cuda_is_wanted(os.environ):
        return 0
    print(
        "\nStopped before the download: this machine shows no NVIDIA device, and pip would fetch the CUDA build of torch.\n"
        f"For the small CPU build, take the index named at {INSTALL_PAGE} (Linux, Pip, CPU) and run\n"
        "    PIP_EXTRA_INDEX_URL=<that index> make ...\n"
        "or use a torch that the system has:  make TORCH=system ...\n"
        "or take the CUDA build all the same: make ALLOW_CUDA=1 ...",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
