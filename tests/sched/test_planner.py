"""What a step holds: budgets, order, rows; and the results that come back wrong."""

from __future__ import annotations

import dataclasses
import time

import pytest
from kvalet.runtime.fake import FakeCopier, FakeEngine, FakePool, FakeSlab
from kvalet.runtime.fake_model import FakeModel
from kvalet.runtime.plan import PageId, Row, RowId, RowOpen, RowResult, SamplingParams, SlotId, StepPlan, StepResult
from kvalet.sched import events as ev
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.story import CoreDefect
from kvalet.sched.turns import TurnId, TurnSpec
from schedworld import SECRET, NoDisk, World, config


def words(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 37 + i * 11) % 90 + 1 for i in range(length))


def test_decodes_come_first_and_prefill_gets_what_is_left() -> None:
    world = World(config(n_pages=200, step_tokens=10, idle_step_tokens=64))
    runners = [world.submit(words(i, 4), max_tokens=30, ignore_eos=True) for i in range(3)]
    world.step()
    world.step()
    world.submit(words(9, 50), max_tokens=2)
    world.step()
    plan = world.plans[0]
    assert [row.decode for row in plan.rows] == [True, True, True, False]
    assert plan.rows[-1].n == 10 - 3
    assert sum(row.n for row in plan.rows) == 10
    assert len(runners) == 3


def test_without_decodes_the_idle_budget_goes_to_the_oldest_first() -> None:
    world = World(config(n_pages=200, step_tokens=10, idle_step_tokens=48))
    world.submit(words(1, 4), max_tokens=1)  # keeps the first step busy
    first = world.submit(words(2, 40), max_tokens=2)
    second = world.submit(words(3, 40), max_tokens=2)
    world.step()
    rows = world.plans[0].rows
    assert [row.n for row in rows] == [40, 8]
    assert [row.sample for row in rows] == [True, False]
    world.run_to_end(first, second)


def test_no_more_rows_are_open_than_the_engine_has() -> None:
    world = World(config(n_pages=200, max_rows=2, step_tokens=32))
    turns = [world.submit(words(i, 5), max_tokens=6, ignore_eos=True) for i in range(7)]
    while any(world.clients[turn].ended is None for turn in turns):
        assert len(world.engine.rows) <= 2
        assert world.advance()


@pytest.mark.parametrize("lag", [0, 1])
def test_no_more_steps_in_flight_than_lag_allows(lag: int) -> None:
    world = World(config(lag=lag))
    world.submit(words(1, 5), max_tokens=9, ignore_eos=True)
    for _ in range(5):
        assert len(world.plans) == lag + 1
        world.step()


def test_with_lag_a_decode_is_planned_before_its_token_is_known() -> None:
    world = World(config(lag=1))
    world.submit(words(1, 5), max_tokens=3, ignore_eos=True)
    assert [(row.start, row.n, row.decode) for plan in world.plans for row in plan.rows] == [(0, 5, False), (5, 1, True)]
    world.step()
    assert world.plans[-1].rows[0].start == 6
    world.step()
    assert not any(plan.rows and plan.rows[0].start > 6 for plan in world.plans)  # the third token is never fed


def test_nothing_to_do_is_no_plan() -> None:
    core = Core(config(), NoDisk())
    assert core.plan() is None
    assert core.handle(ev.Tick(1.0)) == []
    core.check()


def submitted(core: Core) -> StepPlan:
    core.handle(ev.Submit(0.0, TurnSpec(TurnId(1), (1, 2, 3), SamplingParams(max_tokens=4), SECRET)))
    plan = core.plan()
    assert plan is not None
    return plan


def test_a_result_of_another_step_is_a_defect() -> None:
    core = Core(config(), NoDisk())
    plan = submitted(core)
    with pytest.raises(CoreDefect, match="is done, in flight are"):
        core.handle(ev.StepDone(0.0, StepResult(plan.step + 1, ())))


def test_a_result_without_a_live_row_is_a_defect() -> None:
    core = Core(config(), NoDisk())
    plan = submitted(core)
    with pytest.raises(CoreDefect, match="story, oldest first"):
        core.handle(ev.StepDone(0.0, StepResult(plan.step, ())))


def test_a_result_of_a_closed_row_is_dropped() -> None:
    core = Core(config(), NoDisk())
    plan = submitted(core)
    core.handle(ev.Cancel(0.0, TurnId(1)))
    out = core.handle(ev.StepDone(0.0, StepResult(plan.step, (RowResult(plan.rows[0].row, 3, (7,)),))))
    assert out == []
    assert core.statistics().counters["stale_results"] == 1


def test_an_answer_for_a_transfer_that_is_over_is_a_defect() -> None:
    core = Core(config(), NoDisk())
    with pytest.raises(CoreDefect, match="which is over"):
        core.handle(ev.CopyDone(0.0, ev.TransferId(9)))


def test_events_for_unknown_turns_and_sessions_are_ignored() -> None:
    core = Core(config(), NoDisk())
    for event in (
        ev.Cancel(0.0, TurnId(5)),
        ev.Blocked(0.0, TurnId(5)),
        ev.Unblocked(0.0, TurnId(5)),
        ev.CloseSession(0.0, "nobody"),
        ev.ForkSession(0.0, "nobody", "child"),
    ):
        assert core.handle(event) == []
    core.check()


def test_statistics_are_frozen_and_name_every_state() -> None:
    world = World(config())
    world.submit(words(1, 5))
    stats = world.core.statistics()
    assert stats.turns == {"queued": 0, "restoring": 0, "prefilling": 1, "decoding": 0, "paused": 0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.sessions = 3  # type: ignore[misc]
    assert "prefilling" in repr(world.core)


def test_counters_never_fall() -> None:
    world = World(config(ram_slots=3))
    last: dict[str, int] = {}
    for i in range(8):
        world.ask(words(i, 24), f"s{i % 3}", max_tokens=3)
        now = {k: v for k, v in world.core.statistics().counters.items() if isinstance(v, int)}
        assert all(now[name] >= last.get(name, 0) for name in now)
        last = now


def test_a_full_queue_costs_little_per_event() -> None:
    """256 waiting turns with long prompts: an event stays far below the time of a step (CPU time, not wall)."""
    cfg = SchedConfig(page_tokens=16, chunk_tokens=256, n_pages=400, context_tokens=8192, identity=b"i" * 32, ram_slots=8)
    core = Core(cfg, NoDisk())
    for i in range(256):
        core.handle(ev.Submit(0.0, TurnSpec(TurnId(i + 1), words(i, 4000), SamplingParams(max_tokens=9), SECRET)))
    began = time.thread_time()
    for _ in range(200):
        core.handle(ev.Tick(0.1))
    assert (time.thread_time() - began) / 200 < 0.005


# the fakes themselves


def engine(shape_sensitive: bool = False) -> FakeEngine:
    return FakeEngine(FakePool(9, 4), FakeModel(shape_sensitive=shape_sensitive))


def feed(eng: FakeEngine, pieces: list[int], ids: tuple[int, ...]) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    pages = tuple(PageId(p) for p in (3, 1, 7))
    start = 0
    for step, n in enumerate(pieces):
        opens = (RowOpen(RowId(0), ids, len(ids), 0, pages, params),) if step == 0 else ()
        row = Row(RowId(0), start, n, False, start + n == len(ids))
        result = eng.finish(eng.launch(StepPlan(step, (row,), opens)))
        start += n
    return result.rows[0].ids


def test_the_fake_answers_alike_however_the_prompt_is_cut() -> None:
    ids = words(4, 11)
    right, _ = FakeModel().continuation(ids, SamplingParams(max_tokens=5, ignore_eos=True))
    for pieces in ([11], [4, 7], [1] * 11, [5, 5, 1]):
        assert feed(engine(), pieces, ids) == right[:1]


def test_a_shape_sensitive_fake_does_not() -> None:
    ids = words(4, 11)
    assert feed(engine(True), [11], ids) != feed(engine(True), [4, 7], ids)
    with pytest.raises(ValueError, match="shape sensitive"):
        FakeModel(shape_sensitive=True).continuation(ids, SamplingParams())


@pytest.mark.parametrize("offset", range(11))
def test_every_offset_of_every_page_decides_the_answer(offset: int) -> None:
    ids = words(4, 11)
    right = feed(engine(), [11], ids)
    eng = engine()
    feed(eng, [10], (*ids[:10], 1, 1))
    eng.pool.pages[(3, 1, 7)[offset // 4]][offset % 4 * 8] ^= 1
    row = eng.rows[RowId(0)]
    row.ids = list(ids)
    result = eng.launch(StepPlan(9, (Row(RowId(0), 10, 1, False, True),))).rows[0]
    assert (result.ids != right) == (offset < 10)  # position 10 is written by this very step


def test_the_fake_engine_refuses_plans_that_break_the_contract() -> None:
    eng = engine()
    feed(eng, [11], words(4, 11))
    with pytest.raises(RuntimeError, match="nobody knows"):
        eng.launch(StepPlan(1, (Row(RowId(0), 11, 2, True, True),)))
    with pytest.raises(RuntimeError, match="open already"):
        eng.launch(StepPlan(2, (), (RowOpen(RowId(0), (1,), 1, 0, (PageId(1),), SamplingParams()),)))


def test_a_held_copy_poisons_what_it_will_write_and_close_fails_it() -> None:
    pool, slab = FakePool(4, 4), FakeSlab(2, 2, 32)
    slab.slots[1][:] = bytes(range(64))
    copier = FakeCopier(pool, slab, hold=True)
    answers: list[str | None] = []
    copier.copy_in(SlotId(1), (1,), (PageId(2),), lambda error, ms: answers.append(error))
    assert set(pool.pages[2]) == {0xA5}
    copier.pending.popleft().run()
    assert pool.pages[2] == bytes(range(32, 64))
    copier.copy_out((PageId(2),), SlotId(0), 1, lambda error, ms: answers.append(error))
    copier.close()
    assert answers == [None, "the copier is closed"]
