"""The CPU copier: bytes, order, exactly one ``done`` per copy, whatever happens."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.plan import PageId, SlotId
from kvalet.runtime.slab import Slab
from kvalet.runtime.transfer import CLOSED, Copier, CopierBusy

GEOMETRY = KVGeometry(n_layers=2, n_kv_heads=1, head_dim=8)
STRIDE = GEOMETRY.page_stride_bytes
N_PAGES, N_SLOTS = 40, 6
LIMIT_S = 20.0


class Pool:
    """Pages in ordinary memory; a gate in ``page_view`` can hold a copy up."""

    def __init__(self, stride: int = STRIDE) -> None:
        self.bytes = np.random.default_rng(3).integers(0, 256, (N_PAGES, stride), dtype=np.uint8)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def page_view(self, page: int) -> memoryview:
        self.entered.set()
        assert self.gate.wait(LIMIT_S)
        return memoryview(self.bytes[page])


class Results:
    """Collects ``done`` calls by name, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, str | None, float, str]] = []
        self._changed = threading.Condition()

    def done(self, name: object):  # type: ignore[no-untyped-def]
        def call(error: str | None, copy_ms: float) -> None:
            with self._changed:
                self.calls.append((name, error, copy_ms, threading.current_thread().name))
                self._changed.notify_all()

        return call

    def wait(self, n: int) -> list[tuple[object, str | None]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= n, timeout=LIMIT_S), self.calls
        return [(name, error) for name, error, _, _ in self.calls]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(GEOMETRY, N_SLOTS)
    yield slab
    slab.close()


@pytest.fixture
def copier(pool: Pool, slab: Slab) -> Iterator[Copier]:
    copier = Copier(pool, slab, GEOMETRY)
    yield copier
    pool.gate.set()
    copier.close()


def pages(*numbers: int) -> tuple[PageId, ...]:
    return tuple(PageId(number) for number in numbers)


def in_slot(slab: Slab, slot: int, place: int) -> bytes:
    return bytes(slab.payload(slot)[place * STRIDE : (place + 1) * STRIDE])


def test_pages_go_out_and_come_back(pool: Pool, slab: Slab, copier: Copier) -> None:
    before = pool.bytes.copy()
    results = Results()
    copier.copy_out(pages(7, 3, 30), SlotId(2), 4, results.done("out"))
    assert results.wait(1) == [("out", None)]
    assert [in_slot(slab, 2, place) for place in (4, 5, 6)] == [before[page].tobytes() for page in (7, 3, 30)]
    assert not bytes(slab.view(2)[: 4096 + 4 * STRIDE]).strip(b"\0"), "header and other pages are not touched"
    assert not in_slot(slab, 2, 7).strip(b"\0")
    pool.bytes[:] = 0xEE
    copier.copy_in(SlotId(2), [6, 4], pages(11, 12), results.done("in"))
    assert results.wait(2)[1] == ("in", None)
    assert np.array_equal(pool.bytes[11], before[30])
    assert np.array_equal(pool.bytes[12], before[7])
    assert (np.delete(pool.bytes, [11, 12], axis=0) == 0xEE).all()


def test_room_behind_the_last_token_is_zeroed_in_the_slot_only(pool: Pool, slab: Slab, copier: Copier) -> None:
    """Stale KV in a tail's last page is somebody else's: it must not leave the pool."""
    tokens = GEOMETRY.page_tokens
    before = pool.bytes.copy()
    results = Results()
    copier.copy_out(pages(7, 3), SlotId(0), 0, results.done("tail"), n_tokens=tokens + 5)
    copier.copy_out(pages(7, 3), SlotId(1), 0, results.done("full"), n_tokens=2 * tokens)
    results.wait(2)
    assert np.array_equal(pool.bytes, before)
    assert in_slot(slab, 0, 0) == before[7].tobytes()
    assert [in_slot(slab, 1, place) for place in (0, 1)] == [before[7].tobytes(), before[3].tobytes()]
    by_token = np.frombuffer(in_slot(slab, 0, 1), dtype=np.uint8)[: GEOMETRY.page_bytes].reshape(
        -1, tokens, GEOMETRY.page_bytes // tokens // GEOMETRY.n_layers // 2
    )
    expected = before[3][: GEOMETRY.page_bytes].reshape(by_token.shape)
    assert np.array_equal(by_token[:, :5], expected[:, :5])
    assert not by_token[:, 5:].any()


def test_each_direction_is_first_in_first_out_on_its_own_thread(pool: Pool, copier: Copier) -> None:
    results = Results()
    for number in range(50):
        copier.copy_out(pages(number % N_PAGES), SlotId(0), number % GEOMETRY.chunk_pages, results.done(("out", number)))
        copier.copy_in(SlotId(1), [0], pages(number % N_PAGES), results.done(("in", number)))
    results.wait(100)
    for direction in ("out", "in"):
        names = [name for name, *_ in results.calls if name[0] == direction]  # type: ignore[index]
        assert names == [(direction, number) for number in range(50)]
    threads = {name[0]: thread for name, _, _, thread in results.calls}  # type: ignore[index]
    assert threads == {"out": "kvalet-copy-out", "in": "kvalet-copy-in"}
    assert all(copy_ms >= 0 for _, _, copy_ms, _ in results.calls)


@pytest.mark.parametrize(
    ("slot", "places", "page_ids", "error"),
    [
        (0, [GEOMETRY.chunk_pages], [1], "outside a slot"),
        (0, [-1], [1], "outside a slot"),
        (N_SLOTS, [0], [1], "outside the slab"),
        (0, [0], [N_PAGES], "IndexError"),
        (0, [0], [-1], "outside the pool"),
        (0, [0, 1], [1], "2 pages of the slot for 1"),
        (0, [0, GEOMETRY.chunk_pages], [1, 2], "outside a slot"),
    ],
)
def test_a_wrong_copy_fails_alone_and_writes_nothing(
    pool: Pool, copier: Copier, slot: int, places: list[int], page_ids: list[int], error: str
) -> None:
    before = pool.bytes.copy()
    results = Results()
    copier.copy_in(SlotId(slot), places, pages(*page_ids), results.done("wrong"))
    copier.copy_in(SlotId(0), [0], pages(5), results.done("right"))
    (_, message), right = results.wait(2)
    assert message is not None
    assert error in message
    assert right == ("right", None)
    assert np.array_equal(np.delete(pool.bytes, 5, axis=0), np.delete(before, 5, axis=0))


def test_a_pool_of_another_page_size_is_an_error(slab: Slab) -> None:
    copier = Copier(Pool(stride=STRIDE + 1), slab, GEOMETRY)
    results = Results()
    copier.copy_out(pages(1), SlotId(0), 0, results.done("out"))
    ((_, message),) = results.wait(1)
    assert message is not None
    assert f"not {STRIDE}" in message
    copier.close()


def test_close_fails_what_waits_and_finishes_what_runs(pool: Pool, slab: Slab, copier: Copier) -> None:
    results = Results()
    pool.gate.clear()
    for number in range(5):
        copier.copy_out(pages(number), SlotId(0), number, results.done(number))
    assert pool.entered.wait(LIMIT_S)
    closer = threading.Thread(target=copier.close)
    closer.start()
    assert not results.calls
    while not copier._out._closed:  # set before close waits for the running copy, which the gate holds
        closer.join(timeout=0.01)
    pool.gate.set()
    closer.join(timeout=LIMIT_S)
    assert not closer.is_alive()
    assert results.wait(5) == [(0, None), *((number, CLOSED) for number in range(1, 5))]
    assert in_slot(slab, 0, 0) == pool.bytes[0].tobytes()
    copier.copy_in(SlotId(0), [0], pages(1), results.done("late"))
    assert results.wait(6)[5] == ("late", CLOSED)
    copier.close()
    assert len(results.calls) == 6


def test_a_full_queue_refuses_and_the_rest_goes_on(pool: Pool, slab: Slab) -> None:
    copier = Copier(pool, slab, GEOMETRY, queue_limit=2)
    results = Results()
    pool.gate.clear()
    copier.copy_out(pages(0), SlotId(0), 0, results.done("running"))
    assert pool.entered.wait(LIMIT_S)
    for number in range(2):
        copier.copy_out(pages(1), SlotId(0), 1, results.done(number))
    with pytest.raises(CopierBusy, match="2 copies are waiting"):
        copier.copy_out(pages(2), SlotId(0), 2, results.done("refused"))
    pool.gate.set()
    assert results.wait(3) == [("running", None), (0, None), (1, None)]
    copier.close()
    assert len(results.calls) == 3


def test_a_callback_that_fails_ends_nothing(copier: Copier, caplog: pytest.LogCaptureFixture) -> None:
    def broken(error: str | None, copy_ms: float) -> None:
        raise RuntimeError("the scheduler's own fault")

    results = Results()
    copier.copy_out(pages(1), SlotId(0), 0, broken)
    copier.copy_out(pages(2), SlotId(0), 1, results.done("next"))
    assert results.wait(1) == [("next", None)]
    assert "done callback failed" in caplog.text


def test_a_callback_may_close_the_copier(pool: Pool, slab: Slab) -> None:
    copier = Copier(pool, slab, GEOMETRY)
    closed = threading.Event()

    def close(error: str | None, copy_ms: float) -> None:
        copier.close()
        closed.set()

    copier.copy_out(pages(1), SlotId(0), 0, close)
    assert closed.wait(LIMIT_S)


def test_the_interpreter_lock_is_free_while_bytes_move() -> None:
    """The interpreter would not switch threads by itself for a minute; the copy has to let go, and this thread then sees the
    copy still unfinished: once in many tries, for on a busy machine it may be woken too late to see it."""
    large = KVGeometry(n_layers=64, n_kv_heads=32, head_dim=128)
    big_slab, results = Slab(large, 1), Results()
    pool = Pool(stride=1)
    pool.bytes = np.ones((1, large.page_stride_bytes), dtype=np.uint8)
    copier = Copier(pool, big_slab, large)
    interval = sys.getswitchinterval()
    unfinished = False
    for tries in range(1, 101):
        pool.entered.clear()
        sys.setswitchinterval(60.0)
        try:
            copier.copy_out(pages(0), SlotId(0), 0, results.done("out"))
            assert pool.entered.wait(LIMIT_S)
            unfinished = len(results.calls) < tries
        finally:
            sys.setswitchinterval(interval)
        results.wait(tries)
        if unfinished:
            break
    copier.close()
    assert unfinished
