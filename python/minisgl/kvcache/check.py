"""The invariants of page ownership, which tests check after each step."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.req import Req
from minisgl.kvcache.base import BasePrefixCache
from minisgl.kvcache.pages import PageAllocator


def check_pages(
    allocator: PageAllocator, prefix_cache: BasePrefixCache, holders: Sequence[Req]
) -> None:
    """Raise AssertionError unless every page is in one place and every lock has its holder.

    holders: the requests that hold pages.
    """
    held = dict(prefix_cache.held_pages())
    locks = dict.fromkeys(held, 0)
    private: list[int] = []
    for req in holders:
        for page in req.handle.position.pages():
            locks[page] += 1
        first_private = req.handle.position.num_tokens // prefix_cache.page_size
        private += req.pages[first_private:] + req.handle.duplicates
    everywhere = sorted([*allocator.free_pages(), *held, *private])
    assert everywhere == list(range(allocator.num_pages)), "pages lost or owned twice"
    assert locks == held, "locks do not match their holders"
    num_unlocked = sum(count == 0 for count in held.values())
    assert num_unlocked == prefix_cache.num_evictable, (num_unlocked, prefix_cache.num_evictable)
