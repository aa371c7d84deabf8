"""Page ownership: only this module moves pages between free list, request and prefix cache.

::

    free ──extend──> private to a request ──publish──> prefix cache ──evict──> free
                             └───────────release (duplicates, partial pages)─────^

`req.pages` lists a request's pages in order. The prefix cache owns those up to `req.handle`, which
locks them. The request owns the others, and its duplicates: pages that it computed while the cache
got other pages with the same tokens.

`CacheManager` serves models with one full cache group, which are nearly all.
`minisgl_zoo.cache_groups` extends it to window and state groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minisgl import plugins
from minisgl.core.args import CacheKind
from minisgl.core.groups import CacheGroup
from minisgl.core.plan import NewPages
from minisgl.core.req import IdArray, Req
from minisgl.kernel.radix import load_common_prefix
from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache
from minisgl.kvcache.naive import NaivePrefixCache
from minisgl.kvcache.radix import RadixPrefixCache


class PageAllocator:
    """The free pages of a cache group: a stack of ids. Mutable.

    A page holds the KV of `page_size` consecutive tokens in all layers of the group. The source of
    paging is PagedAttention (Kwon et al., SOSP 2023).
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. At least so many are free."""
        assert count <= len(self._free), (count, len(self._free))
        if count == 1:
            return [self._free.pop()]
        split = len(self._free) - count
        taken = self._free[split:]
        del self._free[split:]
        return taken

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)


@dataclass(slots=True)
class Holding:
    """`req.handle`: a locked position in the prefix cache, and the request's duplicates before it.
    Mutable: the position moves forward as the request publishes pages.
    """

    position: BaseCacheHandle
    duplicates: list[int] = field(default_factory=list)


class CacheManager:
    """Page bookkeeping of one scheduler. Mutable; it changes `pages` and `handle` of requests."""

    def __init__(self, num_pages: int, prefix_cache: BasePrefixCache) -> None:
        self._allocator = PageAllocator(num_pages)
        self.prefix_cache = prefix_cache
        self.page_size = prefix_cache.page_size
        self.interval = 0  # of states: a request takes a page where it computes a multiple of it
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
        return self.prefix_cache.num_evictable

    @property
    def _num_available(self) -> int:
        """Free pages, and pages that can be evicted."""
        return self._allocator.num_free + self.prefix_cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_cached(self, req: Req, ids: IdArray) -> int:
        """Return the number of tokens that `attach` would find."""
        return self.prefix_cache.num_cached(ids, req.namespace)

    def differs_at(self, req: Req) -> int | None:
        """Return the first position of the prompt that differs from the best cached branch."""
        return self.prefix_cache.differs_at(req.prompt_in_tree, req.namespace)

    def num_common(self, req: Req, other: Req) -> int:
        """Return the number of leading prompt tokens whose pages the two requests could share.

        The last token of `req` is not counted, because a request computes it itself.
        """
        if req.namespace != other.namespace:
            return 0
        ids = req.prompt_in_tree[: req.num_tokens - 1]
        return self.prefix_cache.num_common(ids, other.prompt_in_tree)

    def attach(self, req: Req, ids: IdArray, step: int) -> int | None:
        """Give `req`, which holds no pages, the cached prefix of `ids`. Returns its length.

        Returns None, and gives nothing, if a later step than `step` can use a longer prefix.
        """
        assert req.handle is None, "the request holds pages already"
        position = self.prefix_cache.match(ids, req.namespace)
        self.prefix_cache.lock(position)
        req.handle = Holding(position)
        req.pages = position.pages()
        req.num_stored = position.num_tokens
        return position.num_tokens

    def has_room(
        self, req: Req, end: int, unfinished: Sequence[Req], running: Sequence[Req], growth: int
    ) -> bool:
        """Return whether the pages suffice for all of these: `req` with `end` tokens, the known
        tokens of `unfinished` requests, and `growth` more tokens for each of the `running` ones."""
        need = self.pages_for(end) - len(req.pages)
        for other in unfinished:
            need += max(self.pages_for(other.num_known + 1) - len(other.pages), 0)
        return need + len(running) * self.pages_for(growth) <= self._num_available

    def chunk_end(self, req: Req, start: int, end: int) -> int:
        """Return where a chunk from `start` to at most `end` should end. A chunk that is not the
        prompt's last ends at a page boundary, because only whole pages can be shared."""
        aligned = end - end % self.page_size
        return aligned if end < req.num_known and aligned > start else end

    def num_free_tokens(self, req: Req, end: int) -> int:
        """Return how many tokens from position `end` on have pages of `req`, or free ones. No page
        would be evicted for them."""
        num_pages = len(req.pages) + self._allocator.num_free
        return num_pages * self.page_size - end

    def list_pages(self, req: Req, new_pages: list[NewPages]) -> None:
        """Append to `new_pages` all pages of a request that has just got its row of the tables."""
        if req.pages:
            new_pages.append(NewPages(0, req.table_idx, 0, req.pages.copy()))

    def extend(self, req: Req, start: int, end: int, new_pages: list[NewPages]) -> bool:
        """Allocate pages for the next tokens [start, end) of `req` and append them to `new_pages`.

        Evicts cached pages if necessary. Returns False, and allocates nothing, if pages run out.
        """
        first = len(req.pages)
        count = self.pages_for(end) - first
        if count <= 0:
            return True
        missing = count - self._allocator.num_free
        if missing > 0:
            if missing > self.prefix_cache.num_evictable:
                return False
            self._allocator.free(self.prefix_cache.evict(missing))
        pages = self._allocator.allocate(count)
        req.pages += pages
        new_pages.append(NewPages(0, req.table_idx, first, pages))
        return True

    def publish(self, req: Req, end: int, step: int) -> None:
        """Add the whole pages of `req` below `end` to the prefix cache.

        The host must have the ids of these tokens. `step` or an earlier step writes the pages. It
        is launched before any step that reads them, so stream order makes them readable.
        """
        holding: Holding = req.handle
        start = holding.position.num_tokens
        end -= end % self.page_size
        if end <= start or not self.shares:
            return
        pages = req.pages[start // self.page_size : end // self.page_size]
        position, duplicates = self.prefix_cache.insert(
            holding.position, req.ids_in_tree(start, end), pages, step
        )
        self.prefix_cache.lock(position)
        self.prefix_cache.unlock(holding.position)
        holding.position = position
        holding.duplicates += duplicates

    def release(self, req: Req) -> None:
        """Take all pages from `req`. Pages that it published stay in the prefix cache, where they
        can be evicted."""
        holding: Holding = req.handle
        first_private = holding.position.num_tokens // self.page_size
        self._allocator.free(req.pages[first_private:] + holding.duplicates)
        self.prefix_cache.unlock(holding.position)
        req.pages = []
        req.handle = None
        req.num_stored = 0

    def drop(self, step: int) -> None:
        """Free the cached pages that `step` or a later step writes. No request may hold them."""
        self._allocator.free(self.prefix_cache.drop(step))


def create_prefix_cache(kind: CacheKind, page_size: int) -> BasePrefixCache:
    """Return the prefix cache of this kind."""
    if kind == "radix":
        return RadixPrefixCache(page_size, load_common_prefix())
    return NaivePrefixCache(page_size)


def create_cache_manager(
    groups: Sequence[CacheGroup], kind: CacheKind, page_size: int, chunk: int
) -> CacheManager:
    """Return the cache manager for these groups. chunk: the most prompt tokens in a step."""
    if len(groups) == 1 and groups[0].kind == "full":
        return CacheManager(groups[0].num_pages, create_prefix_cache(kind, page_size))
    make = plugins.need("cache_groups", "manager", "a model with cache groups")
    manager: CacheManager = make(groups, kind, page_size, chunk)
    return manager
