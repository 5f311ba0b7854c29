"""The slab: alignment, separate slots, populated memory, bounds."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvalet.runtime import slab as slab_module
from kvalet.runtime.geometry import BLOCK_BYTES, KVGeometry
from kvalet.runtime.slab import POPULATE_PIECE_BYTES, Slab, SlabError, touch_pages

GEOMETRY = KVGeometry(n_layers=2, n_kv_heads=1, head_dim=8)


def resident_pages(address: int, n_bytes: int) -> int:
    """Pages of the range that are in memory, asked of the kernel."""
    pages = -(-n_bytes // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), flags) == 0
    return sum(flag & 1 for flag in flags)


def test_sizes_and_alignment() -> None:
    slab = Slab(GEOMETRY, 5)
    assert (slab.n_slots, slab.slot_bytes, slab.n_bytes) == (5, GEOMETRY.slot_bytes, 5 * GEOMETRY.slot_bytes)
    for slot in range(5):
        for view, size in ((slab.view(slot), GEOMETRY.slot_bytes), (slab.payload(slot), GEOMETRY.chunk_bytes)):
            assert view.nbytes == size
            assert not view.readonly
            assert np.frombuffer(view, np.uint8).ctypes.data % BLOCK_BYTES == 0
    first = np.frombuffer(slab.view(0), np.uint8).ctypes.data
    assert first == slab.address
    assert np.frombuffer(slab.payload(1), np.uint8).ctypes.data == first + GEOMETRY.slot_bytes + BLOCK_BYTES


def test_slots_do_not_overlap_and_begin_as_zeros() -> None:
    slab = Slab(GEOMETRY, 4)
    assert not any(bytes(slab.view(slot)).strip(b"\0") for slot in range(4))
    for slot in range(4):
        slab.view(slot)[:] = bytes([slot + 1]) * slab.slot_bytes
    for slot in range(4):
        assert set(bytes(slab.view(slot))) == {slot + 1}
        assert set(bytes(slab.payload(slot))) == {slot + 1}


@pytest.mark.parametrize("slot", [-1, 3, 10**9])
def test_slots_outside_are_refused(slot: int) -> None:
    slab = Slab(GEOMETRY, 3)
    for get in (slab.view, slab.payload):
        with pytest.raises(IndexError, match="outside the slab of 3"):
            get(slot)


@pytest.mark.parametrize("n_slots", [0, -1])
def test_a_slab_without_slots_is_refused(n_slots: int) -> None:
    with pytest.raises(ValueError, match="at least 1 slot"):
        Slab(GEOMETRY, n_slots)


def test_everything_is_in_memory_and_progress_says_so() -> None:
    """Two and a half pieces, so that the last one is short."""
    seen: list[tuple[int, int]] = []
    n_slots = int(2.5 * POPULATE_PIECE_BYTES) // GEOMETRY.slot_bytes
    slab = Slab(GEOMETRY, n_slots, threads=3, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 3
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (slab.n_bytes, slab.n_bytes)
    assert resident_pages(slab.address, slab.n_bytes) == -(-slab.n_bytes // mmap.PAGESIZE)
    slab.close()


def test_touching_by_hand_populates_as_well() -> None:
    """The way of kernels before 5.14."""
    mapping = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    assert resident_pages(address, len(mapping)) == 0
    touch_pages(address, len(mapping))
    assert resident_pages(address, len(mapping)) == 64


def test_an_old_kernel_falls_back_to_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice number 9999 is as unknown to this kernel as 23 is to an old one."""
    monkeypatch.setattr(slab_module, "_MADV_POPULATE_WRITE", 9999)
    slab = Slab(GEOMETRY, 8)
    assert resident_pages(slab.address, slab.n_bytes) == -(-slab.n_bytes // mmap.PAGESIZE)


def test_too_large_is_one_clear_error() -> None:
    with pytest.raises(SlabError, match=r"slab of 1125899906842624 slots, \d+ bytes"):
        Slab(GEOMETRY, 1 << 50)


def test_close_waits_for_no_one_but_says_so() -> None:
    slab = Slab(GEOMETRY, 2)
    view = slab.view(1)
    with pytest.raises(BufferError):
        slab.close()
    view[0] = 7
    assert slab.view(1)[0] == 7, "a refused close changes nothing"
    view.release()
    slab.close()
    slab.close()


def test_the_module_needs_no_torch(repository: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import kvalet.runtime.slab, kvalet.runtime.transfer"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=repository.parent)
