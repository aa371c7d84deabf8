"""The prefix tree of a model with window and state groups: pages that may be missing.

A full group's pages cover a prefix without holes. A window or state group (a *tail* group) needs
only the pages near the last computed token, so a node of the tree may lack its pages::

    ids          |=== node ===|=== node ========|
    full         | 0  1  2  3 | 4  5  6  7  8  9|
    window 2     | .  .  2  3 | .  .  .  .  8  9|     resume at 4 pages or at 10, not at 6
    state        | .  .  .  3 | .  .  .  .  .  9|
    rows         |            |                 |     never in the tree

A request can resume at a position for which every group has the pages that the next token reads.
Each group has its own order of eviction (`minisgl_zoo.cache_groups.tails`): evicting a window page
leaves the node in place. When the full group loses a page of a node, the tail groups lose theirs of
that position as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from minisgl.core.groups import CacheGroup
from minisgl.core.req import IdArray
from minisgl.kvcache.radix import RadixHandle, RadixPrefixCache, _Node
from minisgl_zoo.cache_groups.groups import TailGroup
from minisgl_zoo.cache_groups.tails import NO_PAGE, Entry, Tail


class GroupedPrefixCache(RadixPrefixCache):
    """The tree of a model with tail groups. Mutable; the scheduler owns it."""

    def __init__(
        self,
        page_size: int,
        common_prefix: Callable[[IdArray, IdArray], int],
        groups: Sequence[CacheGroup],
        *,
        shares: bool,
    ) -> None:
        """groups: at most one is full, the first. shares: whether requests share prefixes."""
        super().__init__(page_size, common_prefix)
        first, *others = groups
        self.shares = shares
        self.full = first if first.kind == "full" else None
        tails = [
            (index, group) for index, group in enumerate(groups) if isinstance(group, TailGroup)
        ]
        assert len(tails) == len(others) + (self.full is None), groups
        self.tails = [
            Tail(index, column, group, page_size) for column, (index, group) in enumerate(tails)
        ]

    def find(self, ids: IdArray, namespace: str, step: int) -> tuple[RadixHandle, RadixHandle, int]:
        """Return three positions on the path of `ids`: the end of the full group's match, where a
        row of `step` can resume, and the number of tokens where a row of a later step could."""
        parts = list(self._follow(self._root(namespace), ids))
        now, later = self._resume(parts, step), self._resume(parts, None)
        if now == sum(num_tokens for _, num_tokens in parts):
            end = self.match(ids, namespace)
            return end, end, later
        resume = self.match(ids[:now], namespace)  # first: it may remove an empty end of an edge
        return self.match(ids, namespace), resume, later

    def num_cached(self, ids: IdArray, namespace: str = "") -> int:
        return self._resume(list(self._follow(self._root(namespace), ids)), None)

    def _resume(self, parts: list[tuple[_Node, int]], step: int | None) -> int:
        """Return the largest number of tokens after which every group has the pages that the next
        token reads. A state that `step` or a later step writes does not count."""
        page_size = self.page_size
        index = sum(num_tokens for _, num_tokens in parts) // page_size
        columns = []
        for tail in self.tails:  # rows: at the position of a state none is read
            column = self._column(tail, parts)
            if step is not None and tail.group.kind == "state":
                entries = tail.entries
                column = [
                    page if page >= 0 and entries[page].step < step else NO_PAGE for page in column
                ]
            columns.append(column)
        while index > 0:
            missing = NO_PAGE
            for tail, column in zip(self.tails, columns, strict=True):
                first = tail.group.first_page(index * page_size, page_size)
                at = index - 1
                while at >= first and column[at] >= 0:
                    at -= 1
                if at >= first:
                    missing = max(missing, at)
            if missing < 0:
                break
            index = missing  # any position between reads the missing page as well
        return index * page_size

    def _column(self, tail: Tail, parts: list[tuple[_Node, int]]) -> list[int]:
        return [
            page
            for node, num_tokens in parts
            for page in node.tails[tail.column][: num_tokens // self.page_size]
        ]

    def tail_pages(self, position: RadixHandle, tail: Tail) -> list[int]:
        """Return the group's pages from the first token to a position, `NO_PAGE` where one is
        missing."""
        return [page for node in position.path() for page in node.tails[tail.column]]

    def insert_tails(
        self, end: RadixHandle, columns: list[list[int]], step: int, num_cached: int
    ) -> None:
        """Offer the tree the tail pages of the tokens before `end`, a list for each group. It takes
        those that it lacks; the caller still holds them. num_cached: where the caller resumed."""
        at = len(columns[0])
        before = end.num_tokens // self.page_size - at
        num_cached //= self.page_size
        node: _Node | None = end.node
        while at > 0:
            assert node is not None
            count = len(node.ids) // self.page_size
            at -= count
            if not node.tails:
                node.tails = [[NO_PAGE] * count for _ in self.tails]
            for tail, column, held in zip(self.tails, columns, node.tails, strict=True):
                if tail.group.kind == "rows":
                    continue
                for index in range(count):
                    page = column[at + index]
                    if page >= 0 and held[index] < 0:
                        held[index] = page
                        saved = before + at + index + 1 - num_cached
                        tail.entries[page] = Entry(node, step, saved)
            node = node.parent
        assert at == 0, "the pages start inside a node"

    def take(self, tail: Tail, count: int) -> list[int]:
        """Allocate tail pages. Evicts idle pages of the tree if too few are free."""
        while tail.allocator.num_free < count:
            self._blank(tail, tail.first_to_evict())
        return tail.allocator.allocate(count)

    def prune(self, node: _Node) -> None:
        """Remove unlocked leaves without pages, from `node` up. A full group's are evicted."""
        while (
            self.full is None
            and self._is_evictable(node)
            and all(page < 0 for pages in node.tails for page in pages)
        ):
            parent = node.parent
            assert parent is not None
            self._shorten(node, 0)
            node = parent

    def drop(self, step: int) -> list[int]:
        dropped = super().drop(step)
        for tail in self.tails:
            for page, entry in list(tail.entries.items()):
                if entry.step >= step:
                    self._blank(tail, page)
        for node in list(self.nodes()):  # some have lost their children
            self.prune(node)
        return dropped

    def resumable(self, node: _Node) -> Iterator[int]:
        if not node.tails:
            return iter(())
        tails = zip(self.tails, node.tails, strict=True)
        columns = [pages for tail, pages in tails if tail.group.kind != "rows"]
        count = len(node.ids) // self.page_size
        return (at for at in range(count)[::-1] if all(column[at] >= 0 for column in columns))

    def _blank(self, tail: Tail, page: int) -> None:
        node = tail.entries[page].node
        pages = node.tails[tail.column]
        pages[pages.index(page)] = NO_PAGE
        tail.forget(page)
        self.prune(node)

    def _split(self, node: _Node, at: int) -> _Node:
        upper = super()._split(node, at)
        count = at // self.page_size
        upper.tails = [pages[:count] for pages in node.tails]
        node.tails = [pages[count:] for pages in node.tails]
        for tail, pages in zip(self.tails, upper.tails, strict=True):
            for page in pages:
                if page >= 0:
                    tail.entries[page].node = upper
        self.prune(node)  # its pages may all be the upper part's now
        return upper

    def _shorten(self, node: _Node, keep: int) -> list[int]:
        for tail, pages in zip(self.tails, node.tails, strict=True):
            for page in pages[keep:]:
                if page >= 0:
                    tail.forget(page)
            del pages[keep:]
        return super()._shorten(node, keep)

    def _offer(self, node: _Node) -> None:
        if self.full is not None:  # else nothing is evicted through the heap
            super()._offer(node)
