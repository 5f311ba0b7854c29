"""The page index: which token ids the pages on the device hold. A tree per tenant secret, one node per page.

Keys are the ids themselves, so nothing is trusted to a hash. The tree is closed under prefixes: a node exists exactly as
long as its page is on the device and so are all pages before it; eviction takes leaves. A node with fewer ids than a
page is a partial page: a snapshot's end. It is never written again: whoever goes on from it copies it first.

The index owns each page once in the ledger. Turns pin the deepest node they stand on; ``pins`` counts pins in the whole
subtree, so a node with ``pins`` 0 is idle and so is everything below it. Bound: one node per page of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvalet.runtime.plan import PageId
from kvalet.sched.pages import PageLedger
from kvalet.sched.policy import Rank, rank_pages
from kvalet.sched.ranking import Ranking

if TYPE_CHECKING:
    from kvalet.sched.chunks import Chunk
    from kvalet.sched.session import Turn


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
        self.wanters: set[Turn] = set()

    def __repr__(self) -> str:
        return f"Node(page={self.page}, end={self.end}, ids={len(self.ids)}, pins={self.pins}, children={len(self.children)})"

    @property
    def start(self) -> int:
        return self.end - len(self.ids)

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


class PageIndex:
    def __init__(self, ledger: PageLedger, page_tokens: int) -> None:
        self._ledger = ledger
        self._page_tokens = page_tokens
        self.roots: dict[bytes, Root] = {}
        self.leaves: dict[Node, None] = {}
        self.ranking: Ranking[Node] = Ranking(self._rank_of, lambda: self.leaves)
        self.n_nodes = 0
        self.n_idle = 0
        """Nodes that no turn stands on or below: their pages can be had by evicting."""

    def _rank_of(self, leaf: Node) -> Rank | None:
        return rank_pages(leaf) if leaf in self.leaves else None

    def root(self, secret: bytes, namespace: str = "") -> Root:
        root = self.roots.get(secret)
        if root is None:
            root = self.roots[secret] = Root(secret, namespace)
        return root

    def walk(self, start: Node, ids: tuple[int, ...], limit: int, calls: tuple[int, ...] = ()) -> list[Node]:
        """The nodes of the whole pages after ``start`` that hold ``ids`` (a turn's ids from position 0), none ending
        beyond ``limit`` tokens. ``calls``: the codes of the turn's positions, empty in ordinary mode."""
        path = []
        node = start
        page_tokens = self._page_tokens
        while node.end + page_tokens <= limit:
            at, end = node.end, node.end + page_tokens
            child = node.children.get(ids[at:end] + calls[at:end])
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def best_partial(
        self, node: Node, ids: tuple[int, ...], limit: int, calls: tuple[int, ...] = ()
    ) -> tuple[Node, int] | None:
        """The child of ``node`` that shares most ids (and calls) with what follows, and how many: at least 1, at most up to
        ``limit``."""
        at, end = node.end, min(limit, node.end + self._page_tokens)
        want, how = ids[at:end], calls[at:end]
        best: tuple[Node, int] | None = None
        for child in node.children.values():
            if not want or child.ids[0] != want[0]:
                continue
            shared = common_prefix(child.ids, want)
            if how:
                shared = min(shared, common_prefix(child.calls, how))
            if shared and (best is None or shared > best[1]):
                best = (child, shared)
        return best

    def insert(self, parent: Node, ids: tuple[int, ...], calls: tuple[int, ...], page: PageId, now: float) -> Node:
        """The node for ``ids`` after ``parent``; to be stepped on or touched next, which ranks it.

        If they are indexed already the old node is returned and ``page`` stays the caller's alone; else the index becomes
        one more owner of ``page``, which must be claimed by somebody.
        """
        node = parent.children.get(ids + calls)
        if node is not None:
            return node
        self._ledger.own(page)
        node = Node(parent, ids, calls, page, now)
        parent.children[node.key] = node
        self.leaves.pop(parent, None)
        self.leaves[node] = None
        self.n_nodes += 1
        self.n_idle += 1
        if len(parent.children) > 1:
            self._drop_covered_partials(parent, node)
        return node

    def _drop_covered_partials(self, parent: Node, node: Node) -> None:
        covered = [
            child
            for child in parent.children.values()
            if len(child.ids) < len(node.ids)
            and child.pins == 0
            and child.chunk is None
            and covers(node, child.ids, child.calls)
        ]
        for child in covered:
            self.remove(child)

    def remove(self, node: Node) -> None:
        """Take an idle leaf out of the index: it gives up the page. Its wanters now want its parent."""
        if node.children or node.pins or node.parent is None or node.chunk is not None:
            raise RuntimeError(f"only an idle leaf that is unlinked from its chunk can be removed: {node}")
        parent = node.parent
        del parent.children[node.key]
        del self.leaves[node]
        if not parent.children and parent.parent is not None:
            self.leaves[parent] = None
            self.ranking.push(parent)
        for turn in node.wanters:
            turn.want_node = parent
            parent.wanters.add(turn)
        self.n_nodes -= 1
        self.n_idle -= 1
        self._ledger.disown(node.page)
        self.prune(parent.root)

    def prune(self, root: Root) -> None:
        """Forget a root that nothing stands on."""
        if not root.children and not root.pins and not root.wanters:
            self.roots.pop(root.secret, None)

    def pin(self, node: Node) -> None:
        """A turn stands on ``node``: it and its ancestors are not idle. O(depth)."""
        at: Node | None = node
        while at is not None:
            if at.pins == 0 and at.parent is not None:
                self.n_idle -= 1
            at.pins += 1
            at = at.parent

    def unpin(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.pins -= 1
            if at.pins == 0 and at.parent is not None:
                self.n_idle += 1
            at = at.parent
        self.ranking.push(node)
        self.prune(node.root)

    def step_down(self, child: Node) -> Node:
        """Move a pin from ``child``'s parent to ``child``. O(1): the ancestors' counts do not change."""
        if child.pins == 0:
            self.n_idle -= 1
        child.pins += 1
        return child

    def touch(self, node: Node, now: float) -> list[Chunk]:
        """``node`` and its ancestors were used. O(depth). Returns the chunks that end in them, deepest first."""
        used = []
        at: Node | None = node
        while at is not None:
            at.last_use = now
            if at.chunk is not None:
                used.append(at.chunk)
            at = at.parent
        self.ranking.push(node)
        return used

    def demote(self, leaf: Node) -> None:
        """Nobody cares for these pages any more: back to where others share them they are the first to leave."""
        at = leaf
        while at.parent is not None and at.pins == 0 and len(at.children) <= (0 if at is leaf else 1):
            at.last_use = 0.0
            at = at.parent
        self.ranking.push(leaf)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        stack: list[Node] = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())
