"""The device's copier and the registered slab, without a device: order, bounds, failures, pieces ready one by one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from kvalet.runtime.cuda_pool import CudaCopier, CudaPool, copy_error
from kvalet.runtime.cuda_slab import RegisteredSlab, piece_spans
from kvalet.runtime.errors import DeviceLostText, EngineError
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.plain_ops import PlainEvent, PlainOps
from kvalet.runtime.slab import Slab, SlabError

GEOMETRY = KVGeometry(2, 2, 64)
CPU = torch.device("cpu")
WAIT_S = 30.0


class Registry:
    """``HostMemory`` that notes what is registered. ``refuse_from``: calls from this one on get a status."""

    def __init__(self, refuse_from: int = 1 << 30) -> None:
        self.spans: dict[int, int] = {}
        self.calls, self.refuse_from = 0, refuse_from
        self.gate = threading.Event()
        self.gate.set()

    def register(self, address: int, length: int) -> int:
        self.calls += 1
        if self.calls > 1:
            assert self.gate.wait(WAIT_S)
        if self.calls >= self.refuse_from:
            return 2
        self.spans[address] = length
        return 0

    def unregister(self, address: int) -> int:
        del self.spans[address]
        return 0


class BrokenEvent(PlainEvent):
    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class BrokenOps(PlainOps):
    """Events fail once ``broken``. ``waits`` counts them."""

    broken = False
    waits = 0

    def event(self, *, blocking: bool = False) -> PlainEvent:
        assert blocking
        self.waits += 1
        return BrokenEvent() if self.broken else PlainEvent()


@contextmanager
def copies(n_slots: int = 4, limit: int = 1 << 20) -> Iterator[tuple[CudaPool, RegisteredSlab, CudaCopier, BrokenOps]]:
    pool = CudaPool(GEOMETRY, 40, CPU)
    pool.pages.copy_(torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(1)))
    slab, ops, registry = Slab(GEOMETRY, n_slots, populate=False), BrokenOps(CPU), Registry()
    registered = RegisteredSlab(slab, registry, piece_bytes=2 * slab.slot_bytes)
    copier = CudaCopier(pool, registered, ops, limit)
    yield pool, registered, copier, ops
    copier.close()
    registered.close()
    assert registry.spans == {}


def waited(start: Callable[[Callable[[str | None, float], None]], None]) -> str | None:
    done, answers = threading.Event(), list[str | None]()
    start(lambda error, ms: (answers.append(error), done.set())[-1])
    assert done.wait(WAIT_S)
    assert len(answers) == 1
    return answers[0]


def test_pages_go_out_and_come_back_elsewhere() -> None:
    with copies() as (pool, registered, copier, _):
        pages = [7, 8, 9, 3, 20, 19]
        before = pool.digest(pages, 90)
        assert waited(lambda done: copier.copy_out(pages, 3, 2, done, 90)) is None
        kept = registered.payload(3, GEOMETRY)
        assert torch.equal(kept[2], pool.bytes[7])
        tail = kept[7][: GEOMETRY.page_bytes].view(torch.bfloat16).view(2 * 2, 16, -1)
        assert tail[:, :10].any()
        assert not tail[:, 10:].any(), "what was behind the last token stays on the device"
        pool.poison(range(1, 40))
        moved = [1, 30, 2, 31, 4, 5]
        assert waited(lambda done: copier.copy_in(3, list(range(2, 8)), moved, done)) is None
        assert pool.digest(moved, 90) == before


@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_many_copies_each_answer_once_whatever_may_be_in_flight(limit: int) -> None:
    rng = random.Random(3)
    with copies(limit=limit) as (_, _, copier, _):
        answers: list[str | None] = []
        all_done = threading.Event()

        def done(error: str | None, ms: float) -> None:
            answers.append(error)
            if len(answers) == 60:
                all_done.set()

        for number in range(60):
            pages = rng.sample(range(1, 40), 4)
            if number % 2:
                copier.copy_out(pages, number % 4, 0, done)
            else:
                copier.copy_in(number % 4, [3, 1, 2, 0], pages, done)
        assert all_done.wait(WAIT_S)
        assert answers == [None] * 60


def test_a_wrong_page_fails_that_copy_and_a_lost_device_says_so() -> None:
    with copies() as (_, _, copier, ops):
        wrong = waited(lambda done: copier.copy_out([1], 99, 0, done))
        assert wrong is not None
        assert not isinstance(wrong, DeviceLostText)
        assert waited(lambda done: copier.copy_out([1], 0, 0, done)) is None
        ops.broken = True
        for start in (
            lambda done: copier.copy_out([1], 0, 0, done),
            lambda done: copier.copy_in(0, [0], [1], done),
        ):
            error = waited(start)
            assert isinstance(error, DeviceLostText)
            assert "illegal memory access" in error


def test_which_failures_lose_the_device() -> None:
    assert isinstance(copy_error(torch.AcceleratorError("CUDA error: unspecified launch failure", 719)), DeviceLostText)
    assert isinstance(copy_error(RuntimeError("whatever"), waited=True), DeviceLostText)
    assert not isinstance(copy_error(RuntimeError("shapes do not match")), DeviceLostText)
    assert not isinstance(copy_error(IndexError("no such slot")), DeviceLostText)


def test_copies_after_the_end_are_answered() -> None:
    with copies() as (_, _, copier, _):
        copier.close()
        assert waited(lambda done: copier.copy_out([1], 0, 0, done)) == "the copier is closed"
        copier.close()


def test_pieces_cover_the_slab_in_whole_slots() -> None:
    assert piece_spans(5, 100, 250) == [(0, 200), (200, 200), (400, 100)]
    assert piece_spans(2, 100, 10) == [(0, 100), (100, 100)]
    assert piece_spans(3, 100, 1000) == [(0, 300)]


def test_slots_are_usable_as_soon_as_their_piece_is_ready() -> None:
    """The second piece is held back: slots of the first serve, one of the second waits, progress is told in order."""
    registry, told = Registry(), list[tuple[int, int]]()
    registry.gate.clear()
    slab = Slab(GEOMETRY, 5, populate=False)
    registered = RegisteredSlab(
        slab, registry, piece_bytes=2 * slab.slot_bytes, progress=lambda ready, of: told.append((ready, of))
    )
    assert registered.ready_bytes == 2 * slab.slot_bytes
    assert registered.payload(1, GEOMETRY).shape == (GEOMETRY.chunk_pages, GEOMETRY.page_stride_bytes)
    got = threading.Event()
    waiting = threading.Thread(target=lambda: (registered.payload(4, GEOMETRY), got.set()))
    waiting.start()
    assert not got.wait(0.05)
    registry.gate.set()
    assert got.wait(WAIT_S)
    waiting.join(WAIT_S)
    assert [ready // slab.slot_bytes for ready, _ in told] == [2, 4, 5]
    assert {of for _, of in told} == {slab.n_bytes}
    assert sum(registry.spans.values()) == slab.n_bytes
    registered.close()
    registered.close()
    assert registry.spans == {}


def test_a_driver_that_refuses_the_first_piece_stops_the_start() -> None:
    with pytest.raises(EngineError, match="ulimit -l"):
        RegisteredSlab(Slab(GEOMETRY, 2, populate=False), Registry(refuse_from=1))


def test_a_later_piece_that_is_refused_is_slow_and_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    slab = Slab(GEOMETRY, 4, populate=False)
    registered = RegisteredSlab(slab, Registry(refuse_from=2), piece_bytes=slab.slot_bytes)
    registered.payload(3, GEOMETRY)[:] = 7
    assert registered.unregistered_bytes == 3 * slab.slot_bytes
    assert "could not be registered" in caplog.text
    registered.close()


def test_no_memory_for_a_later_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab(GEOMETRY, 3, populate=False)
    populate = Slab.populate

    def scarce(self: Slab, start: int, *rest: object) -> None:
        if start:
            raise SlabError("no memory")
        populate(self, start, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Slab, "populate", scarce)
    registered = RegisteredSlab(slab, Registry(), piece_bytes=slab.slot_bytes)
    registered.payload(2, GEOMETRY)
    assert registered.unregistered_bytes == 2 * slab.slot_bytes
    registered.close()
