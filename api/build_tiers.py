"""The tiers below the pool as objects: slab, copier, disk store. Blocking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvalet.api.config import EngineConfig
from kvalet.api.memory_plan import MemoryPlan
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.plan import SlotId
from kvalet.runtime.slab import Slab
from kvalet.store.config import StoreConfig
from kvalet.store.errors import StoreError, StoreRefused
from kvalet.store.ids import ChunkKey, Identity, TailRef
from kvalet.store.store import DiskStore

STORE_CLOSE_S = 5.0


def make_slab(geometry: KVGeometry, plan: MemoryPlan, opened: ExitStack) -> Slab | None:
    slots = plan.ram_slots + plan.staging_slots
    if not slots:
        return None
    slab = Slab(geometry, slots)
    opened.callback(slab.close)
    return slab


def open_store(
    config: EngineConfig, geometry: KVGeometry, plan: MemoryPlan, identity: Identity, opened: ExitStack
) -> tuple[DiskStore | None, str]:
    """The tier, or why there is none although one was asked for. StoreError unless it is optional."""
    if not plan.store_bytes:
        if config.store_dir and not config.store_optional:
            why = "; ".join(note for note in plan.notes if note.startswith("disk tier"))
            raise StoreRefused(
                f"The store {config.store_dir!r} cannot be used ({why}): make room, give --store-bytes, or --store-optional."
            )
        return None, ""
    store_config = StoreConfig(
        directory=config.store_dir,
        cap_bytes=plan.store_bytes,
        min_free_bytes=config.store_min_free_bytes,
        readers=config.store_readers,
        writers=config.store_writers,
        bytes_per_day=config.store_bytes_per_day,
    )
    try:
        store = DiskStore.open(
            store_config,
            identity,
            page_stride_bytes=geometry.page_stride_bytes,
            page_tokens=geometry.page_tokens,
            chunk_tokens=geometry.chunk_tokens,
            page_bytes=geometry.page_bytes,
        )
    except StoreError as error:
        if not config.store_optional:
            raise
        return None, f"disk tier off: {error}"
    opened.callback(store.close, STORE_CLOSE_S)
    return store, ""


def no_slot(slot: SlotId) -> memoryview:
    raise IndexError(f"slot {slot}: there is no slab")


class NoDisk:
    """``sched.ports.DiskView`` of an engine without a disk tier."""

    def branches(self, tenant: str, session: str) -> Sequence[str]:
        return ()

    def has(self, key: ChunkKey) -> bool:
        return False

    def tails(self, parent: bytes) -> Sequence[TailRef]:
        return ()

    def accepts_writes(self) -> bool:
        return False


class NoCopies:
    """A copier for an engine without a slab: a core without slots never asks for a copy."""

    def copy_out(
        self, pages: object, slot: SlotId, first_page: int, done: Callable[[str | None, float], None], n_tokens: int = 0
    ) -> None:
        done("there is no slab", 0.0)

    def copy_in(self, slot: SlotId, slot_pages: object, pages: object, done: Callable[[str | None, float], None]) -> None:
        done("there is no slab", 0.0)

    def close(self) -> None:
        pass
