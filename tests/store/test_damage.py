"""Bytes on disk that are not what was written: refused with the right reason, set aside, asked once (B2-B7, X, R, I)."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from damagekit import DAMAGE, SECTOR, flip, replace_by
from kvalet.store import layout
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.faults import Fault, FaultIO
from kvalet.store.ids import ChunkMeta, Identity, tenant_secret
from storekit import FILE_BYTES, IDENTITY, Rig, payload, slot


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_once_and_healed_by_the_next_write(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGE[name]
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3)
        rig.write(metas)
        assert rig.read(metas[1]) == ""  # positive control
        damage(rig.path(metas[1]))
        assert rig.read(metas[1]) == reason
        assert rig.gone == [metas[1].key]
        assert not rig.store.has(metas[1].key)
        again = "missing" if reason == "missing" else "quarantined"
        assert {rig.read(metas[1]) for _ in range(100)} == {again}  # R5: asked 100 times, read once
        assert rig.reasons()[reason] == 1 + 100 * (reason == "missing")
        assert (rig.read(metas[0]), rig.read(metas[2])) == ("", "")
        rig.quiet()
        kept = list((tmp_path / "s" / "bad").iterdir())
        assert len(kept) == (reason != "missing")
        assert rig.store.statistics().aside_bytes == sum(-(-p.stat().st_size // 4096) * 4096 for p in kept)
        assert rig.write([metas[1]])[0].reason == ""
        assert rig.read(metas[1]) == ""
        rig.quiet()


def test_damage_is_told_once_in_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Rig(tmp_path / "s") as rig:
        now = [1000.0]
        rig.store._state.clock = lambda: now[0]
        metas = rig.chain(3)
        rig.write(metas)
        for meta in metas:
            flip(rig.path(meta), 5000)
        told = []
        for meta, later in zip(metas, (0.0, 59.0, 1.0), strict=True):
            now[0] += later
            assert rig.read(meta) == "payload"
            told.append(sum("is refused (payload)" in record.getMessage() for record in caplog.records))
        assert told == [1, 1, 2]


def test_every_truncation_of_a_tail_is_refused(tmp_path: Path) -> None:
    """B2 at file level, in steps of a sector and around each edge."""
    with Rig(tmp_path / "s", bad_files=4) as rig:
        tail = rig.chain(0, tail=3)[0]
        size = 2 * BLOCK_BYTES
        edges = {n + d for n in (0, BLOCK_BYTES, size) for d in (-1, 1)} | set(range(0, size + 4 * SECTOR, SECTOR))
        tried = 0
        for n in sorted(edges - {size, -1}):
            assert rig.write([tail])[0].reason == ""
            os.truncate(rig.path(tail), n)
            assert rig.read(tail) == "size", n
            rig.quiet()
            tried += 1
        assert tried > 20
        assert rig.write([tail])[0].reason == ""
        assert rig.read(tail) == ""


def copy_over(rig: Rig, source: ChunkMeta, target: ChunkMeta) -> None:
    shutil.copyfile(rig.path(source), rig.path(target))


def test_a_valid_file_in_the_wrong_place_is_refused(tmp_path: Path) -> None:
    """B4: another key, position, kind, tenant."""
    with Rig(tmp_path / "s") as rig:
        a = rig.chain(2)
        b = rig.chain(2, seed=1)
        other = rig.chain(2, secret=tenant_secret(rig.store.secret, "other"))
        tail = rig.chain(0, tail=20)[0]
        rig.write([*a, *b, *other, tail])
        cases = [(b[0], a[1]), (a[0], b[1]), (other[1], a[0]), (tail, b[0])]
        for source, target in cases:
            copy_over(rig, source, target)
            assert rig.read(target) == "key", (source, target)
        assert rig.read(other[0]) == ""
        rig.quiet()


def test_a_file_of_another_store_or_model_is_foreign(tmp_path: Path) -> None:
    """B4, P31: same key by construction (secret and identity given), other store id or identity inside."""
    with Rig(tmp_path / "a") as a, Rig(tmp_path / "b") as b:
        secret = b"s" * 32
        meta = a.chain(1, secret=secret)[0]
        for rig in (a, b):
            rig.write([meta])
        shutil.copyfile(a.path(meta), b.path(meta))
        assert b.read(meta) == "foreign"
        assert b.reasons() == {"foreign": 1}
        assert a.read(meta) == ""
    with Rig(tmp_path / "c") as c:
        secret = tenant_secret(c.store.secret, "t")
        meta = c.chain(1, secret=secret)[0]
        c.write([meta])
        name = c.path(meta).relative_to(tmp_path / "c")
    other = Identity.of({"weights": "w", "kv_dtype": "fp32", "layout": "1"})
    with Rig(tmp_path / "c", identity=other) as c:
        assert c.store.has(meta.key)  # the name is known, but nobody with the other identity can compute it
        assert c.read(meta) == "identity"
        assert (tmp_path / "c" / name).exists()  # keeps its place until it is evicted: never deleted for being foreign
        c.check_books()


CHANGES = [
    {"weights": "w'"},
    {"kv_dtype": "fp32"},
    {"layout": "2"},
    {"rope": "5e5"},
    {"lora": "x"},
    {"chunk": "64"},
    {"byte_order": "big"},
    {"numerics": "other"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: next(iter(c)))
def test_another_identity_hits_nothing(tmp_path: Path, change: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """I1, P28: the same prompt under another identity has other keys, one line names what changed; and back again,
    everything is still there."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(3)
        rig.write(metas)
    other = Identity.of({**dict(IDENTITY.fields), **change})
    with Rig(tmp_path / "s", identity=other) as rig:
        lines = [record.getMessage() for record in caplog.records if "another identity" in record.getMessage()]
        assert len(lines) == 1
        assert f"{next(iter(change))}: " in lines[0]
        theirs = rig.chain(3)
        assert not any(rig.store.has(meta.key) for meta in theirs)
        assert {m.key for m in theirs}.isdisjoint(m.key for m in metas)
        assert [r.reason for r in rig.write(theirs)] == [""] * 3
    with Rig(tmp_path / "s") as rig:
        assert [rig.read(meta) for meta in metas] == [""] * 3


def test_settings_outside_the_identity_still_hit(tmp_path: Path) -> None:
    """I2: pool size, threads, cap, path are not part of what bytes mean."""
    with Rig(tmp_path / "s", readers=1, writers=1) as rig:
        metas = rig.chain(3)
        rig.write(metas)
    (tmp_path / "s").rename(tmp_path / "mövéd dir")
    with Rig(tmp_path / "mövéd dir", readers=8, writers=4, cap_bytes=1 << 26, direct="off") as rig:
        assert [rig.read(meta) for meta in metas] == [""] * 3


def test_tenants_share_no_key(tmp_path: Path) -> None:
    """I3: same prompt, two tenants, and one tenant with a salt."""
    with Rig(tmp_path / "s") as rig:
        secrets = [tenant_secret(rig.store.secret, *who) for who in (("a",), ("b",), ("a", "salt"), ("a", "other salt"))]
        chains = [rig.chain(3, secret=secret) for secret in secrets]
        assert len({meta.key for metas in chains for meta in metas}) == 12
        rig.write(chains[0])
        assert not any(rig.store.has(meta.key) for metas in chains[1:] for meta in metas)
        tags = {layout.tenant_tag(rig.store.secret, name) for name in ("a", "b", "")}
        assert len(tags) == 3


@pytest.mark.parametrize("kind", ["fifo", "directory", "symlink", "dangling", "hard link", "device"])
def test_strange_things_in_place_of_a_chunk(tmp_path: Path, kind: str) -> None:
    """X2, X3: refused, nothing hangs, what is behind a link is not touched; at the next open they are nobody's."""
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(2)
        rig.write(metas)
        path = rig.path(metas[1])
        elsewhere = tmp_path / "elsewhere"
        shutil.copyfile(path, elsewhere)
        before = elsewhere.read_bytes(), elsewhere.stat().st_mtime_ns
        try:
            replace_by(kind, path, elsewhere)
        except PermissionError:
            assert kind == "device", "only device nodes need a privilege"
            path.mkdir()  # the nearest thing that an unprivileged run can make
        assert rig.read(metas[1]) == "foreign"
        assert rig.read(metas[0]) == ""
        rig.quiet()
        assert (elsewhere.read_bytes(), elsewhere.stat().st_mtime_ns) == before
    with Rig(tmp_path / "s") as rig:
        assert rig.store.found.strangers == 1
        assert not rig.store.has(metas[1].key)
        assert os.path.lexists(path)
        outcome = rig.write([metas[1]])[0].reason  # a rename replaces a link or a pipe, never what it points to
        assert outcome == ("blocked" if path.is_dir() else "")
        assert rig.store.accepts_writes()  # one odd name is no reason to stop writing
        assert (elsewhere.read_bytes(), elsewhere.stat().st_mtime_ns) == before


@pytest.mark.parametrize("where", ["first", "middle", "last", "several"])
def test_the_prefix_before_the_lowest_bad_chunk_is_good(tmp_path: Path, where: str) -> None:
    """R1 at store level."""
    bad = {"first": [0], "middle": [3], "last": [6], "several": [5, 2, 4]}[where]
    with Rig(tmp_path / "s") as rig:
        metas = rig.chain(7)
        rig.write(metas)
        for k in bad:
            flip(rig.path(metas[k]), BLOCK_BYTES + 17)
        jobs = [rig.submit_read(meta) for meta in metas]
        outcomes = rig.settle_all(7)
        reasons = [outcomes[job].reason for job in jobs]
        assert reasons == ["payload" if k in bad else "" for k in range(7)]
        assert reasons.index("payload") == min(bad)
        rig.quiet()


def test_corrupt_once_and_good_later_is_still_a_miss(tmp_path: Path) -> None:
    """B6: memory or cable lied once; the file is set aside, nobody loops."""
    io = FaultIO(Fault("preadv", kind="corrupt"))
    with Rig(tmp_path / "s", io=io) as rig:
        meta = rig.chain(1)[0]
        rig.write([meta])
        io.arm()
        assert rig.read(meta) in ("payload", "header")
        assert io.fired == 1
        assert rig.read(meta) == "quarantined"
        assert rig.write([meta])[0].reason == ""
        assert rig.read(meta) == ""
        rig.quiet()


def test_a_lying_write_is_caught_at_the_read(tmp_path: Path) -> None:
    """B7: success reported, nothing stored."""
    io = FaultIO()
    with Rig(tmp_path / "s", io=io) as rig:
        metas = rig.chain(2)
        io.arm(Fault("pwritev", nth=1, kind="lie"))
        assert rig.write(metas[:1])[0].reason == ""
        assert io.fired == 1
        io.disarm()
        assert rig.read(metas[0]) == "size"
        assert [r.reason for r in rig.write(metas)] == ["", ""]
        assert [rig.read(meta) for meta in metas] == ["", ""]


def test_bad_folder_stays_small(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", bad_files=3) as rig:
        metas = rig.chain(8)
        rig.write(metas)
        (tmp_path / "s" / "bad" / "a note of the owner").write_text("not ours")
        for meta in metas:
            flip(rig.path(meta), BLOCK_BYTES)
            assert rig.read(meta) == "payload"
            rig.quiet()
        names = os.listdir(tmp_path / "s" / "bad")
        assert len(names) == 4
        assert "a note of the owner" in names
        assert rig.store.statistics().aside_bytes == 3 * FILE_BYTES
    with Rig(tmp_path / "s", bad_files=3) as rig:
        assert rig.store.statistics().aside_bytes == 3 * FILE_BYTES


@pytest.mark.parametrize("fault", ["truncated", "flipped", "emptied"])
def test_a_bad_tail_is_refused_and_the_next_best_is_taken(tmp_path: Path, fault: str) -> None:
    with Rig(tmp_path / "s") as rig:
        base = rig.chain(1)
        rig.write(base)
        long, short = rig.chain(0, after=base, tail=20)[0], rig.chain(0, after=base, tail=6)[0]
        rig.write([short, long])
        path = rig.path(long)
        if fault == "flipped":
            flip(path, path.stat().st_size - 1)
        else:
            os.truncate(path, 0 if fault == "emptied" else 5000)
        result, data = rig.read_tail(bytes(base[0].key), 1, long.ids)
        assert (result.reason, result.key) == ("", short.key)
        assert data[: len(payload(short))] == payload(short)
        assert rig.gone == [long.key]
        rig.quiet()


def test_headers_that_disagree_with_the_question_are_refused(tmp_path: Path) -> None:
    """A reader that expects another position, parent or ids of the same key refuses what it finds."""
    with Rig(tmp_path / "s") as rig:
        meta = rig.chain(1)[0]
        for change in ({"ordinal": 3}, {"first_token": 32}, {"ids": (*meta.ids[:-1], 77)}):
            rig.write([meta])
            rig.submit_read(dataclasses.replace(meta, **change), slot())
            assert rig.settle().reason == "key"
            rig.quiet()
