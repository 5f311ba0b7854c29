"""`kvalet serve` over an engine whose device can be made to fail: `python faulty_server.py POINT FILE [serve arguments ...]`.

From the moment FILE exists, the next use of the device at POINT ("launch", "finish", "copy out", "copy in") fails, and every
use after it, as a sticky error of a device does ("device": a kernel
of a CUDA device really fails). Steps take STEP_S at least, so that streams still run when FILE is made.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvalet.api.build import Parts, build
from kvalet.api.serve_command import configure_logging, leave, run
from kvalet.api.settings import load
from kvalet.runtime.errors import DeviceLostText
from kvalet.runtime.plan import StepPlan, StepResult
from kvalet.sched.ports import CopierPort, EnginePort

STEP_S = 0.005
WORDS = "the device fell off the bus"


class Fault:
    def __init__(self, point: str, file: Path) -> None:
        self.point, self.file, self.struck = point, file, False

    def hit(self, point: str) -> bool:
        self.struck = self.struck or (point == self.point and self.file.exists())
        return self.struck


def break_cuda() -> None:
    """A kernel reads far outside its tensor: a real error of a real device, which stays."""
    import torch

    row = torch.zeros(8, device="cuda")
    row.index_select(0, torch.full((1,), 1 << 40, device="cuda"))


class FaultyEngine:
    def __init__(self, engine: EnginePort, fault: Fault) -> None:
        self._engine, self._fault, self.synchronous = engine, fault, engine.synchronous
        self._pause = threading.Event()

    def launch(self, plan: StepPlan) -> Any:
        self._strike("launch")
        if self._fault.hit("device"):
            break_cuda()
        self._pause.wait(STEP_S)
        return self._engine.launch(plan)

    def finish(self, launched: Any) -> StepResult:
        self._strike("finish")
        return self._engine.finish(launched)

    def _strike(self, point: str) -> None:
        if self._fault.hit(point):
            raise RuntimeError(WORDS)


class FaultyCopier:
    def __init__(self, copier: CopierPort, fault: Fault) -> None:
        self._copier, self._fault, self.close = copier, fault, copier.close

    def copy_out(
        self, pages: Any, slot: Any, first_page: int, done: Callable[[str | None, float], None], n_tokens: int = 0
    ) -> None:
        if self._fault.hit("copy out"):
            done(DeviceLostText(WORDS), 0.0)
        else:
            self._copier.copy_out(pages, slot, first_page, done, n_tokens)

    def copy_in(self, slot: Any, slot_pages: Any, pages: Any, done: Callable[[str | None, float], None]) -> None:
        if self._fault.hit("copy in"):
            done(DeviceLostText(WORDS), 0.0)
        else:
            self._copier.copy_in(slot, slot_pages, pages, done)


def main(point: str, file: str, arguments: Sequence[str]) -> int:
    settings = load(arguments, os.environ, Path.cwd())
    configure_logging("info")
    fault = Fault(point, Path(file))

    def faulty(config: Any, progress: Any) -> Parts:
        parts = build(config, progress)
        return replace(parts, step_engine=FaultyEngine(parts.step_engine, fault), copier=FaultyCopier(parts.copier, fault))

    return leave(run(settings.engine_config(), settings.server_config(), faulty))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
