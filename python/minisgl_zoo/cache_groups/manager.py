"""Page bookkeeping of requests whose model has window and state groups.

Such a group (a *tail* group) needs only the pages near the last computed token, so a request
releases the others while it runs (`minisgl_zoo.cache_groups.tree` has a drawing).

Where a request resumes, the full group may have cached more tokens than the others. They are
computed again for the other groups, and the pages of the full group are not written again
(`Plan.stored`).

A tail page belongs to one request, or to the tree, which counts the requests that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from minisgl.core.args import CacheKind
from minisgl.core.groups import CacheGroup
from minisgl.core.plan import MOST_DRAFTS, NewPages
from minisgl.core.req import IdArray, Req
from minisgl.kernel.radix import load_common_prefix
from minisgl.kvcache.manager import CacheManager, Holding
from minisgl.kvcache.radix import RadixHandle
from minisgl_zoo.cache_groups.tails import NO_PAGE, NoPages, Tail
from minisgl_zoo.cache_groups.tree import GroupedPrefixCache

ANY_LENGTH = 1 << 40
"""More tokens than a request has."""


@dataclass(slots=True, kw_only=True)
class _GroupedHolding(Holding):
    """Mutable. position: the end of the locked prefix. cursor: the end of the prefix that the
    request has published, at or before `position`. tails: for each tail group, the page at each
    page index of the request, `NO_PAGE` where it holds none. firsts: below these indices it holds
    none. num_cached: tokens before the position where it resumed. has_run: whether it has been
    planned since.
    """

    cursor: RadixHandle
    tails: list[list[int]]
    firsts: list[int]
    num_cached: int
    has_run: bool = False


class GroupedCacheManager(CacheManager):
    """Page bookkeeping of a model with tail groups. Mutable."""

    def __init__(self, tree: GroupedPrefixCache, chunk: int) -> None:
        """chunk: the most prompt tokens of a step."""
        super().__init__(tree.full.num_pages if tree.full else 0, tree)
        if tree.full is None:
            self._allocator = NoPages()
        self._tree = tree
        self._tails = tree.tails
        self._chunk = chunk
        intervals = [tail.group.interval for tail in tree.tails if tail.group.kind == "state"]
        self.interval = gcd(*intervals)
        self._multiple = lcm(self.page_size, *intervals)
        self._num_running = 0  # requests that hold pages

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages + sum(tail.group.num_pages for tail in self._tails)

    @property
    def num_used_pages(self) -> int:
        used = sum(tail.group.num_pages - tail.num_available for tail in self._tails)
        return used + (super().num_pages - self._num_available if self._tree.full else 0)

    @property
    def num_cached_pages(self) -> int:
        idle = sum(tail.num_idle for tail in self._tails)
        return idle + (self._tree.num_evictable if self._tree.full else 0)

    def attach(self, req: Req, ids: IdArray, step: int) -> int | None:
        assert req.handle is None, "it holds pages already"
        tree = self._tree
        end, resume, later = tree.find(ids, req.namespace, step)
        num_tokens = resume.num_tokens
        if later > num_tokens:
            return None
        tree.lock(end)
        firsts = [tail.group.first_page(num_tokens, self.page_size) for tail in self._tails]
        tails = []
        for tail, first in zip(self._tails, firsts, strict=True):
            pages = tree.tail_pages(resume, tail)
            pages[:first] = [NO_PAGE] * first
            for page in pages[first:]:
                tail.hold(page)
            tails.append(pages)
        req.handle = _GroupedHolding(
            position=end, cursor=resume, tails=tails, firsts=firsts, num_cached=num_tokens
        )
        req.pages = end.pages()
        req.num_stored = end.num_tokens if tree.full else 0
        self._num_running += 1
        return num_tokens

    def has_room(
        self, req: Req, end: int, unfinished: Sequence[Req], running: Sequence[Req], growth: int
    ) -> bool:
        """See `CacheManager.has_room`. A request that decodes holds more and fewer pages of states
        and rows in turn. So these groups' pages must suffice in each step of the next interval
        (`Tail.peak`), beside the prompts, and when these decode, too."""
        if self._tree.full and not super().has_room(req, end, unfinished, running, growth):
            return False
        prompts = [(req, end), *((other, other.num_known + 1) for other in unfinished)]
        unfinished_uids = {other.uid for other in unfinished}
        decoding = [other.num_known for other in running if other.uid not in unfinished_uids]
        decoding_later = [*decoding, *(num_tokens for _, num_tokens in prompts)]
        for tail in self._tails:
            group, need, most = tail.group, 0, 0
            for request, num_tokens in prompts:
                pages = request.handle.tails[tail.column] if request.handle else ()
                held = sum(page >= 0 for page in pages)
                each = group.most_pages(num_tokens, self._chunk, self.page_size)
                need += max(each - held, 0)
                most += each
            if group.interval:
                peak = max(most + tail.peak(decoding), tail.peak(decoding_later))
                if peak > group.num_pages:
                    return False
            else:
                need += len(running) * self.pages_for(growth)
            if need > tail.num_available:
                return False
        return True

    def chunk_end(self, req: Req, start: int, end: int) -> int:
        if self.interval:  # where prompts diverge
            holding: _GroupedHolding = req.handle
            parting = holding.position.num_tokens // self._multiple * self._multiple
            if start < parting < end:
                return parting
        aligned = end - end % self._multiple
        if end < req.num_known and aligned > start:
            return aligned
        return super().chunk_end(req, start, end)

    def num_free_tokens(self, req: Req, end: int) -> int:
        """See `CacheManager.num_free_tokens`. The tokens end no interval, so that no state is made
        of tokens that may be taken back. There are none unless all requests that run may hold their
        most states and rows at once: `Tail.peak` counts on a token of each in every step."""
        free, most = [], ANY_LENGTH
        for tail in self._tails:
            group = tail.group
            if group.kind != "state":
                free.append(tail.allocator.num_free)
            if group.interval:
                each = group.most_pages(ANY_LENGTH, self._chunk, self.page_size)
                if self._num_running * each > group.num_pages:
                    return 0
                most = min(most, MOST_DRAFTS, group.interval - 1 - end % group.interval)
        if self._tree.full:
            free.append(self._allocator.num_free)
        return min((len(req.pages) + min(free)) * self.page_size - end, most)

    def list_pages(self, req: Req, new_pages: list[NewPages]) -> None:
        if self._tree.full:
            super().list_pages(req, new_pages)
        for tail, pages in zip(self._tails, req.handle.tails, strict=True):
            held = ((index, page) for index, page in enumerate(pages) if page >= 0)
            _add_pages(new_pages, tail.index, req.table_idx, held)

    def extend(self, req: Req, start: int, end: int, new_pages: list[NewPages]) -> bool:
        """Also release the tail pages that no token from `start` on reads. Steps in flight may read
        them. Their next owner writes them in the step that is being planned, or in a later one, and
        these run after the steps in flight."""
        holding: _GroupedHolding = req.handle
        num_pages = self.pages_for(end)
        if not holding.has_run:  # a request that did not get room has used nothing
            holding.has_run = True
            for tail, pages in zip(self._tails, holding.tails, strict=True):
                if tail.group.kind == "state" and holding.num_cached:
                    tail.count_use(pages[holding.num_cached // self.page_size - 1])
        wanted = []
        for tail, pages in zip(self._tails, holding.tails, strict=True):
            self._let_go_before(holding, tail, tail.group.first_page(start, self.page_size))
            new_pages_at = tail.group.new_pages(len(pages), start, end, self.page_size)
            # The row before drafts may have taken a state's.
            wanted.append([at for at in new_pages_at if at >= len(pages) or pages[at] < 0])
            if len(wanted[-1]) > tail.num_available:
                return False
        if self._tree.full:
            if not super().extend(req, start, end, new_pages):
                return False
        else:
            req.pages += [NO_PAGE] * (num_pages - len(req.pages))
        for tail, pages, indices in zip(self._tails, holding.tails, wanted, strict=True):
            pages += [NO_PAGE] * (num_pages - len(pages))
            taken = list(zip(indices, self._tree.take(tail, len(indices)), strict=True))
            for index, page in taken:
                pages[index] = page
            _add_pages(new_pages, tail.index, req.table_idx, taken)
        return True

    def _let_go_before(self, holding: _GroupedHolding, tail: Tail, first: int) -> None:
        pages, column = holding.tails[tail.column], tail.column
        for index in range(holding.firsts[column], min(first, len(pages))):
            if pages[index] >= 0:
                tail.let_go(pages[index])
                pages[index] = NO_PAGE
        holding.firsts[column] = max(first, holding.firsts[column])

    def publish(self, req: Req, end: int, step: int) -> None:
        holding: _GroupedHolding = req.handle
        start = holding.cursor.num_tokens
        end -= end % self.page_size
        if end <= start or not self.shares:
            return
        tree, part = self._tree, slice(start // self.page_size, end // self.page_size)
        position, duplicates = tree.insert(
            holding.cursor, req.ids_in_tree(start, end), req.pages[part], step
        )
        columns = [pages[part] for pages in holding.tails]
        tree.insert_tails(position, columns, step, holding.num_cached)
        # The pages before the locked position are those of the tree, not duplicates.
        num_own = max(holding.position.num_tokens - start, 0) // self.page_size
        holding.duplicates += duplicates[num_own:]
        holding.cursor = position
        if end > holding.position.num_tokens:
            tree.lock(position)
            tree.unlock(holding.position)
            holding.position = position

    def release(self, req: Req) -> None:
        holding: _GroupedHolding = req.handle
        for tail in self._tails:
            self._let_go_before(holding, tail, len(holding.tails[tail.column]))
        super().release(req)
        self._num_running -= 1
        assert isinstance(holding.position, RadixHandle)
        self._tree.prune(holding.position.node)


def _add_pages(
    new_pages: list[NewPages], group: int, row: int, pages: Iterable[tuple[int, int]]
) -> None:
    """Append pages of a request, each with its index there, ascending. Neighbours are one run."""
    end = -1
    for index, page in pages:
        if index != end:
            new_pages.append(NewPages(group, row, index, []))
        new_pages[-1].pages.append(page)
        end = index + 1


def create_manager(
    groups: Sequence[CacheGroup], kind: CacheKind, page_size: int, chunk: int
) -> GroupedCacheManager:
    """See `minisgl.kvcache.create_cache_manager`."""
    tree = GroupedPrefixCache(page_size, load_common_prefix(), groups, shares=kind == "radix")
    return GroupedCacheManager(tree, chunk)
