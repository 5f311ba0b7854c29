"""What this machine can give: memory (as far as the control group allows) and free disk. Reads /proc and /sys only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 60
"""Control groups without a limit show "max" (v2) or a number of this size (v1)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``available_bytes``: what can still be allocated without swapping. ``limited_by``: "machine", or the control group's
    path where that is less."""

    available_bytes: int
    limited_by: str = "machine"


def available_memory(root: Path = Path("/")) -> Memory:
    """The smaller of the machine's available memory and what each control group above this process has left (file cache
    that can be dropped counts as left). Unknown files mean no limit; without /proc/meminfo, half of the physical memory."""
    best = Memory(_machine_available(root))
    for group in _control_groups(root):
        left = _left_in(group)
        if left is not None and left < best.available_bytes:
            best = Memory(max(0, left), "/" + str(group.relative_to(root)))
    return best


def _machine_available(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _control_groups(root: Path) -> list[Path]:
    """The process's own group and all above it, v2 and v1 (memory controller)."""
    groups: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, name = line.split(":", 2)
        if number == "0":
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        steps = [step for step in name.strip().split("/") if step and step != ".."]
        groups.extend(base.joinpath(*steps[:depth]) for depth in range(len(steps), -1, -1))
    return groups


def _left_in(group: Path) -> int | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None and limit < NO_LIMIT:
            return limit - used + _stat(group / "memory.stat", cache_name)
    return None


def _stat(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def free_disk_bytes(directory: str) -> int:
    """Bytes that an ordinary user may still write on the file system of ``directory`` (or of its nearest existing parent)."""
    path = Path(directory).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def folder_bytes(directory: str) -> int:
    """Bytes of the files in a folder and below, as far as they can be read; 0 where there is no folder."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue  # gone since it was listed
    return total
