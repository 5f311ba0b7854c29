"""What is computed before the engine thread runs leaves no workers behind: they would slow every step down."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from kvalet.runtime.threads import on_ending_thread

PROGRAM = """
import os, sys, threading, time
import torch
from kvalet.runtime.threads import on_ending_thread

def work():
    torch.set_num_threads(2)
    x = torch.ones(1 << 20)
    return float((x + x).exp().sum())

def tasks():
    return len(os.listdir("/proc/self/task"))

before = tasks()
(on_ending_thread if sys.argv[1] == "ending" else lambda f: f())(work)
deadline = time.monotonic() + 1
while tasks() > before and time.monotonic() < deadline and sys.argv[1] == "ending":
    os.sched_yield()
print(tasks() - before)
"""


def test_an_ending_thread_takes_its_workers_along() -> None:
    """Computed on the thread that stays, one worker (of two threads) stays with it; whatever else torch starts, both start."""
    if not sys.platform.startswith("linux"):
        pytest.skip("counts threads in /proc")

    def left(where: str) -> int:
        command = [sys.executable, "-c", PROGRAM, where]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)

    assert left("ending") == left("here") - 1


def test_results_and_errors_come_through() -> None:
    assert on_ending_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        on_ending_thread(lambda: 1 // 0)
