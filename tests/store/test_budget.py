"""The budget of bytes a day: the bucket against its definition, what is refused, what a restart remembers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store.budget import BACKGROUND, DAY_S, OVERDRAFT, UNKNOWN_SHARE, Budget, load
from kvalet.store.config import StoreConfig
from kvalet.store.layout import BUDGET_FILE
from recordkit import RecordRig, record_of
from storekit import FILE_BYTES, WAIT_S

DAY = 864_000
"""Ten bytes a second."""


def test_background_stops_at_nothing_and_what_waits_at_the_overdraft() -> None:
    budget = Budget(DAY, DAY, 0.0)
    assert budget.allows(DAY, BACKGROUND, 0.0)
    assert not budget.allows(DAY + 1, BACKGROUND, 0.0)
    assert budget.allows(int(DAY * (1 + OVERDRAFT)), 1, 0.0)
    assert not budget.allows(int(DAY * (1 + OVERDRAFT)) + 1, 0, 0.0)
    budget.book(DAY)
    assert not budget.allows(1, BACKGROUND, 0.0)  # what is on its way counts
    budget.settle(DAY, 0)
    assert budget.allows(DAY, BACKGROUND, 0.0)  # what was written in vain does not
    budget.book(DAY)
    budget.settle(DAY, DAY)
    assert (budget.left(0.0), budget.left(10.0)) == (0, 100)
    assert not budget.exhausted(10.0)
    budget.settle(0, int(DAY * OVERDRAFT) + 100)
    assert budget.exhausted(10.0)
    assert not budget.exhausted(11.0)
    assert budget.left(11.0 + 2 * DAY_S) == DAY  # it never holds more than a day's worth


def test_without_a_limit_everything_goes() -> None:
    budget = Budget(0, 0.0, 0.0)
    budget.book(1 << 40)
    budget.settle(1 << 40, 1 << 40)
    assert budget.allows(1 << 40, BACKGROUND, 0.0)
    assert not budget.exhausted(0.0)
    assert not budget.save_due(1e9)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(10, 200))
def test_any_days_see_no_more_than_their_share(seed: int, n: int) -> None:
    """Whatever is asked, with clocks that stand still or step back: d days see at most d + 1 + OVERDRAFT days' worth."""
    rng = random.Random(seed)
    budget = Budget(DAY, DAY, 0.0)
    now, latest, written = 0.0, 0.0, 0
    for _ in range(n):
        now = max(0.0, now + rng.choice((0.0, 1.0, 500.0, 40_000.0, -100.0)))
        latest = max(latest, now)
        n_bytes, klass = rng.randrange(1, DAY), rng.randrange(3)
        if budget.allows(n_bytes, klass, now):
            budget.book(n_bytes)
            spent = rng.choice((n_bytes, n_bytes // 2))
            budget.settle(n_bytes, spent)
            written += spent
        if rng.random() < 0.1:  # a restart, with the wall clock as the clock
            now = latest
            budget = load(budget.save(now, latest), DAY, created=False, now=now, wall_s=latest)
        assert written <= DAY * (latest / DAY_S + 1 + OVERDRAFT) + 2 + n, f"seed {seed}"


def test_a_restart_goes_on_where_it_left_off() -> None:
    budget = Budget(DAY, DAY, 0.0)
    budget.book(1000)
    budget.settle(1000, DAY // 2)
    saved = budget.save(0.0, 1_000_000.0)
    assert load(saved, DAY, created=False, now=50.0, wall_s=1_000_000.0).left(50.0) == DAY // 2
    assert load(saved, DAY, created=False, now=0.0, wall_s=1_000_010.0).left(0.0) == DAY // 2 + 100
    assert load(saved, DAY, created=False, now=0.0, wall_s=5.0).left(0.0) == DAY // 2  # a clock that went back
    assert load(saved, DAY, created=False, now=0.0, wall_s=1e12).left(0.0) == DAY
    assert load(saved, DAY // 10, created=False, now=0.0, wall_s=1_000_000.0).left(0.0) == DAY // 10  # the limit was lowered


@pytest.mark.parametrize(
    "data",
    [None, b"", b"{", b"[]", b"5", b'{"at_s": 1}', b'{"at_s": "x", "level_bytes": 1}', b"\xff", b"[" * 100_000,
     b'{"at_s": 1e999, "level_bytes": NaN}', b'{"at_s": 0, "level_bytes": null}'],
)  # fmt: skip
def test_an_unknown_past_begins_low_and_a_new_store_full(data: bytes | None) -> None:
    left = load(data, DAY, created=False, now=0.0, wall_s=0.0).left(0.0)
    assert left in (int(DAY * UNKNOWN_SHARE), -int(DAY * OVERDRAFT))
    if data is None:
        assert load(data, DAY, created=True, now=0.0, wall_s=0.0).left(0.0) == DAY


def test_a_debt_is_bounded_when_the_limit_is_lowered() -> None:
    saved = json.dumps({"at_s": 0, "level_bytes": -(10**12)}).encode()
    assert load(saved, DAY, created=False, now=0.0, wall_s=0.0).left(0.0) == -int(DAY * OVERDRAFT)


def test_saving_is_due_after_much_or_after_a_while() -> None:
    budget = Budget(DAY, DAY, 0.0)
    assert not budget.save_due(1e6)
    budget.settle(0, 100)
    assert not budget.save_due(1.0)
    budget.settle(0, DAY // 64)
    assert budget.save_due(1.0)
    budget.save(1.0, 1.0)
    assert not budget.save_due(1.0)
    budget.settle(0, 5000)
    assert not budget.save_due(30.0)
    assert budget.save_due(70.0)


def test_checkpoints_stop_and_evictions_go_on(tmp_path: Path) -> None:
    """Through the store: seven chunks are in the budget; then background is refused, what makes room is not, to the end of
    the overdraft; then the tier takes no writes, and says why. Reads go on."""
    with RecordRig(tmp_path / "s", bytes_per_day=8 * FILE_BYTES) as rig:
        metas = rig.chain(8)
        assert [one.reason for one in rig.write(metas[:7])] == [""] * 7
        assert rig.store.statistics().budget_left_bytes >= FILE_BYTES
        assert rig.put(record_of(metas[:7], after=1000)) == ""
        other = rig.chain(4, seed=1)
        assert [one.reason for one in rig.write(other, klass=2)] == ["budget"] * 4
        assert rig.put(record_of(metas[:7])) == ""  # a small one still fits
        assert rig.store.accepts_writes()
        assert [one.reason for one in rig.write(other[:1], klass=1)] == [""]
        assert [one.reason for one in rig.write(other[1:], klass=0)] == ["budget"] * 3
        state = rig.store._state
        with state.lock:
            state.budget.settle(0, 2 * FILE_BYTES)
        assert not rig.store.accepts_writes()
        assert [one.reason for one in rig.write(rig.chain(1, seed=2), klass=0)] == ["budget"]
        assert "budget" in rig.store.health().why[0]
        assert dict(rig.store.statistics().failures)["budget"] >= 5
        assert rig.read(metas[0]) == ""
        rig.quiet()
    saved = json.loads((tmp_path / "s" / BUDGET_FILE).read_bytes())
    assert saved["level_bytes"] < 0
    with RecordRig(tmp_path / "s", bytes_per_day=8 * FILE_BYTES) as rig:  # remembered
        assert [one.reason for one in rig.write(rig.chain(1, seed=3), klass=2)] == ["budget"]
    with RecordRig(tmp_path / "s") as rig:  # and without a limit, none
        assert [one.reason for one in rig.write(rig.chain(1, seed=3), klass=2)] == [""]
        assert rig.store.statistics().budget_left_bytes == -1


def test_what_fails_costs_no_budget(tmp_path: Path) -> None:
    with RecordRig(tmp_path / "s", bytes_per_day=8 * FILE_BYTES, cap_bytes=2 * FILE_BYTES) as rig:
        before = rig.store.statistics().budget_left_bytes
        chain = rig.chain(3)
        assert [one.reason for one in rig.write(chain)].count("full") == 1
        rig.quiet()
        assert rig.store.statistics().budget_left_bytes == before - 2 * FILE_BYTES
        assert rig.write(chain[:1])[0].skipped
        assert rig.store.statistics().budget_left_bytes == before - 2 * FILE_BYTES


def test_a_budget_that_cannot_be_written_down_stops_nothing(tmp_path: Path) -> None:
    """Somebody's directory stands where the new file would be made."""
    with RecordRig(tmp_path / "s", bytes_per_day=64 * FILE_BYTES) as rig:
        (tmp_path / "s" / f".{BUDGET_FILE}.new").mkdir()
        assert [one.reason for one in rig.write(rig.chain(3))] == ["", "", ""]
        rig.quiet()
        rig.store.close(WAIT_S)
        assert not (tmp_path / "s" / BUDGET_FILE).exists()
        assert rig.store.statistics().internal == 0


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes_per_day must not be negative"):
        StoreConfig("d", 1, bytes_per_day=-1)
