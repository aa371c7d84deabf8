"""Hashes of prefixes, by which a router finds the replica that has a prompt's prefix cached.

The hash of a prefix is a sum, modulo 2**64, of one mixed number for each token and its position,
and of one for the namespace. So the hash of a longer prefix goes on from that of a shorter one, and
one pass over a prompt gives the hashes of all its prefixes. It does not depend on the page size.

Two prefixes with equal hashes send a request to the wrong replica, which then computes the prompt:
the replica compares ids, not hashes. The mixing function is the finalizer of SplitMix64 (Steele et
al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from itertools import count, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from minisgl.core.req import IdArray
from minisgl.kvcache.base import BasePrefixCache
from minisgl.kvcache.radix import RadixPrefixCache, _Node

Hashes = npt.NDArray[np.uint64]

MAX_HASHES: Final = 2048
"""A replica reports at most so many hashes, which are 16 KB and some 400 long prompts."""

MAX_EDGE_HASHES: Final = 16
"""An edge has at most so many hashes, in models whose states or windows decide where a request can
resume."""


def prompt_hashes(ids: IdArray, page_size: int, namespace: str = "") -> Hashes:
    """Return the hash of each prefix of `ids` of 1, 2, 3, ... whole pages."""
    return _page_sums(ids, page_size, 0) + _namespace_hash(namespace)


class TreeHashes:
    """The hashes that a replica reports of its tree, made on each call. Mutable: it remembers those
    of edges that have not changed since the last call.

    A branch is the edges from one fork of the tree to the next, or to a leaf. A branch reports the
    hash of its end, and those of the prefixes that end 1, 4, 16, 64, ... pages before it. A prompt
    may leave the tree n pages before the end of a branch, as a chat does whose last answer is
    written otherwise. It then finds at least all but 3 n pages of the common prefix, and the place
    becomes a fork. In a model with states or windows, each edge reports its last prefixes after
    which a request can resume.
    """

    def __init__(self, cache: BasePrefixCache, limit: int = MAX_HASHES) -> None:
        self._cache, self._limit = cache, limit
        self._edges: dict[int, _Edge] = {}  # by the node's id()
        self._roots: dict[str, _Edge] = {}

    def __call__(self) -> Hashes:
        """Return at most `limit` hashes, those of branches that were used last first."""
        cache = self._cache
        if not isinstance(cache, RadixPrefixCache):
            return np.empty(0, np.uint64)
        # A node is used whenever one below it is, so each node's parent comes before it.
        heap: list[tuple[int, int, _Node, _Edge, bool]] = []
        numbers = count()

        def push(nodes: Iterable[_Node], above: _Edge, starts: bool) -> None:
            for node in nodes:
                heapq.heappush(heap, (-node.last_used, next(numbers), node, above, starts))

        self._roots = {name: self._roots.get(name) or _root(name) for name in cache.roots}
        for name, root in cache.roots.items():
            push(root.children.values(), self._roots[name], True)
        edges: dict[int, _Edge] = {}
        reported: list[Hashes] = []
        num_reported = 0
        while heap and num_reported < self._limit:
            _, _, node, above, starts = heapq.heappop(heap)
            edge = self._edges.get(id(node))
            if edge is None or not edge.is_still(node, above, starts):
                edge = _Edge(node.ids, above, starts, cache.page_size)
            edges[id(node)] = edge
            is_end = len(node.children) != 1
            push(node.children.values(), edge, is_end)
            if (pages := cache.resumable(node)) is not None:
                reported.append(edge.hashes[list(islice(pages, MAX_EDGE_HASHES))])
            elif is_end:
                reported.append(edge.reported())
            else:
                continue
            num_reported += len(reported[-1])
        self._edges = edges
        return np.concatenate(reported)[: self._limit] if reported else np.empty(0, np.uint64)


class _Edge:
    """The hashes of an edge. Mutable: it makes those that its branch reports at the first call.

    above: the edge that it continues. starts: whether it begins a branch. hashes: one for each of
    its pages. end: the number of pages from the root to its end.
    """

    __slots__ = ("_reported", "above", "end", "hashes", "ids", "starts")

    def __init__(self, ids: IdArray, above: _Edge | None, starts: bool, page_size: int) -> None:
        self.ids, self.above, self.starts = ids, above, starts
        self.hashes, self.end = np.empty(0, np.uint64), 0
        self._reported: Hashes | None = None
        if above is not None:
            sums = _page_sums(ids, page_size, above.end * page_size)
            self.hashes, self.end = sums + above.hashes[-1], above.end + len(sums)

    def is_still(self, node: _Node, above: _Edge, starts: bool) -> bool:
        """Whether nothing has changed. A change of the node replaces its ids."""
        return self.ids is node.ids and self.above is above and self.starts is starts

    def reported(self) -> Hashes:
        """Return the hashes that the branch which ends here reports."""
        if self._reported is None:
            edge, parts = self, [self.hashes]
            while not edge.starts:
                assert edge.above is not None
                edge = edge.above
                parts.append(edge.hashes)
            whole = np.concatenate(parts[::-1])
            self._reported = whole[np.array(reported_lengths(len(whole))) - 1]
        return self._reported


def _root(namespace: str) -> _Edge:
    root = _Edge(np.empty(0, np.int32), None, True, 1)
    root.hashes = np.array([_namespace_hash(namespace)], np.uint64)
    return root


def reported_lengths(num_pages: int) -> list[int]:
    """Return the lengths, in pages, of the prefixes that a branch of `num_pages` reports."""
    lengths, before = [num_pages], 1
    while before < num_pages:
        lengths.append(num_pages - before)
        before *= 4
    return lengths


def _page_sums(ids: IdArray, page_size: int, start: int) -> Hashes:
    """The sums of the numbers up to the end of each whole page. start: the first id's position."""
    sums = np.cumsum(_mixed(ids, start), dtype=np.uint64)
    return sums[page_size - 1 :: page_size].copy()


def _mixed(ids: IdArray, start: int) -> Hashes:
    """One number for each token at its position. start: the position of the first."""
    x = np.arange(start, start + len(ids), dtype=np.uint64)
    x <<= np.uint64(32)
    x += ids.astype(np.uint64)
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _namespace_hash(namespace: str) -> np.uint64:
    digest = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little")) if namespace else np.uint64(0)
