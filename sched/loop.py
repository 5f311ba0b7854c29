"""``Scheduler``: the only asyncio shell of sched. What may be asked of it, and how it begins and ends.

When something breaks:
- the engine raises, or a copy finds the device lost: every turn ends once with ``device_error``; ``device_lost`` says why,
  ``on_device_lost`` is called once; transfers go on, so that ``drain`` can save what is in RAM.
- the core raises (its state contradicts itself): a defect. The story is logged, every open turn is ended once with
  ``internal`` by the loop itself, new turns are refused, ``on_device_lost`` is called; ``drain`` returns at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from types import TracebackType

import anyio
import anyio.to_thread
from kvalet.runtime.plan import SlotId
from kvalet.sched import events
from kvalet.sched.errors import Refused
from kvalet.sched.lag_meter import LagMeter
from kvalet.sched.ports import CopierPort, EnginePort, StorePort
from kvalet.sched.session_state import SessionState
from kvalet.sched.stats import Stats
from kvalet.sched.status import DrainReport, SchedulerStatistics
from kvalet.sched.streams import TurnStream
from kvalet.sched.tick import DecisionCore, Ticker
from kvalet.sched.turns import EndReason, Refusal, TurnId, TurnSpec

log = logging.getLogger(__name__)

DRAIN_GRACE_S = 1.0
"""How long after its deadline ``drain`` still waits for the core's word."""
CLOSE_S = 5.0
"""Bound of each stage of closing: turns ended, transfers answered, engine thread ended, copier closed."""


class Scheduler:
    """An async context manager; inside it, everything may be called from the loop's thread only.

    Leaving it ends every open turn with ``shutdown`` (``drain`` first, to let them finish and to save what is worth it),
    waits for steps and transfers in flight, each stage for at most CLOSE_S, and closes the copier. Engine, store and slab
    belong to whoever made them, who closes the store before the slab goes: its workers may still read slots.

    ``slot_view(slot)``: the whole slot, header block and payload, writable. ``clock``: seconds, monotonic; it is what
    ``TurnSpec.received_at`` and ``WakeAt`` mean.
    """

    def __init__(
        self,
        core: DecisionCore,
        engine: EnginePort,
        copier: CopierPort,
        store: StorePort | None,
        slot_view: Callable[[SlotId], memoryview],
        *,
        write_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        check_when_idle: bool = True,
    ) -> None:
        self.stats = Stats()
        self.on_device_lost: Callable[[str], None] | None = None
        self._core = core
        self._engine = engine
        self._copier = copier
        self._store = store
        self._slot_view = slot_view
        self._write_timeout_s = write_timeout_s
        self._check_when_idle = check_when_idle
        self._clock = clock
        self._turn_ids = itertools.count(1)
        self._closing = False

    async def __aenter__(self) -> Scheduler:
        self._ticker = Ticker(
            self._core,
            self._engine,
            self._copier,
            self._store,
            self._slot_view,
            write_timeout_s=self._write_timeout_s,
            clock=self._clock,
            check_when_idle=self._check_when_idle,
            on_device_lost=self._device_was_lost,
            stats=self.stats,
        )
        self.lag_meter = LagMeter(asyncio.get_running_loop())
        self._ticker.start()
        self.lag_meter.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._close()

    @property
    def device_lost(self) -> str | None:
        """Why nothing can be computed any more; None while all is well."""
        return self._ticker.device_lost

    def stalled_s(self) -> float:
        """Seconds without a step while turns are open that could go on (``Ticker.stalled_s``)."""
        return self._ticker.stalled_s()

    def now(self) -> float:
        """Seconds of the scheduler's clock."""
        return self._clock()

    def next_turn_id(self) -> TurnId:
        return TurnId(next(self._turn_ids))

    async def submit(self, spec: TurnSpec) -> TurnStream:
        """Hand a turn to the core and wait for its answer, not for the turn. ``Refused`` leaves nothing behind. From the
        return on, the turn ends exactly once, and its stream says how. A caller cancelled while it waits cancels the turn.
        """
        if self._closing:
            raise Refused(Refusal.CLOSING, "the server is shutting down")
        if self._ticker.violation is not None:
            raise Refused(Refusal.DEVICE_LOST, f"internal error: {self._ticker.violation}")
        return await self._ticker.turns.submit(spec)

    def cancel(self, turn: TurnId, reason: EndReason = EndReason.CANCELLED) -> None:
        """The turn ends with ``reason`` at the next tick, whatever it is doing. Unknown and ended turns are ignored; of
        several reasons the first stands."""
        self._ticker.turns.cancel(turn, reason)

    def close_session(self, session: str, tenant: str = "") -> None:
        self._ticker.inbox.post_local(lambda now: events.CloseSession(now, session, tenant))

    def fork_session(self, parent: str, child: str, tenant: str = "") -> None:
        self._ticker.inbox.post_local(lambda now: events.ForkSession(now, parent, child, tenant))

    async def session_state(self, session: str, tenant: str = "") -> SessionState:
        """What is known of the session; its records are read from disk first if it was not open. ``Refused`` if there is no
        room for one more session, or the scheduler is closing."""
        return await self._ticker.questions.ask(session, tenant, None)

    async def pin_session(self, session: str, tenant: str = "", *, pinned: bool) -> SessionState:
        """Pin the session or let it go, and say how it stands; one that does not exist is made to be pinned. Idempotent."""
        return await self._ticker.questions.ask(session, tenant, pinned)

    async def drain(self, seconds: float) -> DrainReport:
        """Refuse new turns, let running ones end (at the latest after ``seconds``, with ``shutdown``), spill to disk what is
        worth it until then. Returns when the core is through, or DRAIN_GRACE_S after the deadline at the latest."""
        ticker = self._ticker
        deadline = self.now() + seconds
        ticker.inbox.post_local(lambda now: events.BeginDrain(now, deadline))
        await ticker.until(lambda: ticker.left_behind is not None or ticker.retired, seconds + DRAIN_GRACE_S)
        return DrainReport(ticker.left_behind is not None, ticker.left_behind, ticker.records_left, *ticker.lost_with_device)

    def statistics(self) -> SchedulerStatistics:
        ticker = self._ticker
        return SchedulerStatistics(
            open_turns=len(ticker.turns),
            blocked_turns=ticker.turns.n_blocked,
            waiting_postings=len(ticker.inbox),
            steps_in_flight=ticker.engine_thread.in_flight,
            transfers_in_flight=len(ticker.transfers),
            duplicate_answers=ticker.transfers.duplicates,
            closing=self._closing,
            device_lost=ticker.device_lost,
            violation=ticker.violation,
            totals=self.stats.snapshot(),
            lag=self.lag_meter.statistics(),
            stalled_s=ticker.stalled_s(),
            core=self._core.statistics(),
        )

    async def _close(self) -> None:
        ticker = self._ticker
        self._closing = True
        ticker.turns.cancel_all(EndReason.SHUTDOWN)
        await ticker.until(lambda: not len(ticker.turns), CLOSE_S)
        ticker.retire()
        ticker.turns.end_all(EndReason.SHUTDOWN, Refusal.CLOSING, "the server is shutting down")
        ticker.questions.end_all("the server is shutting down")
        ticker.transfers.cancel_all()
        ticker.records.cancel_all()
        await ticker.until(lambda: not len(ticker.transfers) and not len(ticker.records), CLOSE_S)
        ticker.engine_thread.stop()
        if await ticker.until(lambda: ticker.engine_exited, CLOSE_S):
            ticker.engine_thread.join(CLOSE_S)
        else:
            log.error("the engine thread did not end within %s s", CLOSE_S)
        with anyio.move_on_after(CLOSE_S):
            await anyio.to_thread.run_sync(self._copier.close, abandon_on_cancel=True)
        self.lag_meter.stop()
        ticker.stop()

    def _device_was_lost(self, message: str) -> None:
        if self.on_device_lost is not None:
            self.on_device_lost(message)
