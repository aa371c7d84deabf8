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
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from minisgl.core.req import IdArray
from minisgl.kvcache.base import BasePrefixCache
from minisgl.kvcache.grouped_tree import GroupedPrefixCache
from minisgl.kvcache.radix import RadixPrefixCache, _Node

Hashes = npt.NDArray[np.uint64]

MAX_HASHES: Final = 2048
"""The most hashes that a replica reports: 16 KB, some 400 long prompts."""

MAX_OF_EDGE: Final = 16
"""The most hashes of an edge, in models whose states or windows decide where a request can
resume."""


def prompt_hashes(ids: IdArray, page_size: int, namespace: str = "") -> Hashes:
    """Return the hash of each prefix of `ids` of 1, 2, 3, ... whole pages."""
    return _page_sums(ids, page_size, 0) + _of_namespace(namespace)


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
        self._edges: dict[int, tuple[IdArray, Hashes]] = {}  # by the node's id(): its ids, hashes

    def __call__(self) -> Hashes:
        """Return at most `limit` hashes, those of branches that were used last first."""
        cache = self._cache
        if not isinstance(cache, RadixPrefixCache):
            return np.empty(0, np.uint64)
        nodes = list(cache._nodes())
        nodes.reverse()  # parents first
        # A node is used whenever one below it is, so each node's parent comes before it.
        nodes.sort(key=lambda node: -node.last_used)
        edges: dict[int, tuple[IdArray, Hashes]] = {}
        branches: dict[int, list[Hashes]] = {}  # by the node's id(): edges since the last fork
        ends: dict[int, tuple[int, np.uint64]] = {}  # by the node's id(): pages, hash
        reported: list[Hashes] = []
        num_reported = 0
        for node in nodes:
            if num_reported >= self._limit:
                break
            parent = node.parent
            assert parent is not None
            start, before = ends.get(id(parent)) or (0, _of_namespace(parent.namespace))
            known = self._edges.get(id(node))
            if known is None or known[0] is not node.ids:  # a change replaces the array
                sums = _page_sums(node.ids, cache.page_size, start * cache.page_size)
                known = node.ids, sums + before
            edges[id(node)] = known
            hashes = known[1]
            ends[id(node)] = start + len(hashes), hashes[-1]
            branch = [*branches.get(id(parent), ()), hashes]
            if isinstance(cache, GroupedPrefixCache):
                reported.append(hashes[_resumable(cache, node)])
            elif len(node.children) == 1:
                branches[id(node)] = branch
                continue
            else:
                whole = np.concatenate(branch)
                reported.append(whole[np.array(told_lengths(len(whole))) - 1])
            num_reported += len(reported[-1])
        self._edges = edges
        return np.concatenate(reported)[: self._limit] if reported else np.empty(0, np.uint64)


def _resumable(cache: GroupedPrefixCache, node: _Node) -> list[int]:
    """The last pages of the edge after which a request can resume."""
    if not node.tails:
        return []
    tails = zip(cache.tails, node.tails, strict=True)
    columns = [pages for tail, pages in tails if tail.group.kind != "rows"]
    count = len(node.ids) // cache.page_size
    found = (index for index in range(count)[::-1] if all(c[index] >= 0 for c in columns))
    return list(islice(found, MAX_OF_EDGE))


def told_lengths(num_pages: int) -> list[int]:
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


def _of_namespace(namespace: str) -> np.uint64:
    digest = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little")) if namespace else np.uint64(0)
