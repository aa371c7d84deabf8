"""Who owns which page: the one place where pages move between free, request and prefix cache.

::

    free ──extend──> private to a request ──publish──> prefix cache ──evict──> free
                             └───────────release (duplicates, partial pages)─────^

`req.pages` is a request's page table. The prefix cache owns its front, which `req.handle` locks.
The request owns the rest, and pages whose tokens the cache already had in other pages.

`CacheManager` serves models with one full group, which is nearly all of them.
`minisgl.kvcache.grouped` extends it to window and state groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minisgl.core.plan import NewPage
from minisgl.core.req import IdArray, Req
from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache
from minisgl.kvcache.pages import PageAllocator


@dataclass(slots=True)
class Holding:
    """`req.handle`: a locked position in the prefix cache, and the request's own copies of pages
    before it. Mutable: it moves forward as the request publishes pages.
    """

    position: BaseCacheHandle
    duplicates: list[int] = field(default_factory=list)


class CacheManager:
    """Page bookkeeping of one scheduler. Mutable; it changes `pages` and `handle` of requests."""

    def __init__(self, num_pages: int, prefix_cache: BasePrefixCache) -> None:
        self._allocator = PageAllocator(num_pages)
        self._prefix_cache = prefix_cache
        self.page_size = prefix_cache.page_size
        self.shares = prefix_cache.shares

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_used_pages(self) -> int:
        """Pages that running requests hold."""
        return self.num_pages - self._num_available

    @property
    def num_cached_pages(self) -> int:
        """Pages that no running request holds, kept for later requests with the same prefix."""
        return self._prefix_cache.num_evictable

    @property
    def _num_available(self) -> int:
        """Pages that are free or that eviction would free."""
        return self._allocator.num_free + self._prefix_cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_cached(self, req: Req, ids: IdArray) -> int:
        """The number of tokens that `attach` would find."""
        return self._prefix_cache.num_cached(ids, req.namespace)

    def num_common(self, req: Req, other: Req) -> int:
        """The number of leading prompt tokens whose pages the two requests could share.

        At least one token of `req` is not counted: a request computes its last token itself.
        """
        if req.namespace != other.namespace:
            return 0
        return self._prefix_cache.num_common(req.prompt[: req.num_tokens - 1], other.prompt)

    def attach(self, req: Req, ids: IdArray, step: int) -> int | None:
        """Give `req`, which holds nothing, the cached prefix of `ids`. Returns its length.

        None, and the request holds nothing, if a step after `step` can use a longer prefix.
        """
        assert req.handle is None, "it holds pages already"
        position = self._prefix_cache.match(ids, req.namespace)
        self._prefix_cache.lock(position)
        req.handle = Holding(position)
        req.pages = position.pages()
        req.num_stored = position.num_tokens
        return position.num_tokens

    def has_room(
        self, req: Req, end: int, unfinished: Sequence[Req], others: int, growth: int
    ) -> bool:
        """Whether `req` can grow to `end` tokens, `unfinished` requests to the end of their known
        tokens, and `others` requests by `growth` tokens each."""
        need = self.pages_for(end) - len(req.pages)
        for other in unfinished:
            need += max(self.pages_for(other.num_known + 1) - len(other.pages), 0)
        return need + others * self.pages_for(growth) <= self._num_available

    def chunk_end(self, req: Req, start: int, end: int) -> int:
        """Where a chunk that starts at `start` and may reach `end` should end. A chunk that is not
        its prompt's last ends with a whole page, as only these can be shared."""
        aligned = end - end % self.page_size
        return aligned if end < req.num_known and aligned > start else end

    def list_pages(self, req: Req, new_pages: list[NewPage]) -> None:
        """Append all pages of a request that has just got its row of the page table."""
        row = req.table_idx
        new_pages += [(0, row, index, page) for index, page in enumerate(req.pages)]

    def extend(self, req: Req, start: int, end: int, new_pages: list[NewPage]) -> bool:
        """Make room for the tokens [start, end) of `req`, which come next, and append the pages
        that this takes. False, and nothing taken, when pages run out."""
        first = len(req.pages)
        count = -(-end // self.page_size) - first
        if count <= 0:
            return True
        missing = count - self._allocator.num_free
        if missing > 0:
            if missing > self._prefix_cache.num_evictable:
                return False
            self._allocator.free(self._prefix_cache.evict(missing))
        pages = self._allocator.allocate(count)
        assert pages is not None, "num_evictable promised these pages"
        req.pages += pages
        row = req.table_idx
        for index, page in enumerate(pages, first):
            new_pages.append((0, row, index, page))
        return True

    def publish(self, req: Req, end: int, step: int) -> None:
        """Let others share the whole pages of `req` below `end`.

        Their ids are committed. The step that writes them, `step` at the latest, is launched or
        about to be, so in stream order later steps can read them.
        """
        holding: Holding = req.handle
        start = holding.position.num_tokens
        end -= end % self.page_size
        if end <= start or not self.shares:
            return
        pages = req.pages[start // self.page_size : end // self.page_size]
        position, duplicates = self._prefix_cache.insert(
            holding.position, req.token_ids(start, end), pages, step
        )
        self._prefix_cache.lock(position)
        self._prefix_cache.unlock(holding.position)
        holding.position = position
        holding.duplicates += duplicates

    def release(self, req: Req) -> None:
        """Take back all pages of `req`. Those that it published stay in the prefix cache,
        evictable."""
        holding: Holding = req.handle
        first_private = holding.position.num_tokens // self.page_size
        self._allocator.free(req.pages[first_private:] + holding.duplicates)
        self._prefix_cache.unlock(holding.position)
        req.pages = []
        req.handle = None
        req.num_stored = 0

    def drop(self, step: int) -> None:
        """Forget the pages that `step` or a later one was to write. No request may hold them."""
        self._allocator.free(self._prefix_cache.drop(step))

    def check(self, holders: list[Req]) -> None:
        """Raise AssertionError unless every page is in one place and every lock has its holder.

        `holders` are the requests that hold pages. Slow: for tests.
        """
        held = dict(self._prefix_cache.held_pages())
        locks = dict.fromkeys(held, 0)
        private: list[int] = []
        for req in holders:
            holding: Holding = req.handle
            for page in holding.position.pages():
                locks[page] += 1
            first_private = holding.position.num_tokens // self.page_size
            private += req.pages[first_private:] + holding.duplicates
        everywhere = sorted([*self._allocator.free_pages(), *held, *private])
        assert everywhere == list(range(self._allocator.num_pages)), "pages lost or owned twice"
        assert locks == held, "locks do not match their holders"
        unlocked = sum(count == 0 for count in held.values())
        assert unlocked == self._prefix_cache.num_evictable, (
            unlocked,
            self._prefix_cache.num_evictable,
        )
