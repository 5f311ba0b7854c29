"""The queues, the write board and the breakers against plain models over any sequence of calls. Pure values, no threads."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store.breaker import ReadBreaker, WriteBreaker
from kvalet.store.config import KLASSES
from kvalet.store.fairqueue import FairQueue
from kvalet.store.ids import ChunkMeta
from kvalet.store.layout import file_name
from kvalet.store.writeboard import NEXT, Stage, Write, WriteBoard
from storekit import chain

SECRET = b"s" * 32
TRUNK = chain(SECRET, 5)
BRANCH = chain(SECRET, 3, seed=9, after=TRUNK[:2])
TREE = [*TRUNK, *BRANCH]


class PlainQueue:
    """One list of (id, session) per class, and the sessions of each class in the order of their turns."""

    def __init__(self) -> None:
        self.waiting: list[list[tuple[int, str]]] = [[] for _ in range(KLASSES)]
        self.turns: list[list[str]] = [[] for _ in range(KLASSES)]

    def put(self, job: int, session: str, klass: int) -> None:
        klass = min(max(klass, 0), KLASSES - 1)
        self.waiting[klass].append((job, session))
        if session not in self.turns[klass]:
            self.turns[klass].append(session)

    def take(self) -> int | None:
        for waiting, turns in zip(self.waiting, self.turns, strict=True):
            if waiting:
                job, session = next(item for item in waiting if item[1] == turns[0])
                turns.append(turns.pop(0))
                self._out(waiting, turns, job, session)
                return job
        return None

    def remove(self, job: int) -> int | None:
        for waiting, turns in zip(self.waiting, self.turns, strict=True):
            for number, session in list(waiting):
                if number == job:
                    self._out(waiting, turns, job, session)
                    return job
        return None

    def _out(self, waiting: list[tuple[int, str]], turns: list[str], job: int, session: str) -> None:
        waiting.remove((job, session))
        if all(other != session for _, other in waiting):
            turns.remove(session)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pptr"), st.integers(0, 3), st.integers(-1, KLASSES), st.integers(0, 40)), max_size=50)
)
def test_the_fair_queue_gives_exactly_the_order_of_the_model(steps: list[tuple[str, int, int, int]]) -> None:
    queue: FairQueue[int] = FairQueue(KLASSES)
    model = PlainQueue()
    for number, (step, session, klass, any_job) in enumerate(steps):
        if step == "p":
            queue.put(number, number, session=str(session), klass=klass)
            model.put(number, str(session), klass)
        elif step == "t":
            assert queue.take() == model.take()
        else:
            assert queue.remove(any_job) == model.remove(any_job)
        assert len(queue) == sum(map(len, model.waiting))
        for bound in range(KLASSES):
            assert queue.waiting(bound) is any(model.waiting[: bound + 1])
    rest = [queue.take() for _ in range(len(queue) + 1)]
    assert rest == [model.take() for _ in rest]
    assert rest[-1] is None


def write(job: int, meta: ChunkMeta, klass: int) -> Write:
    return Write(job, meta, file_name(meta, "00000000"), memoryview(b""), None, klass, 100, 1)


def lineage(board: WriteBoard, one: Write) -> list[Write]:
    """Its ancestors on the board."""
    found: list[Write] = []
    parent = board.get(one.meta.parent)
    while parent is not None:
        found.append(parent)
        parent = board.get(parent.meta.parent)
    return found


klasses = st.integers(0, KLASSES - 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(klasses, min_size=len(TREE), max_size=len(TREE)), st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, len(TREE) - 1), klasses), max_size=6),
)  # fmt: skip
def test_no_queued_write_is_less_urgent_than_what_waits_for_it(
    wanted: list[int], taken: int, raises: list[tuple[int, int]]
) -> None:
    """Whatever the classes at the start, whoever is raised later, and however many a worker has already."""
    board = WriteBoard()
    writes = [write(i, meta, klass) for i, (meta, klass) in enumerate(zip(TREE, wanted, strict=True))]
    for index, one in enumerate(writes):
        board.add(one)
        if index < taken:
            assert board.take() is not None
    for index, klass in raises:
        board.raise_klass(writes[index], klass)
        assert writes[index].klass <= klass
    for one in writes:
        assert one.klass <= wanted[one.job], "nothing becomes less urgent"
        assert all(above.klass <= one.klass for above in lineage(board, one))
    order = []
    while board.waiting():
        assert board.most_urgent() == min(one.klass for one in writes if one.stage is Stage.QUEUED)
        one = board.take()
        assert one is not None
        order.append(one.klass)
    assert order == sorted(order)
    assert board.most_urgent() == KLASSES
    assert board.unfinished() == len(TREE)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=len(TREE), max_size=len(TREE)), st.integers(0, len(TREE)))
def test_close_and_fail_answer_each_write_once(done: list[bool], fails: int) -> None:
    """A write ends by ``fail``, by ``close``, or in the worker or committer that owns it: exactly one of them."""
    board = WriteBoard()
    writes = [write(i, meta, 2) for i, meta in enumerate(TREE)]
    for one in writes:
        board.add(one)
    while board.take() is not None:
        pass
    for one, is_written in zip(writes, done, strict=True):
        if is_written:
            board.written(one)
    wave = board.take_ready()
    assert [one.meta.parent for one in wave] in ([], [TREE[0].parent])
    over = list(board.fail(writes[fails], "io")) if fails < len(TREE) and writes[fails].stage is not Stage.PUBLISHING else []
    over += board.close()
    assert board.close() == [], "closing twice answers nobody again"
    for one in writes:
        if one.stage is Stage.WRITING:
            assert one.doomed in ("closed", "ancestor")
            assert not board.written(one), "the worker must unlink it"
            over += board.fail(one, one.doomed)
        elif one.stage is Stage.PUBLISHING:
            over += board.fail(one, "io")
    assert sorted(one.job for one in over) == list(range(len(TREE)))
    assert {one.reason for one in over} <= {"io", "ancestor", "closed"}
    for one in writes:
        board.remove(one)
    assert (len(board), board.unfinished(), list(board.writes())) == (0, 0, [])
    assert all(board.of_job(one.job) is None for one in writes)


def test_the_life_of_a_write_has_one_end_and_no_way_back() -> None:
    assert set(NEXT) == set(Stage)
    reached = {Stage.QUEUED}
    for _ in Stage:
        reached |= {after for stage in reached for after in NEXT[stage]}
    assert reached == set(Stage)
    order = list(NEXT)
    assert all(order.index(after) > order.index(stage) for stage in NEXT for after in NEXT[stage])
    assert {stage for stage in Stage if not NEXT[stage]} == {Stage.DURABLE, Stage.FAILED}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.integers(1, 4))
def test_the_read_breaker_opens_for_that_many_failures_in_the_window(steps: list[tuple[int, bool]], errors: int) -> None:
    breaker = ReadBreaker(errors, window_s=10.0, open_s=20.0)
    now, until, opened = 0.0, float("-inf"), 0
    record: list[float] = []
    for later, fails in steps:
        now += later
        if fails:
            breaker.failed(now)
            record = [*record, now]
            if len([at for at in record if now - at <= 10.0]) >= errors:
                until, record, opened = now + 20.0, [], opened + 1
        assert breaker.is_open(now) is (now < until)
        assert breaker.opened == opened


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["fail", "probe", "wait"]), st.booleans()), max_size=40))
def test_the_write_breaker_is_probed_in_time_and_only_a_probe_closes_it(steps: list[tuple[int, str, bool]]) -> None:
    breaker = WriteBreaker(5.0)
    now, last, is_open, opened = 0.0, 0.0, False, 0
    for later, step, passes in steps:
        now += later
        assert breaker.probe_due(now) is (is_open and now - last >= 5.0)
        if step == "fail":
            breaker.failed(now, "EIO")
            opened += not is_open
            is_open, last = True, now
        elif step == "probe" and breaker.probe_due(now):
            if passes:
                breaker.probe_passed()
                is_open = False
            else:
                breaker.probe_failed(now, "EROFS")
                assert breaker.why == "EROFS"
                last = now
        assert (breaker.is_open, breaker.opened) == (is_open, opened)
