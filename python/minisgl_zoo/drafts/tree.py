"""Drafts from the prefix tree: what followed this prefix last time, also in another request.

An agent that repeats a task, a test that runs again and a user who asks once more get the same
answer as before as long as nothing differs. Requests see only the tree of their own namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from minisgl.core.image import LOWEST
from minisgl.core.req import IdArray, Req
from minisgl.kvcache.base import BaseCacheHandle
from minisgl.kvcache.radix import MAX_BRANCHES, RadixHandle, RadixPrefixCache
from minisgl.scheduler.requests import Requests


class Continuation:
    """Mutable: where the request is in a branch of the tree. A branch may be evicted meanwhile; its
    ids are guesses all the same."""

    name = "tree"
    is_fresh = False

    def __init__(self, req: Req, requests: Requests) -> None:
        tree = requests.cache.prefix_cache
        self._req = req
        self._tree = tree if isinstance(tree, RadixPrefixCache) else None
        self._ids: list[int] = []
        self._at = 0
        self._num_added = 0
        self.is_over = False
        self._search()

    def next(self, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may come next."""
        return self._ids[self._at : self._at + count]

    def add(self, token: int) -> None:
        """Append a token of the output."""
        self._num_added += 1
        if self._at < len(self._ids) and self._ids[self._at] == token:
            self._at += 1
            if self._at < len(self._ids):
                return
        self._search()

    def _search(self) -> None:
        """Find a branch with all tokens so far. Without one there will be none later: branches that
        are new do not continue this prefix."""
        req = self._req
        self._ids, self._at = [], 0
        if self._tree is None:
            self.is_over = True
            return
        if req.handle is None:
            return
        position = req.handle.position
        end = req.num_prompt + self._num_added
        ids = req.ids_in_tree(position.num_tokens, end)
        found = following(self._tree, position, ids)
        if (is_image := found >= LOWEST).any():  # of another request; no answer has such ids
            found = found[: is_image.argmax()]
        self._ids = found.tolist()
        self.is_over = not self._ids


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
