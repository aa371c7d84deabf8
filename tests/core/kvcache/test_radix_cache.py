"""The prefix tree against a list of what was inserted, and its rules one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helpers.books import held_pages
from minisgl.core.req import IdArray
from minisgl.kernel.radix import load_common_prefix
from minisgl.kvcache import RadixPrefixCache


def ids(values: list[int]) -> IdArray:
    return np.array(values, np.int32)


def make(page_size: int = 1) -> RadixPrefixCache:
    return RadixPrefixCache(page_size, load_common_prefix())


def insert(
    cache: RadixPrefixCache,
    values: list[int],
    pages: list[int],
    step: int = 0,
    namespace: str = "",
) -> list[int]:
    """Insert from the root; returns the pages that the cache did not take."""
    return cache.insert(cache.match(ids([]), namespace), ids(values), pages, step)[1]


def test_match_is_the_longest_prefix_in_whole_pages() -> None:
    cache = make(page_size=2)
    insert(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    handle = cache.match(ids([1, 2, 3, 4, 5, 9]))
    assert (handle.num_tokens, handle.pages()) == (4, [10, 11])
    assert cache.match(ids([1, 9])).num_tokens == 0
    assert cache.match(ids([1])).num_tokens == 0


def test_where_a_prompt_differs_from_the_best_branch() -> None:
    cache = make(page_size=4)

    def at(values: list[int], namespace: str = "") -> int | None:
        return cache.differs_at(ids(values), namespace)

    assert at([1, 2, 3]) is None  # nothing is cached
    insert(cache, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1])
    insert(cache, [1, 2, 3, 4, 5, 9, 9, 9], [0, 2])
    insert(cache, [7, 7, 7, 7], [3])
    assert at([2, 2, 2, 2]) == 0
    assert at([1, 2, 9, 9, 9]) == 2
    assert at([7, 7, 7]) is None  # it ends within a branch
    assert at([1, 2, 3, 4, 5, 6, 7, 8, 9]) is None  # the branch ends
    assert at([1, 2, 3, 4, 5, 6, 9]) == 6
    assert at([1, 2, 3, 4, 5, 9, 9, 0]) == 7
    assert at([1, 2, 3, 4, 0]) == 4
    assert at([1, 2, 3, 9], "tenant") is None


def test_split_keeps_handles_true() -> None:
    cache = make()
    insert(cache, [1, 2, 3, 4], [0, 1, 2, 3])
    whole = cache.match(ids([1, 2, 3, 4]))
    cache.lock(whole)
    insert(cache, [1, 2, 7], [9, 9, 4])  # splits the edge that `whole` is in
    assert whole.pages() == [0, 1, 2, 3]
    assert cache.match(ids([1, 2, 7])).pages() == [0, 1, 4]
    assert cache.num_evictable == 1
    cache.unlock(whole)
    assert cache.num_evictable == 5


def test_pages_that_the_cache_has_stay_with_the_caller() -> None:
    cache = make(page_size=2)
    assert insert(cache, [1, 2, 3, 4], [0, 1]) == []
    assert insert(cache, [1, 2, 3, 4, 5, 6], [7, 8, 2]) == [7, 8]
    assert cache.match(ids([1, 2, 3, 4, 5, 6])).pages() == [0, 1, 2]


def test_eviction_takes_the_least_recently_used_tail_first() -> None:
    cache = make()
    insert(cache, [1, 2], [0, 1])
    insert(cache, [3, 4], [2, 3])
    cache.match(ids([1, 2]))  # now [3, 4] is the older
    assert cache.num_cached(ids([3, 4, 5])) == 2  # asking uses nothing
    assert cache.evict(1) == [3]
    assert cache.evict(1) == [2]
    assert cache.evict(10) == [0, 1]
    assert cache.num_evictable == 0


def test_locked_pages_are_not_evicted() -> None:
    cache = make()
    insert(cache, [1, 2], [0, 1])
    insert(cache, [1, 2, 3], [8, 9, 2])
    handle = cache.match(ids([1, 2]))
    cache.lock(handle)
    assert cache.evict(10) == [2]
    cache.unlock(handle)
    assert cache.evict(10) == [0, 1]


def test_drop_takes_the_pages_of_failed_steps() -> None:
    cache = make()
    insert(cache, [1, 2], [0, 1], step=3)
    insert(cache, [1, 2, 3], [8, 9, 2], step=5)
    insert(cache, [4], [3], step=6)
    assert sorted(cache.drop(5)) == [2, 3]
    assert cache.match(ids([1, 2, 3])).pages() == [0, 1]
    insert(cache, [1, 2, 7], [8, 9, 4], step=1)  # computed before what it stands behind
    assert sorted(cache.drop(3)) == [0, 1, 4]
    assert list(held_pages(cache)) == []


def test_namespaces_share_nothing_and_leave_nothing() -> None:
    cache = make()
    empty = cache.match(ids([]), "a")  # found before the namespace has anything
    insert(cache, [1, 2], [0, 1], namespace="a")
    insert(cache, [1, 2], [2, 3], namespace="b")
    assert cache.match(ids([1, 2])).num_tokens == 0
    assert cache.match(ids([1, 2]), "a").pages() == [0, 1]
    assert cache.num_cached(ids([1, 2, 3]), "b") == 2
    assert cache.insert(empty, ids([1, 2, 4]), [7, 8, 4], 0)[1] == [7, 8]
    assert sorted(cache.evict(10)) == [0, 1, 2, 3, 4]
    assert cache.roots == {}
    assert cache.insert(empty, ids([1]), [5], 0)[0].pages() == [5]  # the position is still good
    assert cache.match(ids([1]), "a").pages() == [5]


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed: int, page_size: int) -> None:
    run_operations(random.Random(seed), page_size, num_operations=300)


def run_operations(rng: random.Random, page_size: int, num_operations: int) -> None:
    """The oracle: each page-aligned prefix that a namespace holds, with its page."""
    cache = make(page_size)
    Prefix = tuple[str | int, ...]  # the namespace, then ids
    held: dict[Prefix, int] = {}
    locked: list[tuple[object, Prefix]] = []
    next_page = 0
    for _ in range(num_operations):
        values = [rng.randrange(3) for _ in range(page_size * rng.randint(0, 6))]
        namespace = rng.choice(["", "", "a", "b"])
        match rng.random():
            case roll if roll < 0.5:
                pages = list(range(next_page, next_page + len(values) // page_size))
                next_page += len(pages)
                refused = insert(cache, values, pages, namespace=namespace)
                for index, page in enumerate(pages):
                    prefix = (namespace, *values[: (index + 1) * page_size])
                    assert (prefix in held) == (page in refused)
                    held.setdefault(prefix, page)
            case roll if roll < 0.7:
                num_cached = cache.num_cached(ids(values), namespace)
                handle = cache.match(ids(values), namespace)
                assert handle.num_tokens == num_cached
                expected = [
                    (namespace, *values[:end])
                    for end in range(page_size, len(values) + 1, page_size)
                    if (namespace, *values[:end]) in held
                ]
                assert handle.pages() == [held[prefix] for prefix in expected]
                if expected and rng.random() < 0.5:
                    cache.lock(handle)
                    locked.append((handle, expected[-1]))
            case roll if roll < 0.85:
                if locked:
                    cache.unlock(locked.pop(rng.randrange(len(locked)))[0])
            case _:
                gone = cache.evict(rng.randint(1, 8))
                kept_by = [prefix for _, prefix in locked]
                for prefix, page in list(held.items()):
                    if page in gone:
                        assert not any(keeper[: len(prefix)] == prefix for keeper in kept_by)
                        del held[prefix]
        assert sorted(page for page, _ in held_pages(cache)) == sorted(held.values())
        unlocked = {
            prefix for prefix in held if not any(k[: len(prefix)] == prefix for _, k in locked)
        }
        assert cache.num_evictable == len(unlocked)
        assert set(cache.roots) == {prefix[0] for prefix in held}


def test_a_prefix_is_as_recent_as_what_was_inserted_behind_it() -> None:
    cache = make()
    prefix, _ = cache.insert(cache.match(ids([])), ids([1]), [10], 0)
    insert(cache, [8], [20])
    cache.insert(prefix, ids([2]), [11], 0)
    other = cache.match(ids([8]))  # it is used now, but then no more
    cache.insert(prefix, ids([3]), [12], 0)
    cache.lock(other)
    assert sorted(cache.evict(2)) == [11, 12]
    cache.unlock(other)
    assert cache.evict(1) == [20]
    assert cache.evict(1) == [10]
