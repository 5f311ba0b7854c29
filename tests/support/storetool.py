"""`kvalet store` as a person runs it, in this process (fast) or in a child, and pictures of a directory to compare."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalet.api import store_command

Picture = dict[str, tuple[int, int, int, int, bytes]]


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.out)
        return loaded

    def reasons(self) -> dict[str, tuple[str, str]]:
        """Of `check --json`: path -> (reason, field)."""
        return {finding["path"]: (finding["reason"], finding["field"]) for finding in self.data["findings"]}


def tool(command: str, directory: Path | str, *arguments: str) -> Ran:
    """In this process; argparse's way out counts as an exit."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = store_command.main([command, "--store", str(directory), *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    return Ran(status, out.getvalue(), err.getvalue())


def child(*arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    """The same in a process of its own, with pipes."""
    for name in ("stdin", "stdout", "stderr"):
        how.setdefault(name, subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-P", "-m", "kvalet", "store", *arguments], **how)


def picture(root: Path) -> Picture:
    """Every path below ``root``: mode, owner, links, mtime and contents. No link is followed, no pipe opened."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        st = path.lstat()
        if stat.S_ISREG(st.st_mode) and st.st_size < 1 << 24:
            data = path.read_bytes()
        else:
            data = os.readlink(path).encode() if path.is_symlink() else b""
        found[os.fspath(path.relative_to(root))] = (st.st_mode, st.st_uid, st.st_nlink, st.st_mtime_ns, data)
    return found
