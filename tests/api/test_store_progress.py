"""Progress bars of `kvalet store`: on standard error, only where that is a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from storekit import Rig
from storetool import tool


def test_a_bar_on_a_terminal_and_only_there(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.write(rig.chain(3))
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvalet", "store", "check", "--read-data", "--json", "--store", str(tmp_path / "s")],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(terminal)
    drawn = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # how Linux tells that the other end of a terminal is closed
            break
        if not piece:
            break
        drawn += piece
    os.close(master)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith(b'{"behind_bad": 0')
    assert b"checking" in drawn
    assert b"3/3" in drawn
    assert tool("check", tmp_path / "s", "--read-data").err == ""
