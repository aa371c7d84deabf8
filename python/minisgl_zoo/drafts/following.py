"""What the prefix tree has behind a position: a guess of what a request will say next."""

from __future__ import annotations

from itertools import islice

from minisgl.core.req import IdArray
from minisgl.kvcache.base import BaseCacheHandle
from minisgl.kvcache.radix import MAX_BRANCHES, RadixHandle, RadixPrefixCache


def following(tree: RadixPrefixCache, handle: BaseCacheHandle, ids: IdArray) -> IdArray:
    """Return the ids that followed `ids` behind the position of `handle`, up to the end of an edge;
    those of the newest branch, and none if no branch has all of `ids`. Changes nothing."""
    assert isinstance(handle, RadixHandle)
    node, at = handle.node, 0
    if node.parent is None:
        node = tree._root(node.namespace)
    branches: list[IdArray] = []
    for child, common in tree._follow(node, ids):
        node, at = child, at + common
        if common < len(child.ids):
            branches = [child.ids[common:]]
    if not branches:
        branches = [each.ids for each in islice(reversed(node.children.values()), MAX_BRANCHES)]
    rest = ids[at:]
    for branch in branches:
        if tree._common_prefix(branch, rest) == len(rest):
            return branch[len(rest) :]
    return ids[:0]
