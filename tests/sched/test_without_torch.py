"""The scheduler's core, its simulation and the fakes need no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
for name in ("torch", "numpy", "asyncio"):
    sys.modules[name] = None
import schedsim
world = schedsim.walk(11, 300)
assert world.n_events >= 300
print("walked", world.n_events)
"""


def test_a_walk_where_torch_numpy_and_asyncio_cannot_be_imported() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM, str(SUPPORT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "walked" in done.stdout


def test_a_walk_is_replayed_from_the_command_line() -> None:
    command = [sys.executable, "-P", str(SUPPORT / "schedsim.py"), "5", "200"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(SUPPORT)})
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(SUPPORT)})
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
