"""The chunk map: of each chunk the scheduler knows, which copies exist: device, RAM slot, disk.

A chunk is in the map while any of these holds: its last page is in the page index (``node``), a RAM slot holds it
(``slot``), a transfer works on it, or another chunk of the map descends from it. What only the disk holds is not in the
map: it is found again by its key. So the map is bounded by pages, slots and the depth of their chains.

Losing the last copy of a chunk makes every descendant that is not on disk worthless (nothing can be used without what
comes before it): ``settle`` drops those from RAM in the same call. Descendants on the device cannot exist then, because
the page index is closed under prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from kvalet.runtime.plan import SlotId
from kvalet.sched.config import SchedConfig
from kvalet.sched.ports import DiskView
from kvalet.sched.prefix import Node, Root, common_prefix
from kvalet.sched.ranking import RamOrder
from kvalet.store.ids import ChunkKey, ChunkMeta, chunk_key
from kvalet.store.ram import RamBook

if TYPE_CHECKING:
    from kvalet.sched.transfer_record import Transfer


OWN_TAILS = 4096


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk or tail (fewer ids than ``chunk_tokens``). ``on_disk`` is what was last heard, not a promise.

    ``incoming``: the live restore. ``outgoing``: the spill, persist or write at work. ``copy_failures``: copies to RAM that
    failed in a row. ``writes``: writes begun since it was last used (``written_use`` says which use that was).
    """

    key: ChunkKey
    secret: bytes
    namespace: str
    parent: Chunk | None
    ordinal: int
    first_token: int
    ids: tuple[int, ...]
    tail: bool
    on_disk: bool
    last_use: float = 0.0
    node: Node | None = None
    slot: SlotId | None = None
    incoming: Transfer | None = None
    outgoing: Transfer | None = None
    copy_failures: int = 0
    writes: int = 0
    written_use: float = -1.0
    children: dict[ChunkKey, Chunk] = field(default_factory=dict)

    def __repr__(self) -> str:
        where = [name for name, held in (("device", self.node), ("disk", self.on_disk)) if held]
        where += [f"ram slot {self.slot}"] if self.slot is not None else []
        moving = [f"{t.kind.value} {t.state.value}" for t in (self.incoming, self.outgoing) if t]
        return f"Chunk({self.key.hex()[:8]}, #{self.ordinal}, {len(self.ids)} tokens, on {where}, {moving})"

    @property
    def exists(self) -> bool:
        """A copy exists somewhere, or one is on its way to the device."""
        return self.node is not None or self.slot is not None or self.on_disk or self.incoming is not None

    @property
    def end(self) -> int:
        return self.first_token + len(self.ids)


class ChunkMap:
    def __init__(self, config: SchedConfig, disk: DiskView) -> None:
        self._config = config
        self._disk = disk
        self.book = RamBook(config.ram_slots)
        self.in_ram = RamOrder()
        self._by_key: dict[ChunkKey, Chunk] = {}
        self._tops: dict[bytes, dict[ChunkKey, Chunk]] = {}
        self._own_tails: dict[tuple[bytes, str], None] = {}
        self.lost_chunks = 0
        """Chunks whose last copy was given up."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._by_key.values())

    def get(self, key: ChunkKey) -> Chunk | None:
        return self._by_key.get(key)

    def key_after(self, secret: bytes, parent: ChunkKey | None, ids: tuple[int, ...]) -> ChunkKey:
        return chunk_key(secret, self._config.identity if parent is None else parent, ids)

    def parent_bytes(self, parent: ChunkKey | None) -> bytes:
        return self._config.identity if parent is None else parent

    def remember_tail(self, chunk: Chunk) -> None:
        """A tail before the first whole chunk is on disk, and it is this secret's (the last ``OWN_TAILS`` are known)."""
        if chunk.tail and chunk.ordinal == 0:
            self._own_tails[(chunk.secret, chunk.key.hex()[:16])] = None
            if len(self._own_tails) > OWN_TAILS:
                del self._own_tails[next(iter(self._own_tails))]

    def is_own_tail(self, secret: bytes, key_hex16: str) -> bool:
        return (secret, key_hex16) in self._own_tails

    def children_of(self, parent: Chunk | None, secret: bytes) -> dict[ChunkKey, Chunk]:
        return self._tops.get(secret, {}) if parent is None else parent.children

    def ensure(self, root: Root, parent: Chunk | None, ids: tuple[int, ...], now: float, key: ChunkKey | None = None) -> Chunk:
        """The chunk of ``ids`` after ``parent``; made, and the disk asked for it, if the map does not have it."""
        key = key or self.key_after(root.secret, parent.key if parent else None, ids)
        chunk = self._by_key.get(key)
        if chunk is not None:
            return chunk
        ordinal = parent.ordinal + 1 if parent else 0
        chunk = Chunk(
            key, root.secret, root.namespace, parent, ordinal, ordinal * self._config.chunk_tokens, ids,
            len(ids) < self._config.chunk_tokens, self._disk.has(key), now,
        )  # fmt: skip
        self._by_key[key] = chunk
        (self._tops.setdefault(root.secret, {}) if parent is None else parent.children)[key] = chunk
        return chunk

    def free_to_link(self, parent: Node, ids: tuple[int, ...]) -> bool:
        """Whether the chunk that would end with ``ids`` after ``parent`` has no other last page on the device."""
        chunk_ids, at = self._back_to_start(parent, ids)
        chunk = self._by_key.get(self.key_after(at.root.secret, at.chunk.key if at.chunk else None, chunk_ids))
        return chunk is None or chunk.node is None

    def can_link(self, node: Node) -> bool:
        """As ``free_to_link``, for a node of the index. Only deterministic mode has two nodes of the same ids."""
        if node.chunk is not None or not node.calls or node.parent is None:
            return True
        return self.free_to_link(node.parent, node.ids)

    def _back_to_start(self, node: Node, ids: tuple[int, ...]) -> tuple[tuple[int, ...], Node]:
        """(ids from the start of the chunk that ``ids`` after ``node`` lie in, the node before that start)."""
        parts = [ids]
        start = (node.end + len(ids) - 1) // self._config.chunk_tokens * self._config.chunk_tokens
        at = node
        while at.end > start:
            parts.append(at.ids)
            assert at.parent is not None
            at = at.parent
        return tuple(chain.from_iterable(reversed(parts))), at

    def link(self, node: Node, now: float, key: ChunkKey | None = None) -> Chunk:
        """The chunk that ends with ``node``: all its pages are on the device. Made if need be. In deterministic mode the
        caller has asked ``free_to_link``: one chunk has one last page. ``key``: its key, where the caller knows it."""
        if node.chunk is not None:
            return node.chunk
        assert node.parent is not None
        ids, at = self._back_to_start(node.parent, node.ids)
        parent = self.link(at, now) if at.parent is not None else None
        chunk = self.ensure(node.root, parent, ids, now, key)
        self.join(chunk, node)
        return chunk

    def join(self, chunk: Chunk, node: Node) -> None:
        """All pages of ``chunk`` are on the device, the last one is ``node``'s."""
        chunk.node, node.chunk = node, chunk
        self.in_ram.note(chunk)

    def use(self, chunk: Chunk, now: float) -> None:
        """A turn uses the chunk. Its rank in RAM grows, which needs no word there."""
        chunk.last_use = now

    def unlink(self, node: Node) -> None:
        """``node`` is about to leave the index: its chunk has no copy on the device any more."""
        chunk, node.chunk = node.chunk, None
        if chunk is not None:
            chunk.node = None
            self.in_ram.note(chunk)
            self.settle(chunk)

    def fill(self, chunk: Chunk, slot: SlotId) -> None:
        """The taken ``slot`` now holds the chunk's bytes."""
        self.book.fill(slot, chunk.key, clean=chunk.on_disk)
        chunk.slot = slot
        self.in_ram.note(chunk)

    def drop_slot(self, chunk: Chunk) -> None:
        """Forget the RAM copy. May lose the chunk."""
        assert chunk.slot is not None
        self.book.drop(chunk.slot)
        chunk.slot = None
        self.in_ram.note(chunk)
        self.settle(chunk)

    def set_on_disk(self, chunk: Chunk, on_disk: bool) -> None:
        """The disk holds the chunk, or no longer does. May lose it."""
        chunk.on_disk = on_disk
        if chunk.slot is not None:
            self.book.mark(chunk.slot, clean=on_disk)
            self.in_ram.note(chunk)
            if not on_disk and chunk.parent is not None and not chunk.parent.exists:
                self.drop_slot(chunk)  # the disk had kept it past its parent's loss; now it is worthless
                return
        self.settle(chunk)

    def settle(self, chunk: Chunk) -> None:
        """To be called when a copy or a transfer of ``chunk`` has gone: drops what is worthless, forgets what is empty."""
        if not chunk.exists:
            self._drop_descendants(chunk)
        at: Chunk | None = chunk
        while at is not None and not (at.node or at.slot is not None or at.incoming or at.outgoing or at.children):
            parent = at.parent
            if self._by_key.get(at.key) is not at:
                break  # an abandoned transfer's chunk, forgotten before
            if not at.on_disk:
                self.lost_chunks += 1
            del self._by_key[at.key]
            siblings = self._tops[at.secret] if parent is None else parent.children
            del siblings[at.key]
            if parent is None and not siblings:
                del self._tops[at.secret]
            at = parent

    def _drop_descendants(self, chunk: Chunk) -> None:
        below = list(chunk.children.values())
        for child in below:  # grows while it is walked: parents come before their children
            below.extend(child.children.values())
        for child in reversed(below):
            if child.slot is not None and not child.on_disk:
                self.drop_slot(child)

    def meta(self, chunk: Chunk) -> ChunkMeta:
        parent = self.parent_bytes(chunk.parent.key if chunk.parent else None)
        n_pages = -(-len(chunk.ids) // self._config.page_tokens)
        return ChunkMeta(
            chunk.key, parent, chunk.ordinal, chunk.first_token, chunk.ids, n_pages, tail=chunk.tail, namespace=chunk.namespace
        )

    def covered(self, parent: Chunk | None, secret: bytes, ids: tuple[int, ...]) -> bool:
        """RAM or disk hold a chunk after ``parent`` that begins with ``ids``: evicting those pages needs no copy."""
        for child in self.children_of(parent, secret).values():
            if (child.slot is not None or child.on_disk) and child.ids[: len(ids)] == ids:
                return True
        return False

    def best_child(self, parent: Chunk | None, secret: bytes, want: tuple[int, ...]) -> tuple[Chunk, int] | None:
        """The chunk after ``parent`` that is in RAM or on its way and shares most ids with ``want``, and how many."""
        best: tuple[Chunk, int] | None = None
        for child in self.children_of(parent, secret).values():
            if child.slot is None and child.incoming is None:
                continue
            shared = common_prefix(child.ids, want)
            if shared and (best is None or shared > best[1]):
                best = (child, shared)
        return best
