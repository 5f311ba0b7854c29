"""Who goes first: fair reads, writes of a chain, breakers. Pure values, no threads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store.breaker import ReadBreaker, WriteBreaker
from kvalet.store.fairqueue import FairQueue
from kvalet.store.layout import file_name
from kvalet.store.writeboard import NEXT, Stage, Write, WriteBoard
from storekit import IDENTITY, chain


def drain(queue: FairQueue[str]) -> list[str]:
    out = []
    while (job := queue.take()) is not None:
        out.append(job)
    return out


def test_sessions_take_turns_inside_a_class() -> None:
    queue: FairQueue[str] = FairQueue(3)
    for i in range(4):
        queue.put(i, f"a{i}", session="a", klass=0)
    queue.put(10, "b0", session="b", klass=0)
    queue.put(11, "c0", session="c", klass=0)
    queue.put(12, "c1", session="c", klass=0)
    assert drain(queue) == ["a0", "b0", "c0", "a1", "c1", "a2", "a3"]


def test_a_smaller_class_goes_first_and_unknown_classes_are_clamped() -> None:
    queue: FairQueue[str] = FairQueue(3)
    queue.put(1, "background", session="a", klass=9)
    queue.put(2, "predicted", session="a", klass=1)
    queue.put(3, "waiting", session="b", klass=-1)
    assert queue.waiting(0)
    assert drain(queue) == ["waiting", "predicted", "background"]
    assert not queue.waiting(2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60))
def test_nothing_is_lost_or_given_twice(steps: list[tuple[int, int, bool]]) -> None:
    queue: FairQueue[int] = FairQueue(3)
    waiting: set[int] = set()
    for number, (session, klass, take) in enumerate(steps):
        if take:
            job = queue.take()
            assert (job is None) == (not waiting)
            waiting.discard(job if job is not None else -1)
        else:
            queue.put(number, number, session=str(session), klass=klass)
            waiting.add(number)
        assert len(queue) == len(waiting)
        assert set(queue.jobs()) == waiting
    for number in list(waiting)[::2]:
        assert queue.remove(number) == number
        assert queue.remove(number) is None
    assert set(drain_ints(queue)) == set(list(waiting)[1::2])


def drain_ints(queue: FairQueue[int]) -> list[int]:
    out = []
    while (job := queue.take()) is not None:
        out.append(job)
    return out


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=6))
def test_no_session_waits_longer_than_its_share(lengths: list[int]) -> None:
    """With k sessions in a class, a session's i-th job is among the first (i + 1) * k taken."""
    queue: FairQueue[tuple[int, int]] = FairQueue(1)
    number = 0
    for session, n in enumerate(lengths):
        for i in range(n):
            queue.put(number, (session, i), session=str(session), klass=0)
            number += 1
    for place in range(number):
        job = queue.take()
        assert job is not None
        assert place < (job[1] + 1) * len(lengths)


METAS = chain(b"s" * 32, 6)
FORK = chain(b"s" * 32, 2, seed=9, after=METAS[:2])


def write(job: int, meta: object, klass: int = 2) -> Write:
    assert hasattr(meta, "key")
    return Write(job, meta, file_name(meta, "00000000"), memoryview(b""), print, klass, 100, 1)


def board_of(n: int = 6) -> tuple[WriteBoard, list[Write]]:
    board = WriteBoard()
    writes = [write(i, METAS[i]) for i in range(n)]
    for one in writes:
        board.add(one)
    return board, writes


def test_a_child_is_published_only_after_its_parent_is_durable() -> None:
    board, writes = board_of(3)
    taken = [board.take() for _ in range(3)]
    assert taken == writes
    assert board.take() is None
    for one in (writes[2], writes[1]):
        assert board.written(one)
    assert board.take_ready() == []
    board.written(writes[0])
    assert board.take_ready() == [writes[0]]
    assert board.take_ready() == []
    board.durable(writes[0])
    assert board.take_ready() == [writes[1]]
    board.durable(writes[1])
    board.remove(writes[1])
    assert board.take_ready() == [writes[2]]


def test_a_failed_parent_takes_queued_written_and_running_descendants() -> None:
    board, writes = board_of(4)
    for _ in range(3):
        board.take()
    board.written(writes[1])
    over = board.fail(writes[0], "io")
    assert [(one.job, one.reason) for one in over] == [(0, "io"), (1, "ancestor"), (3, "ancestor")]
    assert writes[2].doomed == "ancestor"  # a worker has it, and will answer it
    assert not board.written(writes[2])
    assert [one.job for one in board.fail(writes[2], writes[2].doomed)] == [2]
    for one in writes:
        board.remove(one)
    assert len(board) == 0


def test_an_urgent_child_pulls_its_ancestors_forward() -> None:
    board = WriteBoard()
    others = [write(100 + i, meta) for i, meta in enumerate(chain(b"s" * 32, 3, seed=5))]
    for one in others:
        board.add(one)
    line = [write(0, METAS[0]), write(1, METAS[1]), write(2, METAS[2], klass=0)]
    for one in line:
        board.add(one)
    assert [board.take() for _ in range(6)] == [*line, *others]


def test_only_what_no_worker_has_is_cancelled() -> None:
    board, writes = board_of(3)
    board.take()
    assert board.remove_queued(0) is None
    writes[1].followers.append((50, print))
    assert board.remove_queued(1) is None
    assert board.remove_queued(2) is writes[2]
    assert board.remove_queued(2) is None
    assert board.remove_queued(999) is None


def test_illegal_transitions_raise() -> None:
    board, writes = board_of(1)
    with pytest.raises(AssertionError, match="->"):
        board.durable(writes[0])
    with pytest.raises(AssertionError, match=r"Stage\.QUEUED"):
        board.remove(writes[0])
    assert NEXT[Stage.DURABLE] == NEXT[Stage.FAILED] == ()


@pytest.mark.parametrize("seed", range(40))
def test_any_interleaving_ends_each_write_once_and_parents_first(seed: int) -> None:
    """Random workers, failures, cancels and commits on a tree of writes."""
    rng = random.Random(seed)
    board = WriteBoard()
    metas = [*METAS, *FORK]
    writes = {meta.key: write(i, meta, rng.randrange(3)) for i, meta in enumerate(metas)}
    todo, running, ended, durable = list(metas), [], [], {bytes(IDENTITY.digest)}
    for _ in range(400):
        step = rng.randrange(6)
        if step == 0 and todo:
            board.add(writes[todo.pop(0).key])
        elif step == 1 and (one := board.take()) is not None:
            running.append(one)
        elif step == 2 and running:
            one = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.15 or not board.written(one):
                ended += board.fail(one, one.doomed or "io")
        elif step == 3:
            for one in board.take_ready():
                assert one.meta.parent in durable, f"seed {seed}: child before parent"
                if rng.random() < 0.1:
                    ended += board.fail(one, "io")
                else:
                    board.durable(one)
                    durable.add(one.meta.key)
                    ended.append(one)
        elif step == 4 and rng.random() < 0.2 and (one := board.remove_queued(rng.randrange(len(metas)))) is not None:
            ended += board.fail(one, "cancelled")
    assert len(ended) == len(set(map(id, ended))), f"seed {seed}: answered twice"
    for one in ended:
        assert one.stage in (Stage.DURABLE, Stage.FAILED)
        board.remove(one)
    left = [one for one in board.close() if one not in ended]
    assert len(ended) + len(left) + len(running) + len(todo) == len(metas), f"seed {seed}"


def test_read_breaker() -> None:
    breaker = ReadBreaker(errors=3, window_s=60, open_s=30)
    for now in (0.0, 50.0, 100.0):
        breaker.failed(now)
    assert not breaker.is_open(100.0)  # three, but not within the window
    breaker.failed(105.0)
    assert breaker.is_open(105.0)
    assert breaker.is_open(134.9)
    assert not breaker.is_open(135.1)
    breaker.failed(136.0)
    assert not breaker.is_open(136.0)  # a clean record afterwards
    assert breaker.opened == 1


def test_write_breaker() -> None:
    breaker = WriteBreaker(probe_every_s=5)
    assert not breaker.probe_due(1e9)
    breaker.failed(10.0, "EIO")
    breaker.failed(11.0, "EROFS")
    assert (breaker.is_open, breaker.opened, breaker.why) == (True, 1, "EROFS")
    assert not breaker.probe_due(15.9)
    assert breaker.probe_due(16.0)
    breaker.probe_failed(16.0, "EIO")
    assert not breaker.probe_due(20.9)
    breaker.probe_passed()
    assert not breaker.is_open
