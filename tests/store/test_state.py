"""Running state in the store (kind 3), with a toy recurrent engine: missing, damaged or of another boundary, it shortens the
prefix that is used and is never mixed with another (fault plan R3)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damagekit import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store import header, layout, reading
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.header import Refused
from kvalet.store.ids import ChunkKey, ChunkMeta, StatePart, state_key
from kvalet.store.usable import usable_boundary
from recordkit import RecordRig, state_bytes, state_meta
from storekit import CHUNK_TOKENS, FILE_BYTES, slot
from toyrecurrent import Toy, toy

END = 3 * CHUNK_TOKENS + 9


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[RecordRig]:
    with RecordRig(tmp_path / "s") as opened:
        yield opened
        opened.quiet()


def path_of(rig: RecordRig, meta: ChunkMeta) -> Path:
    (found,) = (rig.directory / layout.STATES / meta.key.hex()[:2]).glob(f"{meta.key.hex()}.*")
    return found


@pytest.mark.parametrize("parts", [1, 3])
def test_everything_there_goes_on_at_the_end(rig: RecordRig, parts: int) -> None:
    """The positive control, with the state in one piece and in three."""
    first = toy(rig, parts=parts)
    cold = first.prefill()
    first.save([0, 1, 2, 3])
    again = toy(rig, parts=parts)
    assert again.resume() == END
    assert again.prefill() == cold
    assert (again.computed, again.reasons) == (0, [])


def delete(rig: RecordRig, one: Toy) -> None:
    path_of(rig, one.state_metas(one.metas[3])[-1]).unlink()


def damage(rig: RecordRig, one: Toy) -> None:
    path = path_of(rig, one.state_metas(one.metas[3])[-1])
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES + 100] ^= 1
    path.write_bytes(data)


def cut_short(rig: RecordRig, one: Toy) -> None:
    os.truncate(path_of(rig, one.state_metas(one.metas[3])[-1]), BLOCK_BYTES + 1)


def of_another_boundary(rig: RecordRig, one: Toy) -> None:
    """The state after two chunks stands where the one at the end should be: a good file under a wrong name."""
    wrong, right = (path_of(rig, one.state_metas(one.metas[i])[-1]) for i in (1, 3))
    right.write_bytes(wrong.read_bytes())


def of_another_part(rig: RecordRig, one: Toy) -> None:
    metas = one.state_metas(one.metas[3])
    path_of(rig, metas[-1]).write_bytes(path_of(rig, metas[0]).read_bytes())


def chunk_before_it(rig: RecordRig, one: Toy) -> None:
    flip(rig.path(one.metas[3]), BLOCK_BYTES)


FAULTS: dict[str, tuple[Callable[[RecordRig, Toy], None], str]] = {
    "missing": (delete, "missing"),
    "damaged": (damage, "payload"),
    "cut short": (cut_short, "size"),
    "of another boundary": (of_another_boundary, "key"),
    "its last piece is damaged": (chunk_before_it, "payload"),
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_state_falls_to_the_boundary_before_it(rig: RecordRig, name: str, parts: int) -> None:
    """Whatever is wrong at the end, the state two chunks in is used, and the tokens are those of a cold run."""
    fault, reason = FAULTS[name]
    first = toy(rig, parts=parts)
    cold = first.prefill()
    first.save([1, 3])
    fault(rig, first)
    again = toy(rig, parts=parts)
    assert again.resume() == 2 * CHUNK_TOKENS
    assert reason in again.reasons
    assert again.prefill() == cold
    assert again.computed == END - 2 * CHUNK_TOKENS


def test_parts_are_not_exchanged(rig: RecordRig) -> None:
    first = toy(rig, parts=2)
    cold = first.prefill()
    first.save([0, 3])
    of_another_part(rig, first)
    again = toy(rig, parts=2)
    assert (again.resume(), again.prefill(), "key" in again.reasons) == (CHUNK_TOKENS, cold, True)


@pytest.mark.parametrize("name", FAULTS)
def test_with_no_earlier_state_all_is_computed(rig: RecordRig, name: str) -> None:
    first = toy(rig)
    cold = first.prefill()
    first.save([3, 1] if name == "of another boundary" else [3])
    FAULTS[name][0](rig, first)
    if name == "of another boundary":
        path_of(rig, first.state_metas(first.metas[1])[0]).unlink()
    again = toy(rig)
    assert again.resume() == 0
    assert again.prefill() == cold
    assert again.computed == END


def test_chunks_without_any_state_are_worth_nothing(rig: RecordRig) -> None:
    first = toy(rig)
    cold = first.prefill()
    first.save([])
    again = toy(rig)
    assert (again.resume(), again.prefill(), again.computed) == (0, cold, END)


def test_a_state_follows_its_piece_onto_the_disk(rig: RecordRig) -> None:
    """Closed under ancestors, also behind a tail that is only in flight; the tail is not evicted from under it."""
    metas = rig.chain(1, tail=5)
    state = state_meta(rig.secret, metas[-1], 100)
    assert rig.put_state(state, state_bytes(state)) == "ancestor"
    jobs = [rig.submit_write(meta) for meta in metas] + [rig.submit_state(state, state_bytes(state))]
    assert {job: result.reason for job, result in rig.settle_all(3).items()} == dict.fromkeys(jobs, "")
    assert rig.get_state(state) == ("", state_bytes(state))
    assert rig.store.has(state.key)
    books = rig.store._state.books
    with rig.store._state.lock:
        victims = books.evict(1)
        assert victims is not None
        assert [entry.file.folder for entry in victims] == [layout.STATES]
        books.dying_bytes -= victims[0].n_bytes
        path_of(rig, state).unlink()


def test_states_outlive_a_restart(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s") as rig:
        first = toy(rig, parts=2)
        cold = first.prefill()
        first.save([2, 3])
    with RecordRig(tmp_path / "s") as rig:
        again = toy(rig, parts=2)
        assert (again.resume(), again.prefill(), again.computed) == (END, cold, 0)
        rig.quiet()


def test_a_slot_too_small_for_the_state_is_refused(rig: RecordRig) -> None:
    metas = rig.chain(1)
    rig.write(metas)
    state = state_meta(rig.secret, metas[0], FILE_BYTES)
    rig.store.write(99, state, slot(FILE_BYTES), rig.done.put, klass=2)
    assert rig.settle().reason == "internal"
    assert rig.put_state(state, state_bytes(state)) == ""
    rig.submit_read(state, slot(FILE_BYTES))
    assert rig.settle().reason == "internal"


def test_every_field_of_a_state_is_compared(rig: RecordRig) -> None:
    metas = rig.chain(2)
    state = state_meta(rig.secret, metas[1], 5000, 1, 2)
    home = rig.store._state.home
    data = bytes(home.geometry.bytes_of(state) - BLOCK_BYTES)
    image = memoryview(header.pack(home, state, header.digest(data), 0) + data)
    assert reading.verify(home, state, image) is None
    other = state_key(rig.secret, bytes(metas[0].key))
    for field, change in {
        "kind": {"state": None, "ids": metas[1].ids, "n_pages": 2},
        "key": {"key": other},
        "parent": {"parent": bytes(metas[0].key)},
        "ordinal": {"ordinal": 1},
        "first_token": {"first_token": CHUNK_TOKENS},
        "payload_len": {"state": StatePart(9000, 1, 2)},
        "state_bytes": {"state": StatePart(4999, 1, 2)},
        "part": {"state": StatePart(5000, 0, 2)},
        "parts": {"state": StatePart(5000, 1, 3)},
    }.items():
        refused = reading.verify(home, dataclasses.replace(state, **change), image)  # type: ignore[arg-type]
        assert isinstance(refused, Refused), field
        assert (refused.field, refused.reason) == (field, "size" if field == "payload_len" else "key")


@pytest.mark.parametrize("part", [StatePart(0), StatePart(5, 1, 1), StatePart(5, -1, 1)])
def test_an_impossible_part_is_not_written(rig: RecordRig, part: StatePart) -> None:
    state = dataclasses.replace(state_meta(rig.secret, rig.chain(1)[0], 5), state=part)
    with pytest.raises(ValueError, match="a state has bytes"):
        header.pack(rig.store._state.home, state, bytes(16), 0)


KEYS = {position: bytes([position]) * 32 for position in range(1, 6)}


def plain(ends: dict[int, bytes], verified: list[ChunkMeta]) -> int:
    """The definition, word by word."""
    for position in sorted(ends, reverse=True):
        here = [m.state for m in verified if m.first_token == position and m.parent == ends[position]]
        for parts in {state.parts for state in here if state}:
            if {state.part for state in here if state and state.parts == parts} == set(range(parts)):
                return position
    return 0


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2)), max_size=12),
)
def test_the_usable_boundary_is_the_deepest_whole_state_on_verified_chunks(n_good: int, drawn: list[tuple[int, ...]]) -> None:
    ends = {position: KEYS[position] for position in range(1, n_good + 1)}
    verified = [
        ChunkMeta(ChunkKey(b"k" * 32), KEYS[after], 0, position, (), 0, state=StatePart(10, part % parts, parts))
        for position, after, parts, part in drawn
    ]
    assert usable_boundary(ends, verified) == plain(ends, verified)
