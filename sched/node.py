"""A page in the index: its ids, its place in the tree, who stands on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvalet.runtime.plan import PageId

if TYPE_CHECKING:
    from kvalet.sched.chunks import Chunk
    from kvalet.sched.session import Turn

NOBODY: frozenset[Turn] = frozenset()


class Node:
    """One page in the index, or the root of a tenant's tree (``page`` 0, no ids).

    ``calls``: one code per token, naming the call that computed it (deterministic mode; else empty). It is part of the key:
    the same ids computed by other calls are other bits. ``end``: tokens from position 0 to the end of this page.
    ``chunk``: the chunk (or tail) whose last page this is, if the chunk map knows one. ``wanters``: queued turns whose
    match ended here when it was last looked up.
    """

    __slots__ = (
        "calls", "children", "chunk", "end", "ids", "last_use", "page", "parent", "pins", "root", "wanters"
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, ids: tuple[int, ...], calls: tuple[int, ...], page: PageId, last_use: float
    ) -> None:
        self.parent = parent
        self.calls = calls
        self.root: Root = parent.root if parent else self  # type: ignore[assignment]  # only Root passes no parent
        self.ids = ids
        self.page = page
        self.end: int = (parent.end if parent else 0) + len(ids)
        self.children: dict[tuple[int, ...], Node] = {}
        self.pins = 0
        self.last_use = last_use
        self.chunk: Chunk | None = None
        self.wanters: set[Turn] | frozenset[Turn] = NOBODY

    def __repr__(self) -> str:
        return f"Node(page={self.page}, end={self.end}, ids={len(self.ids)}, pins={self.pins}, children={len(self.children)})"

    @property
    def start(self) -> int:
        return self.end - len(self.ids)

    def want(self, turn: Turn) -> None:
        """``turn`` is one more wanter; few nodes ever have one, so the set is made for the first."""
        self.wanters = {turn, *self.wanters}

    def unwant(self, turn: Turn) -> None:
        self.wanters = self.wanters - {turn} or NOBODY

    @property
    def indexed(self) -> bool:
        """Its page is still on the device (the index is closed under prefixes, so asking the parent is enough)."""
        return self.parent is not None and self.parent.children.get(self.key) is self

    @property
    def key(self) -> tuple[int, ...]:
        return self.ids + self.calls


class Root(Node):
    """Where a tenant's tree begins. ``namespace`` names the tenant's space for quotas on disk."""

    __slots__ = ("namespace", "secret")

    def __init__(self, secret: bytes, namespace: str) -> None:
        super().__init__(None, (), (), PageId(0), 0.0)
        self.secret = secret
        self.namespace = namespace


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many items the two begin with in common."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit  # left[:low] is equal, left[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def covers(node: Node, ids: tuple[int, ...], calls: tuple[int, ...]) -> bool:
    """The page begins with ``ids`` as ``calls`` computed them."""
    return node.ids[: len(ids)] == ids and node.calls[: len(calls)] == calls
