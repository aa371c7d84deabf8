"""A radix tree over token ids. Its edges own KV pages: requests share those of a common prefix.

::

    root ──[You are a helpful …]──┬──[What is a radix tree?]      an edge: ids and their pages
             locks=2              ├──[What is a page?]            locks: running requests below
                                  └──…

An edge covers whole pages. It is split where two requests diverge. A request meets the tree three
times, each time through `minisgl.kvcache.manager`::

    starts    match    find the longest cached prefix of its ids: a *handle*
              lock     keep that prefix while the request runs
    computes  insert   give the tree the full pages whose ids the host has; the step that writes
                       them is launched before any step that reads them. Where the tree has pages
                       of the same tokens, the request keeps its own: *duplicates*
    leaves    unlock   the pages stay in the tree, until `evict` frees them for others

Leaves that no running request needs are evicted, least recently used first. The idea is
RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
2023). The tree is path-compressed as in Morrison's PATRICIA (1968).

Why not a hash per page: a chain of hashes finds a prefix as fast, but does not say which pages can
be evicted without orphaning others. The tree does.

Each namespace has its own root, so requests of two namespaces share nothing. A root exists as long
as it has children. Eviction treats all namespaces alike.

The clock of the LRU order counts operations, not seconds, because every rank must evict the same
pages. The heap may hold outdated times: if `evict` pops a leaf that was used since, it pushes the
leaf again with its new time.

`minisgl_zoo.cache_groups` extends the tree for models with window or state groups.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from minisgl.core.req import IdArray
from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache

MAX_BRANCHES = 64
"""`differs_at` compares a prompt with at most this many branches of a node, the newest."""


class _Node:
    """One edge and the position at its end.

    ids: int32; their number is a multiple of the page size. pages: of the full group. tails: for
    each window or state group, a page for each of `pages`, -1 where there is none. locks: the
    number of locked handles at or below this node. step: this step or earlier ones wrote the pages.
    It is at least the parent's, so `drop` finds whole subtrees. namespace: set on a root.
    """

    __slots__ = (
        "children",
        "ids",
        "in_heap",
        "last_used",
        "locks",
        "namespace",
        "pages",
        "parent",
        "step",
        "tails",
    )

    def __init__(self, ids: IdArray, pages: list[int], parent: _Node | None, step: int) -> None:
        self.ids = ids
        self.pages = pages
        self.parent = parent
        self.step = step
        self.children: dict[bytes, _Node] = {}
        self.locks = 0
        self.last_used = 0
        self.in_heap = False
        self.namespace = ""
        self.tails: list[list[int]] = []


class RadixHandle(BaseCacheHandle):
    """The end of a node's edge. When an edge is split, the lower part keeps its object, so handles
    stay valid."""

    __slots__ = ("node", "num_tokens")

    def __init__(self, node: _Node, num_tokens: int) -> None:
        self.node = node
        self.num_tokens = num_tokens

    def pages(self) -> list[int]:
        return [page for node in self.path() for page in node.pages]

    def path(self) -> Iterator[_Node]:
        """Return the nodes from the first below the root to this one."""
        nodes: list[_Node] = []
        node = self.node
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return reversed(nodes)


class RadixPrefixCache(BasePrefixCache):
    """The prefix cache of `--cache radix`; `BasePrefixCache` says what its methods return. Mutable;
    the scheduler's cache manager owns it.

    common_prefix: returns how many leading ids of two arrays are equal. roots: by namespace, those
    with children.
    """

    shares = True

    def __init__(self, page_size: int, common_prefix: Callable[[IdArray, IdArray], int]) -> None:
        self.page_size = page_size
        self._common_prefix = common_prefix
        self.roots: dict[str, _Node] = {}
        self.num_evictable = 0
        self._clock = 0
        self._heap: list[tuple[int, int, _Node]] = []
        self._pushes = 0

    def match(self, ids: IdArray, namespace: str = "") -> RadixHandle:
        node, matched = self._walk(self._root(namespace), ids)
        return RadixHandle(node, matched)

    def num_cached(self, ids: IdArray, namespace: str = "") -> int:
        return sum(common for _, common in self._follow(self._root(namespace), ids))

    def differs_at(self, ids: IdArray, namespace: str = "") -> int | None:
        node, at = self._root(namespace), 0
        branches: Sequence[_Node] = ()
        for child, common in self._follow(node, ids):
            if common < len(child.ids):
                branches = (child,)
                break
            node, at = child, at + common
        if not branches:  # no branch has the next page; sorted, the closest is its neighbour
            newest = sorted(islice(reversed(node.children), MAX_BRANCHES))
            index = bisect_left(newest, self._key(ids[at:]))
            branches = [node.children[key] for key in newest[max(index - 1, 0) : index + 1]]
        end = at + max((self._common_prefix(one.ids, ids[at:]) for one in branches), default=0)
        return end if branches and end < len(ids) else None

    def num_common(self, a: IdArray, b: IdArray) -> int:
        common = self._common_prefix(a, b)
        return common - common % self.page_size

    def insert(
        self, handle: BaseCacheHandle, ids: IdArray, pages: list[int], step: int
    ) -> tuple[RadixHandle, list[int]]:
        assert isinstance(handle, RadixHandle)
        assert len(ids) == len(pages) * self.page_size, (len(ids), len(pages), self.page_size)
        is_root = handle.node.parent is None
        start = self._root(handle.node.namespace) if is_root else handle.node
        node, matched = self._walk(start, ids)
        num_old = matched // self.page_size
        if matched < len(ids):
            # A copy: `ids` may be a view, which would keep a whole prompt alive.
            leaf = _Node(ids[matched:].copy(), pages[num_old:], node, max(step, node.step))
            leaf.last_used = self._clock
            node.children[self._key(leaf.ids)] = leaf
            if node.parent is None:
                self.roots[node.namespace] = node
            self.num_evictable += len(leaf.pages)
            self._offer(leaf)
            node = leaf
        return RadixHandle(node, handle.num_tokens + len(ids)), pages[:num_old]

    def lock(self, handle: BaseCacheHandle) -> None:
        assert isinstance(handle, RadixHandle)
        node = handle.node
        while node.parent is not None:
            if node.locks == 0:
                self.num_evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, handle: BaseCacheHandle) -> None:
        assert isinstance(handle, RadixHandle)
        node = handle.node
        while node.parent is not None:
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += len(node.pages)
                self._offer(node)
            node = node.parent

    def evict(self, count: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < count and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if not self._is_evictable(node):
                continue  # locked, removed or a parent; offered again if it becomes evictable
            if last_used != node.last_used:
                self._offer(node)
                continue
            # Evict the end of the edge: more requests can match its front.
            keep = max(len(node.pages) - (count - len(evicted)), 0)
            evicted += self._shorten(node, keep)
        return evicted

    def drop(self, step: int) -> list[int]:
        dropped: list[int] = []
        for node in list(self.nodes()):
            if node.step >= step:
                assert node.locks == 0, "a dropped page is locked"
                dropped += self._shorten(node, 0)
        return dropped

    def _root(self, namespace: str) -> _Node:
        """Return the namespace's root, or a new one, which `insert` adds with its first child."""
        root = self.roots.get(namespace)
        if root is None:
            root = _Node(np.empty(0, np.int32), [], None, -1)
            root.namespace = namespace
        return root

    def _follow(self, node: _Node, ids: IdArray) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes below `node` that share whole pages with `ids`, from the top down, and
        how many tokens of each match. Changes nothing."""
        matched, end = 0, len(ids) // self.page_size * self.page_size
        while matched < end and (child := node.children.get(self._key(ids[matched:]))):
            common = self._common_prefix(child.ids, ids[matched:end])
            common -= common % self.page_size
            is_whole = common == len(child.ids)
            yield child, common
            if not is_whole:
                return
            node, matched = child, matched + common

    def _walk(self, node: _Node, ids: IdArray) -> tuple[_Node, int]:
        """Follow `ids` down from the end of `node` as far as whole pages match. Splits the edge on
        which they diverge. Returns the last node and the number of tokens that match."""
        self._clock += 1
        above: _Node | None = node
        while above is not None:
            above.last_used = self._clock
            above = above.parent
        matched = 0
        for child, common in self._follow(node, ids):
            node = child if common == len(child.ids) else self._split(child, common)
            node.last_used = self._clock
            matched += common
        return node, matched

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut an edge after `at` tokens. Returns the upper part, a new node."""
        assert 0 < at < len(node.ids), (at, len(node.ids))
        assert node.parent is not None
        num_pages = at // self.page_size
        upper = _Node(node.ids[:at], node.pages[:num_pages], node.parent, node.step)
        upper.locks = node.locks
        node.parent.children[self._key(upper.ids)] = upper
        node.ids = node.ids[at:]
        node.pages = node.pages[num_pages:]
        node.parent = upper
        upper.children[self._key(node.ids)] = node
        return upper

    def _key(self, ids: IdArray) -> bytes:
        return ids[: self.page_size].tobytes()

    def _is_evictable(self, node: _Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _offer(self, node: _Node) -> None:
        """Put an evictable leaf on the heap, once."""
        if not node.in_heap and self._is_evictable(node):
            node.in_heap = True
            self._pushes += 1  # breaks ties between equal times, because nodes have no order
            heapq.heappush(self._heap, (node.last_used, self._pushes, node))

    def _shorten(self, node: _Node, keep: int) -> list[int]:
        """Keep the first `keep` pages of an unlocked leaf. Returns the others.

        Removes the leaf if `keep` is 0.
        """
        pages = node.pages[keep:]
        self.num_evictable -= len(pages)
        node.pages = node.pages[:keep]
        if keep:
            node.ids = node.ids[: keep * self.page_size]
            self._offer(node)
        else:
            self._remove(node)
        return pages

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node.ids)]
        node.parent = None
        if parent.parent is None and not parent.children:
            del self.roots[parent.namespace]
        self._offer(parent)

    def resumable(self, node: _Node) -> Iterator[int] | None:
        """Return the indices of the pages of an edge after which a request can resume, the last
        first; None if it can after each."""
        return None

    def nodes(self) -> Iterator[_Node]:
        """Yield every node except the roots, children before parents."""
        stack = [node for root in self.roots.values() for node in root.children.values()]
        order: list[_Node] = []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        return reversed(order)
