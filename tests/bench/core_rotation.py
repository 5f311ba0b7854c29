"""What the scheduler's decisions cost: the agent rotation's core alone, with an engine and copies that take no time.

No device, no loop, no bytes: `Core` is handed events and its commands are answered at once. Prints core milliseconds per event
kind, per step and the longest single call, which is a stall of the event loop on a real machine.
Run: python tests/bench/core_rotation.py [--sessions 32] [--profile].
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections import defaultdict, deque
from typing import Any

from kvalet.runtime.plan import EndedBy, RowResult, SamplingParams, StepPlan, StepResult
from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.turns import TurnId, TurnSpec

CONTEXT, NEW_PROMPT, NEW, AT_A_TIME, ROUNDS = 16_384, 256, 128, 8, 2
PAGE, CHUNK = 16, 128


class NoDisk:
    def has(self, key: bytes) -> bool:
        return False

    def tails(self, parent: bytes) -> tuple[()]:
        return ()

    def accepts_writes(self) -> bool:
        return False


class Driver:
    """Carries out the core's commands at once; counts the core's own time."""

    def __init__(self, config: SchedConfig) -> None:
        disk: Any = NoDisk()
        self.core = Core(config, disk)
        self.inbox: deque[ev.Event] = deque()
        self.rows: dict[int, dict[str, Any]] = {}
        self.finished: deque[TurnId] = deque()
        self.pieces: dict[TurnId, list[int]] = defaultdict(list)
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.now = 0.0

    def timed(self, name: str, call: Any) -> Any:
        began = time.perf_counter()
        result = call()
        self.spent[name].append(time.perf_counter() - began)
        return result

    def run(self) -> None:
        """Until nothing is left to do."""
        while True:
            while self.inbox:
                event = self.inbox.popleft()
                for command in self.timed(type(event).__name__, lambda event=event: self.core.handle(event)):
                    self.carry_out(command)
            plan = self.timed("plan", self.core.plan)
            if plan is None:
                if not self.inbox:
                    return
                continue
            self.now += 0.01
            self.inbox.append(ev.StepDone(self.now, self.step(plan)))

    def carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.CopyOut() | cmd.CopyIn():
                self.inbox.append(ev.CopyDone(self.now, command.transfer, 0.0))
            case cmd.Emit():
                self.pieces[command.turn].extend(command.piece.ids)
            case cmd.End():
                self.finished.append(command.turn)
            case cmd.WakeAt():
                self.now = max(self.now, command.at)
                self.inbox.append(ev.Tick(self.now))

    def step(self, plan: StepPlan) -> StepResult:
        for row_id in plan.closes:
            self.rows.pop(row_id, None)
        for opened in plan.opens:
            self.rows[opened.row] = {"made": len(opened.ids) - opened.n_prompt, "max": opened.params.max_tokens}
        results = []
        for row in plan.rows:
            state = self.rows[row.row]
            ids: tuple[int, ...] = ()
            ended = None
            if state["made"] >= state["max"]:
                continue
            if row.sample:
                state["made"] += 1
                ids = (7,)
                ended = EndedBy.LENGTH if state["made"] >= state["max"] else None
            results.append(RowResult(row.row, row.start + row.n, ids, "", ended, state["made"] if ended else -1))
        return StepResult(plan.step, tuple(results))


def rotate(driver: Driver, sessions: int) -> None:
    histories = [random.Random(1_000_000 + i).choices(range(1000, 150_000), k=CONTEXT) for i in range(sessions)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    turn = 0
    for number in range(ROUNDS + 1):
        waiting = deque(range(sessions))
        running: dict[TurnId, int] = {}
        began = {name: sum(times) for name, times in driver.spent.items()}
        while waiting or running:
            while waiting and len(running) < AT_A_TIME:
                i = waiting.popleft()
                if number:
                    histories[i].extend(
                        random.Random(2_000_000 + 10_000 * (number - 1) + i).choices(range(1000, 150_000), k=NEW_PROMPT)
                    )
                turn += 1
                running[TurnId(turn)] = i
                spec = TurnSpec(TurnId(turn), tuple(histories[i]), params, bytes(32), session=f"s{i}", received_at=driver.now)
                driver.inbox.append(ev.Submit(driver.now, spec))
            driver.run()
            assert driver.finished, "the core has nothing to do and turns are open"
            while driver.finished:
                ended = driver.finished.popleft()
                histories[running.pop(ended)].extend(driver.pieces.pop(ended))
        print(f"round {number}:")
        for name, times in sorted(driver.spent.items()):
            print(
                f"  {name:10s} {len(times):6d} calls so far, {(sum(times) - began.get(name, 0)) * 1e3:9.1f} ms this round,"
                f" longest {max(times) * 1e3:8.2f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    per_session = -(-(CONTEXT + NEW + ROUNDS * (NEW_PROMPT + NEW)) // PAGE) + 2
    config = SchedConfig(
        page_tokens=PAGE, chunk_tokens=CHUNK, n_pages=1 + 9 * per_session, context_tokens=40_000, identity=bytes(32),
        ram_slots=4436 * options.sessions // 32, staging_slots=7, step_tokens=8208, idle_step_tokens=8192, lag=1,
    )  # fmt: skip
    driver = Driver(config)
    if options.profile:
        with cProfile.Profile() as profile:
            rotate(driver, options.sessions)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
    else:
        rotate(driver, options.sessions)


if __name__ == "__main__":
    main()
