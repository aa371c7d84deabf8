"""Who owns which page: the one place where pages move between free, request and prefix cache.

::

    free ──extend──> private to a request ──publish──> prefix cache ──evict──> free
                             └───────────release (duplicates, partial pages)─────^

A request's page table is `req.pages`. Its front is locked in the prefix cache by `req.handle`;
the rest, and duplicates of pages that the cache already had, are private to the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.core.req import IdArray, Req
from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache
from minisgl.kvcache.pages import PageAllocator


@dataclass(slots=True)
class _Holding:
    """`req.handle`: a locked position in the prefix cache, and what was computed twice before it.

    Mutable: it moves forward as the request publishes pages.
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
    def num_available(self) -> int:
        """Pages that are free or that eviction would free."""
        return self._allocator.num_free + self._prefix_cache.num_evictable

    @property
    def num_cached_pages(self) -> int:
        """Pages that no running request holds, kept in case somebody comes with their prefix."""
        return self._prefix_cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_cached(self, req: Req, ids: IdArray) -> int:
        """The number of tokens that `attach` would find."""
        return self._prefix_cache.num_cached(ids, req.namespace)

    def attach(self, req: Req, ids: IdArray) -> int:
        """Give `req`, which holds nothing, the cached prefix of `ids`; returns its tokens."""
        assert req.handle is None, "it holds pages already"
        position = self._prefix_cache.match(ids, req.namespace)
        self._prefix_cache.lock(position)
        req.handle = _Holding(position)
        req.pages = position.pages()
        return position.num_tokens

    def extend(self, req: Req, end: int) -> bool:
        """Make room for the tokens [0, end) of `req`; False, and no change, when pages run out."""
        count = -(-end // self.page_size) - len(req.pages)
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
        return True

    def publish(self, req: Req, end: int, step: int) -> None:
        """Let others share the full pages of `req` below `end`.

        Their ids are committed and the step that writes them, `step` at the latest, is launched
        or about to be: stream order makes them readable by whoever comes later.
        """
        holding: _Holding = req.handle
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
        """Take back what `req` holds; what it published stays in the prefix cache, evictable."""
        holding: _Holding = req.handle
        first_private = holding.position.num_tokens // self.page_size
        self._allocator.free(req.pages[first_private:] + holding.duplicates)
        self._prefix_cache.unlock(holding.position)
        req.pages = []
        req.handle = None

    def drop(self, step: int) -> None:
        """Forget pages that `step` or a later one was to write. No request may hold them."""
        self._allocator.free(self._prefix_cache.drop(step))

    def check(self, holders: list[Req]) -> None:
        """Raise AssertionError unless every page is in one place and every lock has its holder.

        `holders` are the requests that hold pages. Slow: for tests.
        """
        held = dict(self._prefix_cache.held_pages())
        locks = dict.fromkeys(held, 0)
        private: list[int] = []
        for req in holders:
            holding: _Holding = req.handle
            for page in holding.position.pages():
                locks[page] += 1
            first_private = holding.position.num_tokens // self.page_size
            private += req.pages[first_private:] + holding.duplicates
        everywhere = sorted([*self._allocator.free_pages(), *held, *private])
        assert everywhere == list(range(self.num_pages)), "pages lost or owned twice"
        assert locks == held, "locks do not match their holders"
        unlocked = sum(count == 0 for count in held.values())
        assert unlocked == self._prefix_cache.num_evictable, (
            unlocked,
            self._prefix_cache.num_evictable,
        )
