"""A model of the machine under the scheduler, in virtual time: device steps, a link, and the interpreter lock.

The loop, ``Scheduler``, ``Core`` and the token streams are the real ones: the CPU time that their thread spends is what moves
the virtual clock, and waiting moves it to the next thing that happens. Modelled are the steps, the copies (a link each way,
first in first out, bounded bytes in flight) and the interpreter lock: the engine's and the copiers' threads need it, get it
when the loop asks for events, and after ``switch_s`` when it does not (CPython's switch interval), and the loop waits for it
in turn. Everything else that a real machine does is left out: a figure of the model is worth a comparison, not more.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.runtime.plan import EndedBy, RowResult, StepPlan, StepResult

Act = Callable[[float], None]
POST_S = 20e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, bytes and bytes/s of the modelled machine. Steps: an H200, an 8B model, 16k tokens of context (docs/numbers.md).

    ``host_s``: the Python of a launch; ``handovers``: how often it gives the interpreter lock away for long enough that another
    thread takes it; ``prefill_`` the same for a step with a prefill piece, on top. ``finish_s``: the Python after a step.
    ``copy_host_s``: that of one copy, ``run_host_s`` more for each run of neighbouring pages.
    """

    step_s: float = 0.005
    row_s: float = 0.0006
    prefill_tokens_per_s: float = 31_000.0
    link_bytes_per_s: float = 50e9
    in_flight_bytes: int = 16 << 20
    page_bytes: int = 2_359_296
    host_s: float = 0.002
    handovers: int = 6
    prefill_host_s: float = 0.010
    prefill_handovers: int = 12
    finish_s: float = 0.0003
    copy_host_s: float = 30e-6
    run_host_s: float = 10e-6
    switch_s: float = 0.005
    cpu_scale: float = 1.6


class Machine:
    """Virtual time. ``at`` plans, ``with_lock`` plans behind the interpreter lock; ``now`` is the loop's clock."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._skipped = 0.0
        self._cpu_began = time.thread_time()
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Act]] = []
        self._lock_waiters: list[tuple[float, int, float, Act]] = []
        self._lock_free = 0.0
        self._idle = False

    def now(self) -> float:
        return (time.thread_time() - self._cpu_began) * self.costs.cpu_scale + self._skipped

    def at(self, when: float, act: Act) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), act))

    def with_lock(self, asked: float, hold: float, act: Act) -> None:
        """A thread asks for the lock at ``asked``, computes for ``hold`` when it has it, and then does ``act``."""
        if self._idle:
            self._grant(max(asked, self._lock_free), hold, act)
        else:
            heapq.heappush(self._lock_waiters, (asked, next(self._numbers), hold, act))

    def _grant(self, when: float, hold: float, act: Act) -> None:
        self._lock_free = when + hold
        self.at(when + hold, act)

    def catch_up(self, now: float) -> None:
        """What happened until ``now`` while the loop computed. Whoever is forced in holds the loop up."""
        while True:
            forced = max(self._lock_waiters[0][0], self._lock_free) + self.costs.switch_s if self._lock_waiters else math.inf
            due = self._heap[0][0] if self._heap else math.inf
            if min(forced, due) > now:
                return
            if forced <= due:
                _, _, hold, act = heapq.heappop(self._lock_waiters)
                self._grant(forced, hold, act)
                self._skipped += hold
                now += hold
            else:
                heapq.heappop(self._heap)[2](due)

    def pause(self, timeout: float | None, posted: Callable[[], bool]) -> None:
        """The loop asks for events: it gives the lock away, and waits if it has nothing to do."""
        began = time.thread_time()
        now = self.now()
        self.catch_up(now)
        now = self.now() - (time.thread_time() - began) * self.costs.cpu_scale
        while self._lock_waiters:
            _, _, hold, act = heapq.heappop(self._lock_waiters)
            self._grant(max(now, self._lock_free), hold, act)
        if posted():
            now = max(now, self._lock_free)
        self._idle = True
        until = now + (timeout if timeout is not None else 1e9)
        while not posted() and until > now:
            if not self._heap or self._heap[0][0] >= until:
                if timeout is None:
                    raise RuntimeError("nothing will ever happen: the machine is at rest and the loop waits")
                now = until
                break
            now, _, act = heapq.heappop(self._heap)
            act(now)
        if posted():
            now = max(now, self._lock_free)
        self._idle = False
        own = (time.thread_time() - began) * self.costs.cpu_scale  # the model's own time does not count
        self._skipped += max(0.0, now - self.now() + own) - own


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop, machine: Machine) -> None:
        super().__init__()
        self._virtual_loop, self._machine = loop, machine

    def select(self, timeout: float | None = None) -> list[Any]:
        self._machine.pause(timeout, lambda: bool(self._virtual_loop.has_ready()))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's loop on the machine's clock; it sleeps in no system call."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._virtual = machine
        self._selector = _Selector(self, machine)

    def time(self) -> float:
        return self._virtual.now()

    def has_ready(self) -> bool:
        return bool(self._ready)  # type: ignore[attr-defined]  # a private of asyncio's loop

    def _write_to_self(self) -> None:
        """Nobody sleeps in a system call."""


class ModelEngine:
    """Stands where ``EngineThread`` stands: the same protocol (launch n + 1 before finish n), no thread."""

    def __init__(
        self, machine: Machine, lag: int, on_result: Callable[[StepResult], None], on_exit: Callable[[], None]
    ) -> None:
        self._machine, self._depth, self._on_result, self._on_exit = machine, lag + 1, on_result, on_exit
        self._mail: deque[StepPlan | None] = deque()
        self._launched: deque[tuple[StepPlan, float]] = deque()
        self._busy = False
        self._device_free = 0.0
        self._rows: dict[int, list[int]] = {}
        self._newest = self._told = -1
        self.in_flight = 0
        self.idle_s = 0.0
        """Device time between two steps with nothing launched."""

    @property
    def has_room(self) -> bool:
        return self.in_flight < self._depth

    def start(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> None:
        self.in_flight += 1
        self._newest = plan.step
        self._mail.append(plan)
        self._machine.at(self._machine.now(), self._go_on)

    def nothing_after(self) -> None:
        if self._told != self._newest and self.has_room:
            self._told = self._newest
            self._mail.append(None)
            self._machine.at(self._machine.now(), self._go_on)

    def settle(self) -> None:
        self.in_flight -= 1

    def stop(self) -> None:
        self._on_exit()

    def join(self, timeout_s: float) -> bool:
        return True

    def _go_on(self, now: float) -> None:
        if self._busy:
            return
        if len(self._launched) >= self._depth:
            self._finish(now)
        elif self._mail:
            plan = self._mail.popleft()
            if plan is not None:
                self._busy = True
                self._host(now, plan)
            elif self._launched and self._launched[-1][0].step == self._newest:
                self._finish(now)
            else:
                self._go_on(now)

    def _host(self, now: float, plan: StepPlan) -> None:
        """The Python of a launch, in as many parts as it gives the lock away."""
        costs = self._machine.costs
        prefills = any(not row.decode for row in plan.rows)
        parts = costs.handovers + costs.prefill_handovers * prefills
        part = (costs.host_s + costs.prefill_host_s * prefills) / parts

        def go_on(at: float, left: int) -> None:
            if left:
                self._machine.with_lock(at, part, lambda t: go_on(t, left - 1))
            else:
                self._launch(at, plan)

        go_on(now, parts)

    def _launch(self, now: float, plan: StepPlan) -> None:
        if self._launched or self._mail:
            self.idle_s += max(0.0, now - self._device_free)
        self._device_free = max(self._device_free, now) + self._duration(plan)
        self._launched.append((plan, self._device_free))
        self._busy = False
        self._go_on(now)

    def _duration(self, plan: StepPlan) -> float:
        decodes = sum(row.decode for row in plan.rows)
        fed = sum(row.n for row in plan.rows if not row.decode)
        costs = self._machine.costs
        return (costs.step_s + costs.row_s * decodes if decodes else 0.0) + fed / costs.prefill_tokens_per_s

    def _finish(self, now: float) -> None:
        self._busy = True
        plan, ends = self._launched.popleft()

        def answered(at: float) -> None:
            self._busy = False
            self._on_result(self._result(plan))
            self._go_on(at)

        self._machine.at(max(now, ends), lambda at: self._machine.with_lock(at, self._machine.costs.finish_s, answered))

    def _result(self, plan: StepPlan) -> StepResult:
        for row_id in plan.closes:
            self._rows.pop(row_id, None)
        for opened in plan.opens:
            self._rows[opened.row] = [len(opened.ids) - opened.n_prompt, opened.params.max_tokens]
        results = []
        for row in plan.rows:
            made = self._rows[row.row]
            if made[0] >= made[1]:
                continue
            made[0] += row.sample
            ended = EndedBy.LENGTH if made[0] >= made[1] else None
            ids = (7,) if row.sample else ()
            results.append(RowResult(row.row, row.start + row.n, ids, "", ended, made[0] if ended else -1))
        return StepResult(plan.step, tuple(results))


class _Direction:
    """One copier thread and its half of the link."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._waiting: deque[tuple[int, int, Any]] = deque()
        self._issued: deque[tuple[float, int, Any]] = deque()
        self._bytes = 0
        self._busy = False
        self._link_free = 0.0
        self.copies = self.runs = 0

    def submit(self, n_pages: int, n_runs: int, done: Any) -> None:
        self.copies += 1
        self.runs += n_runs
        self._waiting.append((n_pages, n_runs, done))
        self._machine.at(self._machine.now(), self._go_on)

    def _go_on(self, now: float) -> None:
        if self._busy or not (self._waiting or self._issued):
            return
        self._busy = True
        if self._waiting and self._bytes <= self._machine.costs.in_flight_bytes:
            costs = self._machine.costs
            hold = costs.copy_host_s + costs.run_host_s * self._waiting[0][1]
            self._machine.with_lock(now, hold, self._issue)
        else:
            self._machine.at(max(now, self._issued[0][0]), lambda at: self._machine.with_lock(at, POST_S, self._finish))

    def _issue(self, now: float) -> None:
        costs = self._machine.costs
        n_pages, _, done = self._waiting.popleft()
        n_bytes = n_pages * costs.page_bytes
        self._link_free = max(self._link_free, now) + n_bytes / costs.link_bytes_per_s
        self._issued.append((self._link_free, n_bytes, done))
        self._bytes += n_bytes
        self._busy = False
        self._go_on(now)

    def _finish(self, now: float) -> None:
        _, n_bytes, done = self._issued.popleft()
        self._bytes -= n_bytes
        done(None, 0.0)
        self._busy = False
        self._go_on(now)


class ModelCopier:
    """A ``CopierPort`` that only lets time pass."""

    def __init__(self, machine: Machine) -> None:
        self.out, self.inward = _Direction(machine), _Direction(machine)

    def copy_out(self, pages: Sequence[int], slot: int, first_page: int, done: Any, n_tokens: int = 0) -> None:
        self.out.submit(len(pages), runs_of(pages), done)

    def copy_in(self, slot: int, slot_pages: Sequence[int], pages: Sequence[int], done: Any) -> None:
        self.inward.submit(len(pages), runs_of(pages), done)

    def close(self) -> None:
        pass


def runs_of(pages: Sequence[int]) -> int:
    """How many runs of neighbouring pages."""
    return 1 + sum(b != a + 1 for a, b in itertools.pairwise(pages)) if pages else 0
