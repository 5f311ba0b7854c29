"""Words for errnos, names of files and the gate of unlinks: the tables that docs/store.md and docs/store-format.md promise."""

from __future__ import annotations

import errno
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store import faultwords, layout
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.entries import Entry, keys_of
from kvalet.store.ids import ChunkKey, ChunkMeta
from kvalet.store.janitor import Gate, round_block
from kvalet.store.jobs import ReadResult, WriteResult

ERRNOS = sorted(errno.errorcode)
TAG = "0a1b2c3d"


def words_of(result: type) -> set[str]:
    """The reasons that a result's docstring promises: the list behind "one of:"."""
    listed = re.search(r"one of: ([a-z_,\s]+)\.", result.__doc__ or "")
    assert listed is not None
    return {word.strip() for word in listed[1].split(",")}


@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
def test_every_errno_has_a_promised_word(code: int) -> None:
    error = OSError(code, "x")
    assert faultwords.read_reason(error) in words_of(ReadResult)
    assert faultwords.write_reason(error) in words_of(WriteResult)
    assert errno.errorcode[code] in faultwords.explain(error)
    if faultwords.opens_write_breaker(error):
        assert faultwords.write_reason(error) == "io", "a full disk or missing descriptors do not make the tier read-only"


@pytest.mark.parametrize(
    ("code", "read", "write", "breaks"),
    [
        (errno.EIO, "io", "io", True),
        (errno.EROFS, "io", "io", True),
        (errno.ENOSPC, "io", "full", False),
        (errno.EDQUOT, "io", "full", False),
        (errno.ENOENT, "missing", "io", True),
        (errno.EMFILE, "resources", "resources", False),
        (errno.ENOMEM, "resources", "resources", False),
        (errno.ELOOP, "foreign", "blocked", False),
        (errno.EISDIR, "foreign", "blocked", False),
        (errno.ENXIO, "foreign", "io", True),
        (errno.EACCES, "foreign", "io", True),
    ],
)
def test_the_table_of_errors(code: int, read: str, write: str, breaks: bool) -> None:
    error = OSError(code, "x")
    assert (faultwords.read_reason(error), faultwords.write_reason(error)) == (read, write)
    assert faultwords.opens_write_breaker(error) is breaks


def test_out_of_memory_is_no_fault_of_the_disk() -> None:
    error = MemoryError()
    assert faultwords.read_reason(error) == faultwords.write_reason(error) == "resources"
    assert not faultwords.opens_write_breaker(error)
    assert faultwords.explain(OSError("no number")) == repr(OSError("no number"))


keys = st.binary(min_size=32, max_size=32)


@st.composite
def metas(draw: st.DrawFn) -> ChunkMeta:
    tail = draw(st.booleans())
    n = draw(st.integers(1, 31)) if tail else 32
    ordinal = draw(st.integers(0, (1 << 32) - 1))
    return ChunkMeta(
        ChunkKey(draw(keys)), draw(keys), ordinal, 0, tuple(range(n)), -(-n // 16), tail, draw(st.text(max_size=5))
    )


@settings(max_examples=150, deadline=None)
@given(metas())
def test_a_name_says_what_a_scan_needs(meta: ChunkMeta) -> None:
    """What ``parse_name`` reads back is what ``file_name`` wrote, but for what a name does not hold."""
    wrote = layout.file_name(meta, TAG)
    read = layout.parse_name(wrote.folder, wrote.shard, wrote.name)
    assert read is not None
    assert (read.index_key, read.is_tail) == (layout.index_key(meta), meta.tail)
    assert read.n_tokens == (len(meta.ids) if meta.tail else 0)
    assert (read.ordinal, read.parent) == ((-1, meta.parent) if meta.tail else (meta.ordinal, None))
    other = layout.TAILS if wrote.folder == layout.CHUNKS else layout.CHUNKS
    assert layout.parse_name(other, wrote.shard, wrote.name) is None
    assert wrote.shard in layout.SHARDS
    assert layout.parse_name(wrote.folder, f"{(int(wrote.shard, 16) + 1) % 256:02x}", wrote.name) is None


@settings(max_examples=100, deadline=None)
@given(metas(), st.lists(st.integers(-5, (1 << 64) - 1), min_size=2, max_size=5))
def test_set_aside_files_are_recognised_and_sort_by_time(meta: ChunkMeta, times: list[int]) -> None:
    name = layout.file_name(meta, TAG).name
    aside = [layout.bad_name(at, name) for at in times]
    assert all(map(layout.is_bad_name, aside))
    assert sorted(aside) == [layout.bad_name(at, name) for at in sorted(times)]
    assert not layout.is_bad_name(name)
    assert not layout.is_tmp_name(name)
    assert not any(map(layout.is_tmp_name, aside))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1 << 22), st.integers(0, 1 << 40), st.binary(min_size=8, max_size=8))
def test_only_temporary_names_are_temporary(pid: int, counter: int, noise: bytes) -> None:
    name = layout.tmp_name(pid, counter, noise.hex())
    assert layout.is_tmp_name(name)
    for strange in (name + "\n", name + "0", name.replace(".", "-"), f"../{name}", name[:-1] + "g"):
        assert not layout.is_tmp_name(strange), strange


def test_a_tag_depends_on_secret_and_tenant_only() -> None:
    tags = [layout.tenant_tag(secret, name) for secret in (b"a" * 32, b"b" * 32) for name in ("", "x", "X", "\ud800")]
    assert len(set(tags)) == 8
    assert all(re.fullmatch(r"[0-9a-f]{8}", tag) for tag in tags)
    assert layout.tenant_tag(b"a" * 32, "x") == tags[1]


@settings(max_examples=50, deadline=None)
@given(metas())
def test_keys_are_told_where_somebody_may_have_asked(meta: ChunkMeta) -> None:
    """A tail that only a scan has seen has no whole key, so nobody can have asked for it; a chunk's name is its key."""
    file = layout.file_name(meta, TAG)
    assert keys_of([Entry(file, 1, 1, 0)]) == ([] if meta.tail else [meta.key])
    assert keys_of([Entry(file, 1, 1, 0, bytes(meta.key))]) == [meta.key]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 50))
def test_sizes_are_rounded_up_to_whole_blocks(n_bytes: int) -> None:
    rounded = round_block(n_bytes)
    assert rounded % BLOCK_BYTES == 0
    assert 0 <= rounded - n_bytes < BLOCK_BYTES


@pytest.mark.parametrize("oks", [[], [True], [True, True, True], [True, False, True], [False]])
def test_a_gate_opens_after_the_last_unlink(oks: list[bool]) -> None:
    """A write may begin only when all it pushed out is gone: one that could not be deleted means no."""
    gate = Gate(len(oks))
    for index, ok in enumerate(oks):
        assert not gate.wait(0.0), f"open with {len(oks) - index} unlinks to go"
        gate.one_over(ok=ok)
    assert gate.wait(0.0) is all(oks)
    assert gate.failed is not all(oks)


def test_a_gate_wakes_who_waits_and_counts_across_threads() -> None:
    gate = Gate(64)
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(gate.wait(20.0)))
    workers = [threading.Thread(target=lambda: [gate.one_over(ok=True) for _ in range(16)]) for _ in range(4)]
    for thread in (waiter, *workers):
        thread.start()
    for thread in (waiter, *workers):
        thread.join(20.0)
        assert not thread.is_alive()
    assert seen == [True]
