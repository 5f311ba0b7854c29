"""The tests of records, pins and resuming can fail: each named defect, patched in, is caught by the named test."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kvalet.sched import growth, records, resume, spill
from kvalet.sched.board import Board
from kvalet.sched.lines import Line, LineBook
from kvalet.sched.prefix import common_prefix
from kvalet.sched.session import Branch, Session
from kvalet.store.record import Record
from schedsim import walk

DETECTED = (AssertionError, RuntimeError)


def file_beside(name: str) -> ModuleType:
    """The test file beside this one."""
    spec = importlib.util.spec_from_file_location(f"mutated_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PINS, RECORDS, RESUME, ROUNDS = map(file_beside, ("test_pins", "test_records", "test_resume", "test_snapshot_rounds"))


def caught(test: Callable[..., None], *arguments: Any) -> None:
    with pytest.raises(DETECTED):
        test(*arguments)


def test_without_a_mutant_they_pass() -> None:
    RECORDS.test_a_record_is_sent_when_the_last_piece_of_its_branch_is_durable_and_not_before()
    RESUME.test_it_resumes_at_the_token_where_it_stopped(0)
    PINS.test_a_pin_outlives_the_process()
    PINS.test_between_its_chunks_and_its_record_no_piece_of_it_is_evicted()


def early(board: Board, line: Line) -> int:
    return line.branch.kv_len


def test_a_record_that_says_more_than_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "durable", early)
    caught(RECORDS.test_a_chunk_that_went_before_its_record_was_written_shortens_the_next_record)


def test_a_record_sent_before_its_tail_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the last whole chunk is there, and saying all of the branch."""
    monkeypatch.setattr(records, "durable", early)
    monkeypatch.setattr(records, "_above_disk", lambda board, line, key: False)
    caught(RECORDS.test_a_record_is_sent_when_the_last_piece_of_its_branch_is_durable_and_not_before)
    caught(walks)


def walks() -> None:
    for seed in range(40):
        walk(seed, 300)


def test_resumed_with_kv_len_one_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(ids: tuple[int, ...], boundary: int, kv_len: int, *rest: Any) -> Branch:
        return Branch(ids, boundary, kv_len + 1, *rest)

    monkeypatch.setattr(resume, "Branch", longer)
    caught(PINS.test_a_pin_outlives_the_process)


def test_a_pin_forgotten_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resume._take_in

    def forgetful(board: Board, session: Session, found: tuple[Record, ...]) -> None:
        real(board, session, tuple(replace(record, pinned=False) for record in found))

    monkeypatch.setattr(resume, "_take_in", forgetful)
    caught(PINS.test_a_pin_outlives_the_process)


def test_nothing_held_in_the_store_until_the_record_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PinDisk", lambda keys: records.UnpinDisk(()))
    monkeypatch.setattr(records, "UnpinDisk", lambda keys: _unpin_nothing)
    caught(PINS.test_between_its_chunks_and_its_record_no_piece_of_it_is_evicted)


_unpin_nothing = records.UnpinDisk(())


def test_pinned_pieces_that_ram_may_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_is_pinned", lambda board, chunk: False)
    caught(PINS.test_ram_never_drops_the_last_copy_of_a_pinned_chunk_while_others_can_go, "full")


def test_a_pinned_session_that_is_not_checkpointed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineBook, "add", lambda self, line: None)
    caught(PINS.test_pinning_writes_the_chain_at_the_lowest_class_and_again_after_each_turn)


def test_a_new_name_for_a_branch_with_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = growth.Branch

    def renamed(*fields: Any) -> Branch:
        branch = real(*fields)
        return replace(branch, id=f"{len(branch.ids):016x}") if branch.id else branch

    monkeypatch.setattr(growth, "Branch", renamed)
    caught(RECORDS.test_one_record_per_branch_which_grows_under_one_name)


def test_history_told_across_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearest(self: Session, ids: tuple[int, ...], secret: bytes) -> tuple[Branch, int] | None:
        found = [(branch, common_prefix(branch.ids, ids)) for branch in self.branches]
        return max(found, key=lambda pair: pair[1], default=None)

    monkeypatch.setattr(Session, "nearest", nearest)
    caught(RESUME.test_another_salt_of_the_tenant_sees_nothing_of_it)


def test_a_restart_that_forgets_what_was_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resume._take_in

    def forgetful(board: Board, session: Session, found: tuple[Record, ...]) -> None:
        real(board, session, tuple(replace(record, decoded=()) for record in found))

    monkeypatch.setattr(resume, "_take_in", forgetful)
    caught(ROUNDS.test_a_client_that_dropped_the_end_of_the_answer_pays_from_there, True)


def test_turns_that_do_not_wait_for_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "load", lambda board, session: None)
    caught(RESUME.test_its_turns_wait_for_its_records_and_nobody_elses_do)
