"""Which device serves: what was asked for, or for "auto" the GPU where everything that it needs is there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

PIP_LINE = "pip install 'kvalet[cuda]'"
PACKAGES = ("flashinfer", "triton")


def cuda_fault() -> str:
    """Why the GPU cannot be served from; "" if it can. Imports torch, and nothing else."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, then {PIP_LINE}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device: is the driver loaded, and the device visible here (CUDA_VISIBLE_DEVICES, container)?"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; at least 8.0 is needed for bf16"
    return missing_packages()


def describe_cards() -> str:
    """The cards that torch sees, with their memory; it must see some."""
    import torch

    cards = []
    for index in range(torch.cuda.device_count()):
        free, total = (n_bytes / (1 << 30) for n_bytes in torch.cuda.mem_get_info(index))
        cards.append(f"{torch.cuda.get_device_name(index)}, {free:.1f} of {total:.1f} GiB free")
    return "; ".join(cards)


def missing_packages(present: Callable[[str], bool] | None = None) -> str:
    """Which package is not there, with the line that installs it; "" if all are."""
    found = present if present is not None else _installed
    missing = [name for name in PACKAGES if not found(name)]
    return f"{' and '.join(missing)} not installed: {PIP_LINE}" if missing else ""


def choose_device(asked: str, fault: Callable[[], str] = cuda_fault) -> tuple[str, str]:
    """(device, a note for the start). ValueError, one sentence, for a device that is not there or not known."""
    if asked == "cpu":
        return asked, ""
    if asked not in ("auto", "cuda"):
        raise ValueError(f"device {asked!r} is not supported; use auto, cpu or cuda")
    why = fault()
    if not why:
        return "cuda", ""
    if asked == "cuda":
        raise ValueError(f"device cuda cannot be used: {why}")
    return "cpu", f"device: cpu, because {why}"


def _installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None
