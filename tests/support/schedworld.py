"""A whole machine for the scheduler's core in one thread: fake engine, copies, store and clock, driven one event at a time.

Nothing happens by itself: a test (or the random walk of schedsim) decides which step, copy or job is next to finish and
how. After every event the core checks all its invariants; answers are compared with the fake model's known continuation.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvalet.runtime.fake import FakeCopier, FakeEngine, FakeModel, FakePool, FakeSlab
from kvalet.runtime.plan import SamplingParams, StepPlan
from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.turns import EndReason, TurnId, TurnSpec
from kvalet.store.fake import FakeJob, FakeStore
from kvalet.store.jobs import WriteResult
from recordside import RecordSide
from schedclient import CERTAIN, IDENTITY, SECRET, Client, NoDisk, config

__all__ = ["CERTAIN", "IDENTITY", "SECRET", "Client", "NoDisk", "World", "config"]


class World(RecordSide):
    def __init__(self, cfg: SchedConfig, *, disk: bool = True, capacity: int = 1 << 30, model: FakeModel | None = None) -> None:
        self.config = cfg
        self.model = model or FakeModel()
        self.pool = FakePool(cfg.n_pages, cfg.page_tokens)
        self.slab = FakeSlab(cfg.ram_slots + cfg.staging_slots, cfg.chunk_tokens // cfg.page_tokens, self.pool.page_bytes)
        self.copier = FakeCopier(self.pool, self.slab, hold=True)
        self.store = FakeStore(capacity=capacity, identity=cfg.identity, hold=True) if disk else None
        if self.store is not None:
            self.store.on_gone = lambda keys: self.inbox.append(lambda now: ev.DiskGone(now, keys))
        self.now = 0.0
        self.clients: dict[TurnId, Client] = {}
        self.inbox: list[Callable[[float], ev.Event]] = []
        self.wakes: list[float] = []
        self.log: Counter[str] = Counter()
        self.commands: list[cmd.Command] = []
        self.drained: list[int] = []
        self.secrets = {SECRET}
        self.begin_records()
        self.n_events = 0
        self.next_turn = 1
        self.check_every = 1
        self.habits: random.Random | None = None
        """Of a busy loop: it decides once for several events, and hears of copies long after they are done."""
        self.undecided = False
        self.late: list[Callable[[float], ev.Event]] = []
        self.lost_device = False
        self.boot()

    def boot(self) -> None:
        """A process begins: cold device and RAM, the same disk."""
        self.engine = FakeEngine(self.pool, self.model)
        self.core = Core(self.config, self.store if self.store is not None else NoDisk())
        self.plans: list[StepPlan] = []

    def kill(self) -> None:
        """The process dies: device, RAM and everything in flight are gone; the disk stays, and another process begins."""
        for page in range(self.config.n_pages):
            self.pool.poison(page)
        self.plans.clear()
        self.copier.pending.clear()
        self.inbox.clear()
        self.late.clear()
        self.undecided = False
        self.wakes.clear()
        self.clients = {turn: c for turn, c in self.clients.items() if c.refusal is not None or c.ended is not None}
        if self.store is not None:
            self.store.pending.clear()
            self.store.pins.clear()
        self.boot()

    # what clients do

    def submit(self, prompt: tuple[int, ...], session: str = "", *, secret: bytes = SECRET, **params: Any) -> TurnId:
        turn = TurnId(self.next_turn)
        self.next_turn += 1
        self.secrets.add(secret)
        spec = TurnSpec(turn, prompt, SamplingParams(**({"max_tokens": 8} | params)), secret, session, received_at=self.now)
        self.clients[turn] = Client(spec)
        self.feed(ev.Submit(self.now, spec))
        return turn

    def cancel(self, turn: TurnId, reason: EndReason = EndReason.CANCELLED) -> None:
        self.feed(ev.Cancel(self.now, turn, reason))

    def block(self, turn: TurnId) -> None:
        self.clients[turn].blocked = True
        self.feed(ev.Blocked(self.now, turn))

    def unblock(self, turn: TurnId) -> None:
        self.clients[turn].blocked = False
        self.feed(ev.Unblocked(self.now, turn))

    def fail_device(self) -> None:
        self.lost_device = True
        self.plans.clear()
        self.feed(ev.DeviceFailed(self.now, "the fake device is lost"))

    # the loop

    def feed(self, event: ev.Event) -> None:
        """One event through the core, its commands carried out, plans taken, invariants checked; or all that a little later."""
        self._handle(event)
        while self.inbox:
            self._handle(self.inbox.pop(0)(self.now))

    def _handle(self, event: ev.Event) -> None:
        self.n_events += 1
        if self.habits is None:
            self._follow(self.core.handle(event))
        else:
            self.core.take_in(event)
            self.undecided = True
            if self.habits.random() < 0.6:
                self.decide()

    def decide(self) -> None:
        self._follow(self.core.decide())

    def _follow(self, commands: list[cmd.Command]) -> None:
        self.undecided = False
        for command in commands:
            self._carry_out(command)
        if not self.lost_device:
            while (plan := self.core.plan()) is not None:
                self.plans.append(plan)
        if self.n_events % self.check_every == 0:
            self.core.check()
            self.check_kept()

    def _carry_out(self, command: cmd.Command) -> None:
        self.log[type(command).__name__] += 1
        self.commands.append(command)
        del self.commands[:-400]
        getattr(self, f"_do_{type(command).__name__}")(command)

    def _do_Accept(self, command: cmd.Accept) -> None:
        client = self.clients[command.turn]
        assert not client.accepted
        assert client.refusal is None
        client.accepted = True

    def _do_Refuse(self, command: cmd.Refuse) -> None:
        client = self.clients[command.turn]
        assert not client.accepted
        assert client.refusal is None
        client.refusal = command.refusal

    def _do_Emit(self, command: cmd.Emit) -> None:
        client = self.clients[command.turn]
        assert client.accepted
        assert client.ended is None
        client.ids.extend(command.piece.ids)
        client.text += command.piece.text

    def _do_End(self, command: cmd.End) -> None:
        client = self.clients[command.turn]
        assert client.accepted, f"turn {command.turn} ends and was never accepted"
        assert client.ended is None, f"turn {command.turn} ends twice"
        client.ended = command.ended
        self.judge(client)

    def judge(self, client: Client) -> None:
        """The answer is the fake model's: all of it, or, where the turn was ended from outside, its beginning."""
        ended = client.ended
        assert ended is not None
        assert ended.reason is not EndReason.INTERNAL
        if not self.model.shape_sensitive:
            pool_tokens = (self.config.n_pages - 1) * self.config.page_tokens
            room = min(self.config.context_tokens - len(client.spec.prompt), pool_tokens - len(client.spec.prompt) + 1)
            params = replace(client.spec.params, max_tokens=min(client.spec.params.max_tokens, room))
            right, _ = self.model.continuation(client.spec.prompt, params)
            got = tuple(client.ids)
            if ended.reason not in CERTAIN:
                right = right[: len(got)]
            assert got == right, f"turn {client.spec.turn}: answered {got}, right is {right}\n{self.core.tell()}"
        report = ended.report
        assert report.completion_tokens == len(client.ids)
        assert report.preemptions <= self.config.max_preemptions + 4 or client.blocked or ended.reason not in CERTAIN

    def _do_CopyOut(self, command: cmd.CopyOut) -> None:
        self.copier.copy_out(command.pages, command.slot, command.first_page, self._copied(command.transfer))

    def _do_CopyIn(self, command: cmd.CopyIn) -> None:
        self.copier.copy_in(command.slot, command.slot_pages, command.pages, self._copied(command.transfer))

    def _copied(self, transfer: ev.TransferId) -> Callable[[str | None, float], None]:
        def done(error: str | None, copy_ms: float) -> None:
            late = self.late or (self.habits is not None and self.habits.random() < 0.3)
            (self.late if late else self.inbox).append(
                lambda now: ev.CopyFailed(now, transfer, error) if error else ev.CopyDone(now, transfer, copy_ms)
            )

        return done

    def _do_ReadChunk(self, command: cmd.ReadChunk) -> None:
        assert self.store is not None
        view = self.slab.view(command.slot)
        self.store.read(command.transfer, command.meta, view, self._settled(command), session="", klass=command.klass)

    def _do_ReadTail(self, command: cmd.ReadTail) -> None:
        assert self.store is not None
        assert len(command.candidates) <= 4
        self.store.read_tail(
            command.transfer, command.parent, command.ordinal, command.first_token, command.ids, command.candidates,
            self.slab.view(command.slot), self._settled(command), session="", klass=0, secret=command.secret,
        )  # fmt: skip

    def _do_WriteChunk(self, command: cmd.WriteChunk) -> None:
        assert self.store is not None
        view = self.slab.view(command.slot)
        self.store.write(command.transfer, command.meta, view, self._settled(command), klass=command.klass)

    def _settled(self, command: Any) -> Callable[[Any], None]:
        transfer = command.transfer

        def done(completion: Any) -> None:
            assert self.store is not None
            result = self.store.settle(completion)
            if isinstance(result, WriteResult):
                event = (
                    (lambda now: ev.WriteFailed(now, transfer, result.reason))
                    if result.reason
                    else (lambda now: ev.WriteDone(now, transfer, result.n_bytes))
                )
            else:
                event = (
                    (lambda now: ev.ReadFailed(now, transfer, result.reason))
                    if result.reason
                    else (lambda now: ev.ReadDone(now, transfer, result.key, result.ids, result.n_bytes, 1.0, 0.1))
                )
            self.inbox.append(event)

        return done

    def _do_CancelTransfer(self, command: cmd.CancelTransfer) -> None:
        if self.store is not None:
            self.store.cancel(command.transfer)

    def _do_PinDisk(self, command: cmd.PinDisk) -> None:
        assert self.store is not None
        self.store.pin(command.keys)

    def _do_UnpinDisk(self, command: cmd.UnpinDisk) -> None:
        assert self.store is not None
        self.store.unpin(command.keys)

    def _do_TouchDisk(self, command: cmd.TouchDisk) -> None:
        if self.store is not None:
            self.store.touch(command.keys)

    def _do_WakeAt(self, command: cmd.WakeAt) -> None:
        if command.at < math.inf:
            self.wakes.append(command.at)

    def _do_Drained(self, command: cmd.Drained) -> None:
        self.drained.append(command.left_behind)

    # what the machine does next

    def step(self) -> bool:
        """The oldest step in flight is computed and its result comes. False if there is none."""
        if not self.plans:
            return False
        result = self.engine.finish(self.engine.launch(self.plans.pop(0)))
        self.feed(ev.StepDone(self.now, result))
        return True

    def copies(self, inward: bool) -> list[Any]:
        return [copy for copy in self.copier.pending if copy.inward is inward]

    def copy(self, inward: bool, error: str | None = None) -> bool:
        """The oldest copy of that direction ends. False if there is none."""
        waiting = self.copies(inward)
        if not waiting:
            return False
        self.copier.pending.remove(waiting[0])
        if error is None:
            waiting[0].run()
        else:
            waiting[0].fail(error)
        self.pour()
        return True

    def hear_late(self) -> bool:
        """The answers of copies that ended long ago, all of them. False if there are none."""
        self.inbox, self.late = self.inbox + self.late, []
        return self.pour()

    def jobs(self, kind: str = "") -> list[FakeJob]:
        pending = self.store.pending if self.store else []
        return [
            job for job in pending if job.kind.startswith(kind) and ("record" in kind or not kind or "record" not in job.kind)
        ]

    def job(self, kind: str = "", reason: str = "", index: int = 0) -> bool:
        """A job of the store ends (kind "read", "read_tail", "write", "read_record", "write_record" or any). False if there is
        none."""
        waiting = self.jobs(kind)
        if not waiting:
            return False
        chosen = waiting[index % len(waiting)]
        if reason:
            chosen.refuse(reason)
        else:
            chosen.run()
        self.pour()
        return True

    def pour(self) -> bool:
        poured = bool(self.inbox)
        while self.inbox:
            self._handle(self.inbox.pop(0)(self.now))
        return poured

    def tick(self, seconds: float = 0.0) -> bool:
        """Time passes: by ``seconds``, or to the next wake-up. False if nobody asked for one."""
        if seconds:
            self.now += seconds
        elif self.wakes:
            self.now = max(self.now, min(self.wakes))
        else:
            return False
        due = [at for at in self.wakes if at <= self.now]
        self.wakes = [at for at in self.wakes if at > self.now]
        if due:
            self.feed(ev.Tick(self.now))
        return bool(due) or seconds > 0

    def advance(self) -> bool:
        """One thing of any kind happens, time last. False: all is quiet."""
        if self.undecided:
            return self.decide() is None
        return self.step() or self.copy(True) or self.copy(False) or self.job() or self.hear_late() or self.tick()

    def settle(self, limit: int = 100_000) -> None:
        """Until all is quiet."""
        for _ in range(limit):
            if not self.advance():
                return
        raise AssertionError(f"not quiet after {limit} events\n{self.core.tell()}")

    def run_to_end(self, *turns: TurnId, limit: int = 100_000) -> None:
        """Until these turns have ended; fails if the machine goes quiet before."""
        for _ in range(limit):
            if all(self.clients[turn].ended for turn in turns):
                return
            assert self.advance(), f"stuck: {self.core.statistics()}\n{self.core.tell()}"
        raise AssertionError(f"no end after {limit} events: {self.core.statistics()}\n{self.core.tell()}")

    def ask(self, prompt: tuple[int, ...], session: str = "", **params: Any) -> Client:
        """One turn from beginning to end."""
        turn = self.submit(prompt, session, **params)
        self.run_to_end(turn)
        return self.clients[turn]

    def assert_quiet(self) -> None:
        """Nothing in flight, nobody alive, every page free or cached, every slot free or keyed, no pin left."""
        stats = self.core.statistics()
        self.core.check()
        alive = [c.spec.turn for c in self.clients.values() if c.accepted and not c.ended]
        assert not alive, f"turns {alive} never ended\n{self.core.tell()}"
        assert sum(stats.turns.values()) == 0
        assert stats.queue_length == 0
        assert stats.steps_in_flight == 0
        assert not any(stats.transfers.values()), stats.transfers
        assert stats.pages.leased_only == 0, stats.pages
        assert stats.pages.held == stats.idle_pages, stats
        assert stats.ram.taken + stats.staging.taken == 0, (stats.ram, stats.staging)
        if self.store is not None:
            held = Counter(key for s in self.core._board.sessions for line in s.lines.values() for key in line.held)
            assert +self.store.pins == held, (self.store.pins, held)
