"""The simulation can fail: each named defect, patched in, is found within a bounded number of walks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvalet.runtime.fake import FakeEngine
from kvalet.runtime.fake_model import SEED_KV, TOKEN_BYTES
from kvalet.sched import lifecycle, persist, restore, spill
from kvalet.sched import matching as matching_module
from kvalet.sched.board import Board
from kvalet.sched.chunks import ChunkMap
from kvalet.sched.commands import CopyIn, CopyOut
from kvalet.sched.events import CopyDone
from kvalet.sched.session import Turn
from kvalet.store.ids import chunk_key
from schedsim import walk
from schedworld import World, config

MAX_WALKS = 160
EVENTS = 400
DETECTED = (AssertionError, RuntimeError, LookupError)  # not TypeError: a patch that does not fit proves nothing
"""A wrong answer or invariant, a defect noticed by core or engine, something missing."""


def assert_found() -> None:
    for seed in range(MAX_WALKS):
        try:
            walk(seed, EVENTS)
        except DETECTED:
            return
    raise AssertionError(f"{MAX_WALKS} walks did not notice")


def test_without_a_mutant_the_same_walks_pass() -> None:
    for seed in range(10):
        walk(seed, EVENTS)


def test_key_without_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    def key_after(self: ChunkMap, secret: bytes, parent: Any, ids: tuple[int, ...]) -> Any:
        return chunk_key(secret, self._config.identity, ids)

    monkeypatch.setattr(ChunkMap, "key_after", key_after)
    assert_found()


def test_stale_offset_at_a_page_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a new page reads its predecessor at the offset of its own."""

    def read(self: FakeEngine, state: Any, row: Any) -> None:
        size = self.pool.page_tokens
        for at in range(row.start, row.start + row.n):
            token = state.ids[at] if at < len(state.ids) else 0
            page = state.pages[at // size if at % size == 0 else (at - 1) // size]
            previous = SEED_KV if at == 0 else self._read(page, (at - 1) % size)
            value = self.model.kv(previous, token, (row.decode, row.start, row.n))
            offset = at % size * TOKEN_BYTES
            self.pool.pages[state.pages[at // size]][offset : offset + TOKEN_BYTES] = value.to_bytes(TOKEN_BYTES, "little")

    monkeypatch.setattr(FakeEngine, "_feed", read)
    assert_found()


def test_page_keyed_one_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page enters the index when its last offset is not written yet."""
    real = lifecycle.index_computed

    def early(board: Board, turn: Turn, upto: int) -> None:
        real(board, turn, min(upto + 1, len(turn.ids), len(turn.table) * board.config.page_tokens))

    monkeypatch.setattr(lifecycle, "index_computed", early)
    assert_found()


def swap_pages(real: Callable[..., CopyOut]) -> Callable[..., CopyOut]:
    def swapped(transfer: Any, pages: tuple[Any, ...], slot: Any, **more: Any) -> CopyOut:
        return real(transfer, (pages[1], pages[0], *pages[2:]) if len(pages) > 1 else pages, slot, **more)

    return swapped


@pytest.mark.parametrize("module", [spill, persist])
def test_two_pages_swapped(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(module, "CopyOut", swap_pages(CopyOut))
    assert_found()


def test_restore_one_page_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(transfer: Any, slot: Any, places: tuple[int, ...], pages: tuple[Any, ...]) -> CopyIn:
        return CopyIn(transfer, slot, places[:-1], pages[:-1])

    monkeypatch.setattr(restore, "CopyIn", short)
    assert_found()


def test_read_before_the_copys_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core hears that a copy is done when it has only begun."""

    def at_once(self: World, command: CopyIn) -> None:
        self.copier.copy_in(command.slot, command.slot_pages, command.pages, lambda error, ms: None)
        self.inbox.append(lambda now: CopyDone(now, command.transfer, 0.0))

    monkeypatch.setattr(World, "_do_CopyIn", at_once)
    assert_found()


def test_page_reused_before_its_copy_out_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: World, command: CopyOut) -> None:
        self.copier.copy_out(command.pages, command.slot, command.first_page, lambda error, ms: None)
        self.inbox.append(lambda now: CopyDone(now, command.transfer, 0.0))

    monkeypatch.setattr(World, "_do_CopyOut", at_once)
    assert_found()


def test_a_match_one_token_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    real = matching_module.resident_match

    def longer(board: Board, turn: Turn, limit: int) -> Any:
        match = real(board, turn, limit)
        if match.partial is not None and match.partial[1] < len(match.partial[0].ids) and match.resident_tokens < limit:
            match.partial = (match.partial[0], match.partial[1] + 1)
        return match

    monkeypatch.setattr(lifecycle, "resident_match", longer)
    assert_found()


def cancelled_while_its_step_runs(n_prompt: int) -> None:
    """Its pages are wanted at once, by a session that comes back from RAM before the step is through."""
    sizes = config(lag=1, n_pages=17, ram_slots=8, staging_slots=0, low_watermark=0.0, high_watermark=0.0)
    world = World(sizes, disk=False)
    first = world.ask(tuple(range(1, 31)), "a", max_tokens=3)
    world.ask(tuple(range(40, 92)), "b", max_tokens=2)
    world.settle()
    running = world.submit(tuple(range(20, 20 + n_prompt)), "c", max_tokens=20)
    while len(world.clients[running].ids) < 2:
        assert world.advance()
    assert world.plans
    world.cancel(running)
    back = world.submit((*range(1, 31), *first.ids, 99), "a", max_tokens=4)
    while world.copy(True) or world.copy(False):
        pass
    world.run_to_end(back)
    world.settle()


def test_steps_in_flight_lease_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that ends while its step runs gives its pages away at once. Random walks meet this once in a hundred."""
    real = lifecycle.release

    def careless(board: Board, turn: Turn, upto: int) -> Any:
        steps, board.steps = board.steps, []
        try:
            return real(board, turn, upto)
        finally:
            board.steps = steps

    for n_prompt in range(13, 21):
        cancelled_while_its_step_runs(n_prompt)
    monkeypatch.setattr(lifecycle, "release", careless)
    with pytest.raises(AssertionError, match="answered"):
        [cancelled_while_its_step_runs(n_prompt) for n_prompt in range(13, 21)]
