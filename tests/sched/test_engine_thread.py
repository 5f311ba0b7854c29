"""The engine thread: order of launch and finish, failure, stopping. A scripted engine says what it was asked, in order."""

from __future__ import annotations

import queue
import threading

import pytest
from kvalet.runtime.plan import StepPlan, StepResult
from kvalet.sched.engine_thread import EngineThread

WAIT_S = 5.0


class ScriptedEngine:
    """Notes every call. ``gates``: launches or finishes (by name) that wait until they are let go."""

    def __init__(self, synchronous: bool) -> None:
        self.synchronous = synchronous
        self.calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.gates: dict[str, threading.Event] = {}
        self.raise_at = ""

    def launch(self, plan: StepPlan) -> int:
        self._call(f"launch {plan.step}")
        return plan.step

    def finish(self, launched: int) -> StepResult:
        self._call(f"finish {launched}")
        return StepResult(launched, ())

    def _call(self, name: str) -> None:
        self.calls.put(name)
        if name == self.raise_at:
            raise RuntimeError("device fell off the bus")
        if name in self.gates:
            assert self.gates[name].wait(WAIT_S)


class Rig:
    def __init__(self, synchronous: bool, lag: int) -> None:
        self.engine = ScriptedEngine(synchronous)
        self.said: queue.SimpleQueue[int | str] = queue.SimpleQueue()
        self.thread = EngineThread(
            self.engine,
            lag,
            lambda result: self.said.put(result.step),
            lambda message: self.said.put(message),
            lambda: self.said.put("exit"),
        )
        self.thread.start()

    def submit(self, step: int) -> None:
        self.thread.submit(StepPlan(step, ()))

    def next_call(self) -> str:
        return self.engine.calls.get(timeout=WAIT_S)

    def hear(self) -> int | str:
        said = self.said.get(timeout=WAIT_S)
        if isinstance(said, int):
            self.thread.settle()
        return said

    def end(self) -> list[int | str]:
        self.thread.stop()
        said: list[int | str] = []
        while not said or said[-1] != "exit":
            said.append(self.hear())
        assert self.thread.join(WAIT_S)
        return said


def test_synchronous_lag_0_launches_and_finishes_each_step() -> None:
    rig = Rig(synchronous=True, lag=0)
    for step in (1, 2, 3):
        rig.submit(step)
        assert not rig.thread.has_room
        assert (rig.next_call(), rig.next_call(), rig.hear()) == (f"launch {step}", f"finish {step}", step)
        assert rig.thread.has_room
    assert rig.end() == ["exit"]


def test_synchronous_lag_1_finishes_right_after_the_launch_though_another_plan_waits() -> None:
    rig = Rig(synchronous=True, lag=1)
    rig.submit(1)
    rig.submit(2)
    assert [rig.next_call() for _ in range(4)] == ["launch 1", "finish 1", "launch 2", "finish 2"]
    assert [rig.hear(), rig.hear()] == [1, 2]
    assert rig.end() == ["exit"]


def test_overlapped_lag_1_launches_the_next_before_finishing_and_waits_for_the_word() -> None:
    rig = Rig(synchronous=False, lag=1)
    rig.submit(1)
    assert rig.next_call() == "launch 1"
    rig.submit(2)  # however late it comes, it is launched before step 1 is waited for
    assert [rig.next_call(), rig.next_call(), rig.hear()] == ["launch 2", "finish 1", 1]
    rig.submit(3)
    assert [rig.next_call(), rig.next_call(), rig.hear()] == ["launch 3", "finish 2", 2]
    rig.thread.nothing_after()
    assert [rig.next_call(), rig.hear()] == ["finish 3", 3]
    assert rig.end() == ["exit"]


def test_nothing_after_an_older_step_is_ignored() -> None:
    rig = Rig(synchronous=False, lag=1)
    rig.engine.gates["finish 1"] = threading.Event()
    rig.submit(1)
    rig.thread.nothing_after()
    assert [rig.next_call(), rig.next_call()] == ["launch 1", "finish 1"]
    rig.thread.nothing_after()  # said again of the same step: not even sent
    rig.submit(2)
    rig.engine.gates["finish 1"].set()
    assert [rig.hear(), rig.next_call()] == [1, "launch 2"]
    rig.submit(3)  # step 2 was not finished early
    assert [rig.next_call(), rig.next_call(), rig.hear()] == ["launch 3", "finish 2", 2]
    assert rig.end() == [3, "exit"]


def test_overlapped_lag_0_finishes_at_once() -> None:
    rig = Rig(synchronous=False, lag=0)
    rig.submit(1)
    assert [rig.next_call(), rig.next_call(), rig.hear()] == ["launch 1", "finish 1", 1]
    assert rig.end() == ["exit"]


@pytest.mark.parametrize("lag", [0, 1])
def test_one_plan_too_many_is_a_defect(lag: int) -> None:
    rig = Rig(synchronous=True, lag=lag)
    rig.engine.gates["launch 0"] = threading.Event()
    for step in range(lag + 1):
        rig.submit(step)
    with pytest.raises(RuntimeError, match="lag allows"):
        rig.submit(lag + 1)
    rig.engine.gates["launch 0"].set()
    assert rig.end()[-1] == "exit"


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("where", ["launch 2", "finish 1"])
def test_an_exception_is_told_once_and_later_plans_are_dropped(synchronous: bool, where: str) -> None:
    rig = Rig(synchronous, lag=1)
    rig.engine.raise_at = where
    rig.submit(1)
    rig.submit(2)
    heard = [rig.hear()]
    while heard[-1] != "exit":
        heard.append(rig.hear())
    messages = [said for said in heard if isinstance(said, str)]
    assert messages == ["RuntimeError: device fell off the bus", "exit"]
    rig.thread.abandon()
    assert rig.thread.in_flight == 0
    rig.submit(3)
    rig.thread.stop()
    assert rig.thread.join(WAIT_S)
    assert "launch 3" not in [rig.engine.calls.get_nowait() for _ in range(rig.engine.calls.qsize())]


def test_even_a_base_exception_is_told() -> None:
    rig = Rig(synchronous=True, lag=0)

    def leave(_plan: StepPlan) -> int:
        raise SystemExit(3)

    rig.engine.launch = leave  # type: ignore[method-assign]
    rig.submit(1)
    assert [rig.hear(), rig.hear()] == ["SystemExit: 3", "exit"]


def test_stop_finishes_what_was_launched_and_drops_the_rest() -> None:
    rig = Rig(synchronous=False, lag=1)
    rig.engine.gates["launch 1"] = threading.Event()
    rig.submit(1)
    assert rig.next_call() == "launch 1"
    rig.submit(2)
    rig.thread.stop()
    rig.engine.gates["launch 1"].set()
    assert [rig.hear(), rig.hear()] == [1, "exit"]
    assert rig.next_call() == "finish 1"
    assert rig.engine.calls.empty()


def test_join_is_bounded_when_the_device_hangs() -> None:
    rig = Rig(synchronous=True, lag=0)
    gate = rig.engine.gates["launch 1"] = threading.Event()
    rig.submit(1)
    assert rig.next_call() == "launch 1"
    rig.thread.stop()
    assert not rig.thread.join(0.01)
    gate.set()
    assert rig.thread.join(WAIT_S)
