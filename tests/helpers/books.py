"""The invariants of a scheduler and of its pages. Slow: for tests."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.req import Req
from minisgl.kvcache import CacheManager, RadixPrefixCache
from minisgl.kvcache.radix import _Node
from minisgl.scheduler import Scheduler


def check_books(scheduler: Scheduler) -> None:
    """Raise AssertionError if pages, locks, table rows or lengths do not add up."""
    requests = scheduler.requests
    running, waiting = requests.running, requests.waiting
    holders = [*running, *requests.leaving.values()]
    check_pages(requests.cache, [req for req in holders if req.handle])
    assert waiting == sorted(waiting, key=lambda req: req.order)
    assert running == sorted(running, key=lambda req: req.order)
    everyone = [*holders, *requests.queued]
    assert sorted(requests.by_uid) == sorted(req.uid for req in everyone)
    held = {req.table_idx for req in holders}
    table_idxs = [*requests.free_table_idxs, *(req.table_idx for req in holders)]
    assert sorted(table_idxs) == list(range(len(table_idxs)))
    needs = requests.needs
    with_needs = needs.late | needs.with_logprobs | needs.with_options | needs.tops.keys()
    assert held.issuperset(with_needs), "a row of no request needs something"
    for req in everyone:
        assert req.num_computed <= req.num_known <= req.max_len, req
        assert req.num_tokens <= req.num_known or req.ended, req
        assert 0 <= req.num_flights <= 2, req
    for req in requests.queued:
        assert (req.pages, req.handle, req.num_flights) == ([], None, 0), req


def held_pages(cache: object) -> list[tuple[int, int]]:
    """(page, number of locks) of each page of a prefix cache."""
    nodes = cache.nodes() if isinstance(cache, RadixPrefixCache) else ()
    return [(page, node.locks) for node in nodes for page in node.pages]


def check_pages(cache: CacheManager, holders: Sequence[Req]) -> None:
    """Raise AssertionError unless every page is in one place and every lock has its holder.

    holders: the requests that hold pages.
    """
    if not hasattr(cache, "_tails"):  # it is not the zoo's, of several groups
        _check_full(cache, holders)
        return
    if cache._tree.full:
        _check_full(cache, holders)
    for tail in cache._tails:
        held = dict.fromkeys(tail.entries, 0)
        private: list[int] = []
        for req in holders:
            for page in req.handle.tails[tail.column]:
                if page in held:
                    held[page] += 1
                elif page >= 0:
                    private.append(page)
        everywhere = sorted([*tail.allocator._free, *tail.entries, *private])
        assert everywhere == list(range(tail.group.num_pages)), "pages lost or owned twice"
        assert held == {page: entry.holders for page, entry in tail.entries.items()}
        assert tail.num_idle == sum(count == 0 for count in held.values())
    in_nodes: list[dict[int, _Node]] = [{} for _ in cache._tails]
    for node in cache._tree.nodes():
        for found, pages in zip(in_nodes, node.tails, strict=True):
            assert len(pages) * cache.page_size == len(node.ids)
            found.update({page: node for page in pages if page >= 0})
        if cache._tree.full is None and not node.children and not node.locks:
            assert any(page >= 0 for pages in node.tails for page in pages), "an empty leaf"
    for tail, found in zip(cache._tails, in_nodes, strict=True):
        assert found == {page: entry.node for page, entry in tail.entries.items()}


def _check_full(cache: CacheManager, holders: Sequence[Req]) -> None:
    allocator, prefix_cache = cache._allocator, cache.prefix_cache
    held = dict(held_pages(prefix_cache))
    locks = dict.fromkeys(held, 0)
    private: list[int] = []
    for req in holders:
        for page in req.handle.position.pages():
            locks[page] += 1
        first_private = req.handle.position.num_tokens // prefix_cache.page_size
        private += req.pages[first_private:] + req.handle.duplicates
    everywhere = sorted([*allocator._free, *held, *private])
    assert everywhere == list(range(allocator.num_pages)), "pages lost or owned twice"
    assert locks == held, "locks do not match their holders"
    num_unlocked = sum(count == 0 for count in held.values())
    assert num_unlocked == prefix_cache.num_evictable, "evictable pages are miscounted"
