"""Records through the real loop: sessions that go on in the next process, questions about them, slow and broken disks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from fake_house import IDENTITY, House, fake_house, read
from kvalet.sched.commands import DropRecord, ReadRecords, WriteRecord
from kvalet.sched.errors import Refused
from kvalet.sched.events import Event, RecordDone, RecordFailed, RecordsRead, TransferId
from kvalet.sched.inbox import Posting
from kvalet.sched.record_jobs import RecordJobs
from kvalet.sched.turns import EndReason, Refusal
from kvalet.store.fake import FakeStore
from kvalet.store.record import Record

HISTORY = tuple(range(1, 41))


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


async def saved(house: House, session: str, n_tokens: int) -> None:
    """Until a record says that ``n_tokens`` are safe."""
    found = house.core._board.sessions.find("", session)
    assert found is not None
    lines = found.lines.values()
    assert await house.scheduler._ticker.until(lambda: any(line.saved_tokens == n_tokens for line in lines), 30)
    state = await house.scheduler.session_state(session)
    assert (state.saved_tokens, state.refused) == (n_tokens, "")


@pytest.mark.anyio
@pytest.mark.parametrize("lag", [0, 1])
async def test_a_drained_session_goes_on_in_the_next_process_at_its_last_token(lag: int) -> None:
    async with fake_house(lag=lag) as first:
        answer, _ = await first.ask(HISTORY, 8, ignore_eos=True, session="s")
        done = await first.scheduler.drain(20)
        assert (done.finished, done.left_behind, done.records_left) == (True, 0, 0)
    async with fake_house(lag=lag, disk_of=first) as second:
        state = await second.scheduler.session_state("s")
        assert (state.known, state.tokens, state.saved_tokens) == (True, 47, 47)
        _, kv = await second.ask((*HISTORY, *answer, 5, 6), 4, ignore_eos=True, session="s")
        assert (kv.disk_tokens, kv.computed_tokens, kv.diverged_at) == (47, 3, -1)
        unknown = await second.scheduler.session_state("nobody")
        assert not unknown.known


@pytest.mark.anyio
async def test_a_killed_process_loses_nothing_that_was_checkpointed() -> None:
    async with fake_house(checkpoint_idle=True) as first:
        answer, _ = await first.ask(HISTORY, 8, ignore_eos=True, session="s")
        await saved(first, "s", 47)
    async with fake_house(disk_of=first) as second:
        _, kv = await second.ask((*HISTORY, *answer, 5, 6), 4, ignore_eos=True, session="s")
        assert (kv.disk_tokens, kv.computed_tokens) == (47, 3)


@pytest.mark.anyio
async def test_pinned_through_the_loop_and_still_pinned_in_the_next_process() -> None:
    async with fake_house() as first:
        await first.ask(HISTORY, 8, ignore_eos=True, session="s")
        assert (await first.scheduler.pin_session("s", pinned=True)).pinned
        await saved(first, "s", 47)
    async with fake_house(disk_of=first) as second:
        assert (await second.scheduler.session_state("s")).pinned
        assert not (await second.scheduler.pin_session("s", pinned=False)).pinned
        await second.quiet()
    async with fake_house(disk_of=second) as third:
        assert not (await third.scheduler.session_state("s")).pinned


async def restarted(**config: Any) -> House:
    async with fake_house(**config) as first:
        await first.ask(HISTORY, 8, ignore_eos=True, session="s")
        await first.scheduler.drain(20)
    return first


@pytest.mark.anyio
async def test_a_turn_waits_for_slow_records_while_others_go_on_and_can_be_cancelled() -> None:
    async with fake_house(disk_of=await restarted(), record_wait_s=50.0) as house:
        assert house.store is not None
        house.store.gate.clear()
        waiting = await house.scheduler.submit(house.spec(HISTORY, 4, session="s"))
        leaving = house.spec((*HISTORY, 7), 4, session="s")
        stream = await house.scheduler.submit(leaving)
        await house.ask(tuple(range(60, 80)), 4, session="other")
        house.scheduler.cancel(leaving.turn)
        _, ended = await read(stream)
        assert ended.reason is EndReason.CANCELLED
        house.store.gate.set()
        _, ended = await read(waiting)
        assert ended.report.disk_tokens == 39


@pytest.mark.anyio
async def test_records_that_never_come_hold_a_turn_up_for_a_bounded_time() -> None:
    async with fake_house(disk_of=await restarted(), record_wait_s=0.02, ram_slots=0, n_pages=65) as house:
        assert house.store is not None
        house.store.gate.clear()
        _, kv = await house.ask(tuple(range(50, 70)), 4, session="s")
        assert kv.computed_tokens == 20
        house.store.gate.set()
        await house.quiet()
        assert (await house.scheduler.session_state("s")).branches == 2


@pytest.mark.anyio
async def test_questions_that_wait_when_the_scheduler_ends_are_refused() -> None:
    refusals: list[Refusal] = []
    house_gate: threading.Event | None = None
    try:
        async with anyio.create_task_group() as tasks, fake_house(disk_of=await restarted(), record_wait_s=50.0) as house:
            assert house.store is not None
            house_gate = house.store.gate
            house_gate.clear()

            async def ask() -> None:
                try:
                    await house.scheduler.session_state("s")
                except Refused as refused:
                    refusals.append(refused.refusal)

            tasks.start_soon(ask)
            await house.scheduler._ticker.until(lambda: len(house.scheduler._ticker.questions) == 1, 20)
    finally:
        if house_gate is not None:
            house_gate.set()
    assert refusals == [Refusal.CLOSING]


# the jobs by themselves


class Desk:
    """A store whose jobs wait, and an inbox that is emptied by hand."""

    def __init__(self) -> None:
        self.store: Any = FakeStore(identity=IDENTITY, hold=True)
        self.postings: list[Posting] = []
        self.jobs = RecordJobs(self.store, self.postings.append)

    def events(self) -> list[Event]:
        found = [posting(1.0) for posting in self.postings]
        self.postings.clear()
        return [event for event in found if event is not None]


def record(branch: str) -> Record:
    return Record("", "s", branch, (1, 2, 3), 2, 3)


READ = ReadRecords(TransferId(5), "", "s", ("a" * 16, "b" * 16, "c" * 16))


def test_several_records_are_one_answer_in_the_order_asked_for() -> None:
    desk = Desk()
    for branch in READ.branches:
        desk.store.records.write(0, record(branch), (), full=False)
    desk.jobs.read(READ)
    assert [job.job for job in desk.store.pending] == [5, 6, 7]
    for job in (desk.store.pending[2], desk.store.pending[0]):
        job.run()
    assert desk.events() == []
    assert len(desk.jobs) == 1
    desk.store.pending[0].refuse("payload")
    (answer,) = desk.events()
    assert isinstance(answer, RecordsRead)
    assert (answer.transfer, answer.failures) == (5, ("payload",))
    assert [one.branch for one in answer.records] == [READ.branches[0], READ.branches[2]]
    assert len(desk.jobs) == 0


def test_a_write_is_answered_once_whatever_becomes_of_it() -> None:
    desk = Desk()
    for number, reason in enumerate(("", "io")):
        desk.jobs.write(WriteRecord(TransferId(number), record("a" * 16)))
        job = desk.store.pending[0]
        if reason:
            job.refuse(reason)
        else:
            job.run()
        job.done(desk.store.records.read(number, ("", "s", "a" * 16)))  # a second answer is not passed on
        (answer,) = desk.events()
        assert isinstance(answer, RecordFailed if reason else RecordDone)
        assert answer.transfer == number
    assert len(desk.jobs) == 0


def broken(*_: Any, **__: Any) -> None:
    raise OSError("the store is broken")


@pytest.mark.parametrize("where", ["start", "settle"])
def test_a_store_that_raises_is_a_failed_job(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    names = ("write_record", "read_record") if where == "start" else ("settle",)
    for name in names:
        monkeypatch.setattr(desk.store, name, broken)
    desk.jobs.write(WriteRecord(TransferId(1), record("a" * 16)))
    desk.jobs.read(READ)
    for job in list(desk.store.pending):
        job.run()
    assert desk.events() == [
        RecordFailed(1.0, TransferId(1), "internal"),
        RecordsRead(1.0, TransferId(5), (), ("internal",) * 3),
    ]


def test_without_a_store_everything_is_answered_as_closed() -> None:
    postings: list[Callable[[float], Event | None]] = []
    jobs = RecordJobs(None, postings.append)
    jobs.write(WriteRecord(TransferId(1), record("a" * 16)))
    jobs.read(ReadRecords(TransferId(2), "", "s", ("a" * 16,)))
    jobs.drop(DropRecord("", "s", "a" * 16))
    assert [posting(1.0) for posting in postings] == [
        RecordFailed(1.0, TransferId(1), "closed"), RecordsRead(1.0, TransferId(2), (), ("closed",)),
    ]  # fmt: skip


def test_the_end_cancels_what_has_not_started() -> None:
    desk = Desk()
    desk.jobs.write(WriteRecord(TransferId(1), record("a" * 16)))
    desk.jobs.read(READ)
    desk.jobs.cancel_all()
    answers = desk.events()
    assert [type(answer) for answer in answers] == [RecordFailed, RecordsRead]
    assert len(desk.jobs) == 0
