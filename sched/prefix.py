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
from kvalet.sched.node import NOBODY as NOBODY  # the names below are at home here for everybody else
from kvalet.sched.node import Node as Node
from kvalet.sched.node import Root as Root
from kvalet.sched.node import common_prefix as common_prefix
from kvalet.sched.node import covers as covers
from kvalet.sched.pages import PageLedger
from kvalet.sched.policy import Rank, rank_pages
from kvalet.sched.ranking import Ranking

if TYPE_CHECKING:
    from kvalet.sched.chunks import Chunk


class PageIndex:
    def __init__(self, ledger: PageLedger, page_tokens: int) -> None:
        self._ledger = ledger
        self._page_tokens = page_tokens
        self.roots: dict[bytes, Root] = {}
        self.leaves: dict[Node, None] = {}
        self.ranking: Ranking[Node] = Ranking(self._rank_of, lambda: self.leaves)
        self.by_page: dict[PageId, Node] = {}
        self.n_nodes = 0
        self.n_idle = 0
        """Nodes that no turn stands on or below: their pages can be had by evicting."""

    def _rank_of(self, leaf: Node) -> Rank | None:
        """None for one that turns stand on, or a transfer takes away: whoever ends that pushes it again."""
        busy = leaf.pins or (leaf.chunk is not None and leaf.chunk.outgoing is not None)
        return rank_pages(leaf) if not busy and leaf in self.leaves else None

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
        self.by_page[page] = node
        self.leaves.pop(parent, None)
        self.leaves[node] = None
        self.n_nodes += 1
        self.n_idle += 1
        if len(parent.children) > 1:
            self._drop_covered_partials(parent, node)
        return node

    def insert_run(self, parent: Node, ids: tuple[int, ...], pages: Sequence[PageId], now: float) -> Node:
        """``insert`` page after page, ``ids`` in whole pages but the last (ordinary mode). Returns the last node."""
        size = self._page_tokens
        node, at = parent, 0
        new: list[PageId] = []
        for page in pages:
            part = ids[at : at + size]
            at += size
            children = node.children
            child = children.get(part)
            if child is None:
                if not new:
                    self.leaves.pop(node, None)
                new.append(page)
                child = children[part] = self.by_page[page] = Node(node, part, (), page, now)
            node = child
        if new:
            self._ledger.own_all(new)
            self.n_nodes += len(new)
            self.n_idle += len(new)
            self.leaves[node] = None
            first = node
            for _ in new[1:]:
                first = first.parent  # type: ignore[assignment]  # no root among the new ones
            assert first.parent is not None
            if len(first.parent.children) > 1:
                self._drop_covered_partials(first.parent, first)
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
        del self.by_page[node.page]
        del self.leaves[node]
        if not parent.children and parent.parent is not None:
            self.leaves[parent] = None
            self.ranking.push(parent)
        for turn in node.wanters:
            turn.want_node = parent
            parent.want(turn)
        self.n_nodes -= 1
        self.n_idle -= 1
        self._ledger.disown(node.page)
        self.prune(parent.root)

    def remove_run(self, nodes: Sequence[Node]) -> None:
        """``remove`` one after the other: a leaf, then its parent if it has no other child, and so on."""
        parent = nodes[-1].parent
        below: Node | None = None
        for node in nodes:
            in_the_way = len(node.children) != (below is not None) or (below is not None and below.parent is not node)
            if in_the_way or node.pins or node.parent is None or node.chunk is not None:
                raise RuntimeError(f"only idle nodes unlinked from their chunks, leaf first, can be removed: {node} in {nodes}")
            for turn in node.wanters:
                turn.want_node = parent
                parent.want(turn)  # type: ignore[union-attr]  # not None: looked at above, at the last node
            below = node
        assert parent is not None
        for node in nodes:
            node.children.clear()
            del self.by_page[node.page]
        del parent.children[nodes[-1].key]
        del self.leaves[nodes[0]]
        if not parent.children and parent.parent is not None:
            self.leaves[parent] = None
            self.ranking.push(parent)
        self.n_nodes -= len(nodes)
        self.n_idle -= len(nodes)
        self._ledger.disown_all([node.page for node in nodes])
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
