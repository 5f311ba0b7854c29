"""Writing, finding, reading: the plain way, in every shape the scheduler uses it. The positive control of all fault tests."""

from __future__ import annotations

import os
import stat
import threading
import warnings
from pathlib import Path

import pytest
from kvalet.store.config import StoreConfig
from kvalet.store.errors import StoreError, StoreLocked
from kvalet.store.ids import tenant_secret
from kvalet.store.jobs import ReadResult
from storekit import CHUNK_TOKENS, FILE_BYTES, Rig, payload, slot


@pytest.mark.parametrize("sync", ["data", "none"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_chain_comes_back_and_survives_reopening(tmp_path: Path, sync: str, direct: str) -> None:
    with Rig(tmp_path / "s", sync=sync, direct=direct) as rig:
        metas = rig.chain(5, tail=17)
        assert [r.reason for r in rig.write(metas)] == [""] * 6
        assert [rig.read(meta) for meta in metas] == [""] * 6
        rig.quiet()
        statistics = rig.store.statistics()
        assert (statistics.writes, statistics.hits, statistics.files) == (6, 6, 6)
        assert statistics.live_bytes == 6 * FILE_BYTES
        assert statistics.read_bytes_per_s > 0
        assert statistics.write_bytes_per_s > 0
    with Rig(tmp_path / "s", sync=sync, direct=direct) as rig:
        assert all(rig.store.has(meta.key) for meta in metas)
        assert [rig.read(meta) for meta in metas] == [""] * 6
        rig.quiet()


def test_what_is_not_there_is_missing_and_costs_no_read(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        meta = rig.chain(1)[0]
        assert not rig.store.has(meta.key)
        assert rig.read(meta) == "missing"


def test_tail_by_longest_common_prefix(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        base = rig.chain(2)
        rig.write(base)
        parent = bytes(base[-1].key)
        short = rig.chain(0, after=base, tail=5)[0]
        long = rig.chain(0, after=base, tail=20)[0]
        other = rig.chain(0, after=base, tail=9, seed=7)[0]
        rig.write([short, long, other])
        assert len(rig.store.tails(parent)) == 3
        assert rig.store.tails(bytes(32)) == []
        ids = (*long.ids[:12], 999_999, 999_998)
        result, data = rig.read_tail(parent, 2, ids)
        assert (result.reason, result.key, result.ids) == ("", long.key, long.ids)
        assert data[: len(payload(long))] == payload(long)
        result, _ = rig.read_tail(parent, 2, (1, 2, 3))
        assert result.reason == "no_prefix"
        result, _ = rig.read_tail(parent, 2, other.ids)
        assert (result.reason, result.key) == ("", other.key)
        rig.quiet()


def test_tails_are_listed_most_recent_first(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        base = rig.chain(1)
        rig.write(base)
        tails = [rig.chain(0, after=base, tail=3 + i, seed=i)[0] for i in range(3)]
        rig.write(tails)
        rig.store.touch([base[0].key, tails[1].key])
        rig.store.touch([base[0].key, tails[0].key])
        order = [ref.key_hex16 for ref in rig.store.tails(bytes(base[0].key))]
        assert order[:2] == [tails[0].key.hex()[:16], tails[1].key.hex()[:16]]
        assert rig.store.tails(bytes(base[0].key))[0].n_tokens == 3


def test_a_tail_is_never_given_to_another_tenant_and_not_harmed_by_asking(tmp_path: Path) -> None:
    """First tails of all tenants have one parent, the identity."""
    with Rig(tmp_path / "s") as rig:
        tail = rig.chain(0, tail=12)[0]
        assert rig.write([tail])[0].reason == ""
        stranger = tenant_secret(rig.store.secret, "another tenant")
        result, _ = rig.read_tail(rig.root, 0, tail.ids, secret=stranger)
        assert result.reason == "no_prefix"
        result, _ = rig.read_tail(rig.root, 0, tail.ids, secret=b"")
        assert result.reason == "key"
        result, data = rig.read_tail(rig.root, 0, tail.ids)
        assert (result.reason, result.ids) == ("", tail.ids)
        assert data[: len(payload(tail))] == payload(tail)


def test_present_and_in_flight_are_written_once(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        meta = rig.chain(1)[0]
        jobs = [rig.submit_write(meta) for _ in range(5)]
        results = rig.settle_all(5)
        assert [results[job].reason for job in jobs] == [""] * 5
        assert sum(not results[job].skipped for job in jobs) == 1
        assert rig.write([meta])[0].skipped
        assert rig.store.statistics().writes == 1
        rig.quiet()


def test_parent_rule(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3)
        assert rig.write([metas[1]])[0].reason == "ancestor"
        assert [r.reason for r in rig.write(metas)] == ["", "", ""]
        child = rig.chain(1, after=metas)[0]
        assert rig.write([child])[0].reason == ""


def test_cancel_reaches_only_what_has_not_started(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", readers=1, writers=1) as rig:
        metas = rig.chain(3)
        rig.write(metas)
        rig.store.cancel(12345)  # unknown: nothing happens
        blocked = threading.Event()
        held = threading.Event()

        def block(_: object) -> None:
            held.set()
            blocked.wait(20)

        rig.store.read(900, metas[0], slot(), block, session="s", klass=0)
        assert held.wait(20)  # the only reader is inside done
        waiting = [rig.submit_read(meta) for meta in metas]
        rig.store.cancel(waiting[1])
        first = rig.settle()
        assert (first.job, first.reason) == (waiting[1], "cancelled")
        blocked.set()
        assert {r.reason for r in rig.settle_all(2).values()} == {""}
        assert rig.store.statistics().pinned == 1  # job 900 was never settled


def test_cancelled_write_takes_its_descendants_along(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", writers=1) as rig:
        state = rig.store._state
        with state.lock:  # no writer can take anything meanwhile
            pass
        metas = rig.chain(4)
        with state.lock:
            writers, state.board.take = state.board.take, lambda: None  # type: ignore[method-assign]
        jobs = [rig.submit_write(meta) for meta in metas]
        rig.store.cancel(jobs[1])
        outcome = rig.settle_all(3)
        assert [outcome[job].reason for job in jobs[1:]] == ["cancelled", "ancestor", "ancestor"]
        with state.lock:
            state.board.take = writers  # type: ignore[method-assign]
            state.for_writers.notify_all()
        assert rig.settle().reason == ""
        assert [rig.store.has(meta.key) for meta in metas] == [True, False, False, False]
        rig.quiet()


def test_close_answers_everybody_and_joins_every_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    rig = Rig(tmp_path / "s")
    metas = rig.chain(8)
    jobs = [rig.submit_write(meta) for meta in metas]
    rig.store.close(20)
    outcomes = rig.settle_all(len(jobs))
    assert {outcomes[job].reason for job in jobs} == {""}  # within the deadline everything is finished
    assert set(threading.enumerate()) == before
    assert rig.store.close(1) == 0
    assert not rig.store.has(metas[0].key)
    assert not rig.store.accepts_writes()
    assert rig.tmp_names() == []
    with Rig(tmp_path / "s") as again:
        assert [again.read(meta) for meta in metas] == [""] * 8


def test_close_with_no_time_refuses_the_rest(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "s", writers=1)
    metas = rig.chain(40)
    jobs = [rig.submit_write(meta) for meta in metas]
    refused = rig.store.close(0)
    outcomes = rig.settle_all(len(jobs))
    reasons = [outcomes[job].reason for job in jobs]
    assert refused >= reasons.count("closed") > 0
    assert set(reasons) <= {"", "closed", "ancestor"}
    done = reasons.count("")
    assert reasons[:done] == [""] * done  # parents first, so what was finished is a prefix
    with Rig(tmp_path / "s") as again:
        assert [again.read(meta) for meta in metas[:done]] == [""] * done
        again.quiet()


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with Rig(tmp_path / "s") as rig:
            metas = rig.chain(2, tail=3)
            rig.write(metas)
    finally:
        os.umask(old)
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_second_opener_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    with Rig(tmp_path / "s"), pytest.raises(StoreLocked, match=str(os.getpid())):
        Rig(tmp_path / "s")
    with Rig(tmp_path / "s") as rig:
        assert rig.store.health().status == "ok"


def test_settings_are_checked() -> None:
    for bad in ({"readers": 0}, {"sync": "maybe"}, {"direct": "yes"}, {"cap_bytes": -1}, {"directory": ""}, {"bad_files": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            StoreConfig(**{"directory": "d", "cap_bytes": 1, **bad})


def test_a_slot_that_is_too_small_is_a_defect_of_the_caller(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        meta = rig.chain(1)[0]
        rig.store.write(1, meta, slot(4096), rig.done.put, klass=0)
        assert rig.settle().reason == "internal"
        rig.write([meta])
        rig.store.read(2, meta, slot(4096), rig.done.put, session="", klass=0)
        result = rig.settle()
        assert isinstance(result, ReadResult)
        assert result.reason == "internal"
        assert rig.read(meta) == ""


def test_a_forked_child_cannot_use_the_store_and_the_parent_keeps_its_lock(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas[:1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                refused = not rig.store.has(metas[0].key) and not rig.store.accepts_writes()
                rig.store.write(99, metas[1], slot(), lambda over: None, klass=0)
            except StoreError:
                code = 0 if refused else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        with pytest.raises(StoreLocked):
            Rig(tmp_path / "s")
        assert rig.write(metas)[1].reason == ""
        rig.quiet()


def test_ids_of_a_chunk_fill_it(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        assert all(len(meta.ids) == CHUNK_TOKENS for meta in rig.chain(3))
