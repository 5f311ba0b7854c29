"""A session that comes back after a restart: where it stopped, while its records are read, and when they are bad."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvalet.runtime.fake_model import FakeModel
from kvalet.sched import events as ev
from kvalet.sched.resume import MAX_ASKS, fits
from kvalet.sched.session_state import SessionState
from kvalet.sched.turns import EndReason
from kvalet.store.record import Record, Span
from schedworld import Client, World, config
from talk import after, crowd, drain, open_session, records, report, restart, words


def parked(world: World, name: str = "a", number: int = 1, length: int = 30) -> Client:
    """A session's first turn, drained to disk before the process ended. 35 of 36 tokens have KV."""
    client = world.ask(words(number, length), name, max_tokens=6, ignore_eos=True)
    restart(world)
    return client


@pytest.mark.parametrize("lag", [0, 1])
def test_it_resumes_at_the_token_where_it_stopped(lag: int) -> None:
    world = World(config(n_pages=60, lag=lag))
    client = parked(world)
    back = world.ask(after(client, 5, 6, 7), "a", max_tokens=4)
    assert report(back).disk_tokens == 35
    assert report(back).computed_tokens == 4  # the last answer token, which was never fed, and the three new ones
    assert report(back).diverged_at == -1
    (branch,) = open_session(world, "a").branches
    assert branch.ids == after(back)
    world.settle()
    world.assert_quiet()


def test_its_turns_wait_for_its_records_and_nobody_elses_do() -> None:
    world = World(config(n_pages=60))
    client = parked(world)
    turn = world.submit(after(client, 5), "a", max_tokens=2)
    assert len(world.jobs("read_record")) == 1
    other = world.submit(words(9, 12), "b", max_tokens=2)
    while world.clients[other].ended is None:
        assert world.step() or world.copy(True)
    assert world.core.statistics().turns["queued"] == 1
    second = world.submit(after(client, 6), "a", max_tokens=2)
    assert len(world.jobs("read_record")) == 1  # one read for both
    world.job("read_record")
    world.run_to_end(turn, second)
    assert report(world.clients[second]).diverged_at == report(world.clients[turn]).diverged_at == -1


def test_a_turn_that_waits_for_records_can_be_cancelled() -> None:
    world = World(config(n_pages=60))
    client = parked(world)
    turn = world.submit(after(client, 5), "a", max_tokens=2)
    world.cancel(turn)
    ended = world.clients[turn].ended
    assert ended is not None
    assert ended.reason is EndReason.CANCELLED
    world.settle()
    world.assert_quiet()
    assert [b.ids for b in open_session(world, "a").branches] == [after(client)]


def test_after_the_deadline_a_turn_goes_on_without_and_a_late_record_still_completes_the_session() -> None:
    world = World(config(n_pages=60, deterministic=True, record_wait_s=2.0))
    client = parked(world)
    turn = world.submit((*words(1, 30)[:20], 80, 81), "a", max_tokens=2)
    world.tick(1.9)
    assert world.core.statistics().turns["queued"] == 1
    world.tick(0.2)
    while world.clients[turn].ended is None:
        assert world.advance_but_records()
    assert report(world.clients[turn]).diverged_at == -1  # there was nothing to compare with
    assert world.core.statistics().counters["record_read_failures"] == {"deadline": 1}
    world.job("read_record")
    session = open_session(world, "a")
    assert [b.ids for b in session.branches] == [after(client), after(world.clients[turn])]
    world.settle()
    world.assert_quiet()


@pytest.mark.parametrize("reason", ["header", "payload", "io", "missing", "identity"])
def test_a_record_that_cannot_be_read_costs_the_history_and_no_chunk(reason: str) -> None:
    world = World(config(n_pages=60))
    client = parked(world)
    turn = world.submit(after(client, 5), "a", max_tokens=2)
    world.job("read_record", reason)
    world.run_to_end(turn)
    assert report(world.clients[turn]).disk_tokens == 35
    assert report(world.clients[turn]).computed_tokens == 2
    assert world.core.statistics().counters["record_read_failures"] == {reason: 1}


def test_one_bad_record_of_several_costs_one_branch() -> None:
    world = World(config(n_pages=100))
    world.ask(words(1, 20), "a", max_tokens=4, ignore_eos=True)
    world.ask((*words(1, 12), 80, 81), "a", max_tokens=4, ignore_eos=True)
    restart(world)
    kept, lost = records(world)
    world.ask_session("a")
    jobs = world.jobs("read_record")
    assert len(jobs) == 2
    world.job("read_record", "payload", 0)
    world.job("read_record")
    (branch,) = open_session(world, "a").branches
    assert branch.id in (kept.branch, lost.branch)


@pytest.mark.parametrize("n_left", [0, 1, 3])
def test_a_record_whose_chunks_are_partly_gone_resumes_at_the_longest_prefix_left(n_left: int) -> None:
    world = World(config(n_pages=60))
    client = parked(world)
    (record,) = records(world)
    assert world.store is not None
    for key in (*record.chunk_keys[n_left:], record.tail_key):
        assert key is not None
        del world.store.entries[key]
    back = world.ask(after(client, 5), "a", max_tokens=2)
    assert report(back).disk_tokens == 8 * n_left
    assert report(back).computed_tokens == 37 - 8 * n_left
    assert report(back).diverged_at == -1


def test_another_salt_of_the_tenant_sees_nothing_of_it() -> None:
    world = World(config(n_pages=60))
    parked(world)
    other = world.submit((*words(1, 20), 88), "a", secret=b"o" * 32, max_tokens=2)
    world.run_to_end(other)
    assert report(world.clients[other]).computed_tokens == 21
    assert report(world.clients[other]).diverged_at == -1  # there is nothing in its space that it could leave
    again = world.submit((*words(1, 12), 89), "a", secret=b"o" * 32, max_tokens=2)
    world.run_to_end(again)
    assert report(world.clients[again]).diverged_at == 12


def test_another_tenants_session_of_the_same_name_is_not_read() -> None:
    world = World(config(n_pages=60))
    parked(world)
    request = 77
    world.feed(ev.AskSession(world.now, request, "a", "somebody"))
    state = world.told[request]
    assert state is not None
    assert not state.known


def test_a_fork_of_a_session_on_disk_goes_on_from_its_records_and_shares_its_chunks() -> None:
    world = World(config(n_pages=100))
    client = parked(world)
    world.feed(ev.ForkSession(world.now, "a", "kid"))
    turn = world.submit((*after(client)[:33], 70, 71), "kid", max_tokens=2)
    assert world.clients[turn].ended is None
    assert len(world.jobs("read_record")) == 1
    world.run_to_end(turn)
    assert report(world.clients[turn]).diverged_at == 33
    assert report(world.clients[turn]).disk_tokens == 33
    mother = world.ask(after(client, 5), "a", max_tokens=2)
    assert report(mother).diverged_at == -1
    drain(world)
    assert {r.session for r in records(world)} == {"a", "kid"}


def test_a_session_closed_while_its_records_are_read_stays_closed() -> None:
    world = World(config(n_pages=60))
    parked(world)
    request = world.ask_session("a", True)
    world.feed(ev.CloseSession(world.now, "a"))
    world.settle()
    state = world.told[request]
    assert state is not None
    assert not state.known
    assert records(world) == []
    assert world.core.statistics().sessions == 0


@pytest.mark.parametrize("length", [7, 8, 29, 30, 32])
def test_the_same_prompt_again_ends_inside_a_stored_chunk(length: int) -> None:
    """P25: the answer went on in the prompt's last chunk, whose key names tokens that the prompt does not have. The branch
    knows them: all but the last token of the prompt comes from disk."""
    world = World(config(n_pages=60))
    client = parked(world, length=length)
    again = world.ask(after(client)[:length], "a", max_tokens=6, ignore_eos=True)
    assert report(again).disk_tokens == length - 1
    assert report(again).computed_tokens == 1
    assert again.ids == client.ids


@pytest.mark.parametrize("wish", [None, True])
def test_a_session_asked_for_in_the_tick_that_closed_it_is_a_new_one(wish: bool | None) -> None:
    """The order to forget its records is given, but not carried out yet: they must not come back."""
    world = World(config(n_pages=60))
    parked(world)
    world.core.take_in(ev.CloseSession(world.now, "a"))
    world.core.take_in(ev.AskSession(world.now, 9, "a", "", wish))
    world._follow(world.core.decide())
    assert world.jobs("read_record") == []
    assert world.told[9] == SessionState(known=bool(wish), pinned=bool(wish))
    world.settle()
    assert records(world) == []


def test_questions_beyond_the_bound_are_answered_with_what_is_known() -> None:
    world = World(config(n_pages=60))
    parked(world)
    requests = [world.ask_session("a") for _ in range(MAX_ASKS + 2)]
    assert [request in world.told for request in requests] == [False] * MAX_ASKS + [True] * 2
    world.settle()
    assert all(request in world.told for request in requests)


@pytest.mark.parametrize("dropped", [0, 2])
def test_deterministic_mode_knows_after_a_restart_which_calls_computed_what(dropped: int) -> None:
    """The KV of the fake model depends on the calls. Three turns; the client drops the end of each answer."""

    def play(restarts: bool) -> list[tuple[int, ...]]:
        cfg = config(n_pages=100, deterministic=True, deterministic_piece=8)
        world = World(cfg, model=FakeModel(vocab=31, shape_sensitive=True))
        history, answers = words(1, 19), []
        for turn in range(3):
            client = world.ask(history, "a", max_tokens=7, ignore_eos=True)
            answers.append(tuple(client.ids))
            if restarts:
                restart(world)
            elif turn:
                crowd(world, 6)
            history = (*client.spec.prompt, *client.ids[: len(client.ids) - dropped], 5, 6, 7)
            if restarts and turn:
                assert report(client).computed_tokens <= 3 + (dropped == 0)
        return answers

    assert play(True) == play(False)


GOOD = Record(
    tenant="", session="a", branch="0" * 16, ids=tuple(range(20)), boundary=12, kv_len=19, decoded=((12, 19),),
    space=b"s" * 8, chunk_keys=(b"k" * 32, b"l" * 32), tail_key=b"t" * 32,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"kv_len": 20}, {"kv_len": 0}, {"kv_len": 15}, {"kv_len": 16}, {"kv_len": 24}, {"boundary": 0}, {"boundary": 21},
        {"chunk_keys": (b"k" * 32,)}, {"tail_key": None}, {"decoded": ((12, 21),)}, {"decoded": ((12, 11),)},
        {"decoded": ((-1, 3),)}, {"decoded": ((12, 14), (13, 19))}, {"ids": (1, 2, 3)},
    ],
)  # fmt: skip
def test_a_record_whose_parts_do_not_fit_together_is_not_used(change: dict[str, object]) -> None:
    assert fits(GOOD, 8)
    changed = replace(GOOD, **change)  # type: ignore[arg-type]
    assert not fits(changed, 8) or change == {"kv_len": 20}  # 20 of 20 tokens, a tail of 4: odd, but it fits


def test_what_a_record_says_beside_the_branch_is_kept_as_far_as_it_still_stands() -> None:
    """Transcript, ttl and the keys of a later version outlive a turn; a span over ids that the client changed does not."""
    world = World(config(n_pages=60))
    client = parked(world)
    (record,) = records(world)
    assert world.store is not None
    spans = (Span("early", 3, 9), Span("late", 31, 35))
    told = replace(record, spans=spans, ttl_s=60, rest=b'{"later":[1]}')
    world.store.records.write(0, told, world.store.entries, full=False)
    world.ask((*after(client)[:32], 80, 81), "a", max_tokens=4, ignore_eos=True)
    restart(world)
    (now,) = records(world)
    assert now.branch == record.branch
    assert now.kv_len > record.kv_len
    assert (now.spans, now.ttl_s, now.rest) == (spans[:1], 60, told.rest)
