"""The one thread that drives the engine: plans in, results out, in order; the loop never waits for the device.

A synchronous engine (CPU) computes inside ``launch``, so each step is finished right after its launch. An engine that
only queues work gets launch(n + 1) before finish(n), as far as the core plans ahead (``lag``): after launching n the
thread waits until it hears of either the next plan or that nothing follows for now. It cannot just look whether a plan
is there: the loop answers result n - 1 a moment later, and a finish(n) begun too early blocks for a whole step.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvalet.runtime.plan import StepPlan, StepResult
from kvalet.sched.ports import EnginePort

THREAD_NAME = "kvalet-engine"


@dataclass(frozen=True, slots=True)
class _NothingAfter:
    step: int


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineThread:
    """``submit``, ``nothing_after``, ``settle`` and ``stop`` on the loop's thread; the callbacks run on the engine thread.

    At most lag + 1 plans are in flight; one more is a defect of the caller and raises RuntimeError. When the engine
    raises, ``on_failed(message)`` is called once, every plan in flight or submitted later is dropped (no result comes for
    it) and the thread ends. ``on_exit`` is called when the thread is about to end, for whatever reason.
    """

    def __init__(
        self,
        engine: EnginePort,
        lag: int,
        on_result: Callable[[StepResult], None],
        on_failed: Callable[[str], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._depth = lag + 1
        self._on_result = on_result
        self._on_failed = on_failed
        self._on_exit = on_exit
        self._mail: queue.SimpleQueue[StepPlan | _NothingAfter | _Stop] = queue.SimpleQueue()
        self._launched: deque[tuple[int, Any]] = deque()
        self._in_flight = 0
        self._newest = -1
        self._told_nothing_after = -1
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    @property
    def in_flight(self) -> int:
        """Plans submitted whose results were not settled yet."""
        return self._in_flight

    @property
    def has_room(self) -> bool:
        return self._in_flight < self._depth

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        if not self.has_room:
            raise RuntimeError(f"step {plan.step} planned while {self._in_flight} are in flight; lag allows {self._depth}")
        self._in_flight += 1
        self._newest = plan.step
        self._mail.put(plan)

    def nothing_after(self) -> None:
        """The core has no plan to follow the newest submitted one now: the engine may be waited for. Repeating it changes
        nothing, nor does it while no further plan would be taken."""
        if self._engine.synchronous or self._told_nothing_after == self._newest or not self.has_room:
            return
        self._told_nothing_after = self._newest
        self._mail.put(_NothingAfter(self._newest))

    def settle(self) -> None:
        """A result was handled: one plan fewer in flight."""
        self._in_flight -= 1

    def abandon(self) -> None:
        """The thread has said that it failed: no result comes any more."""
        self._in_flight = 0

    def stop(self) -> None:
        """Plans not launched yet are dropped, launched ones are finished, then the thread ends. Never waits."""
        self._stopping = True
        self._mail.put(_Stop())

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended. Blocks for at most ``timeout_s``: call it off the loop, or after ``on_exit``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._advance():
                pass
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: whatever it was, the turns must end
            self._on_failed(f"{type(error).__name__}: {error}")
        finally:
            self._launched.clear()
            self._on_exit()

    def _advance(self) -> bool:
        """Take one message, or finish a step that nothing needs to be launched before. False: the thread is to end."""
        if len(self._launched) >= (1 if self._engine.synchronous else self._depth):
            self._finish_oldest()
            return True
        message = self._mail.get()
        if isinstance(message, StepPlan):
            if not self._stopping:
                self._launched.append((message.step, self._engine.launch(message)))
        elif isinstance(message, _NothingAfter):
            if self._launched and self._launched[-1][0] == message.step:
                self._finish_oldest()
        else:
            while self._launched:
                self._finish_oldest()
            return False
        return True

    def _finish_oldest(self) -> None:
        _, launched = self._launched.popleft()
        self._on_result(self._engine.finish(launched))

    def __repr__(self) -> str:
        return f"<EngineThread in_flight={self._in_flight}/{self._depth} alive={self._thread.is_alive()}>"
