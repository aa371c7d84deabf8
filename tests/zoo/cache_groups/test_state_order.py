"""Which states the tree loses first when a state group runs out of pages."""

from __future__ import annotations

import numpy as np

from helpers.books import check_pages
from minisgl.core import Req, SamplingParams
from minisgl.core.groups import CacheGroup
from minisgl.kernel.radix import load_common_prefix
from minisgl_zoo.cache_groups.groups import StateGroup
from minisgl_zoo.cache_groups.manager import GroupedCacheManager
from minisgl_zoo.cache_groups.tree import GroupedPrefixCache

PAGE_SIZE, CHUNK, NUM_STATES = 2, 8, 8
STEPS = iter(range(10_000))


def make() -> GroupedCacheManager:
    groups = (
        CacheGroup(num_pages=500),
        StateGroup(interval=PAGE_SIZE, num_pages=NUM_STATES),
    )
    tree = GroupedPrefixCache(PAGE_SIZE, load_common_prefix(), groups, shares=True)
    return GroupedCacheManager(tree, CHUNK)


def prompt(*parts: tuple[int, int]) -> list[int]:
    """Ids from (name, length) of each part."""
    return [name * 100 + index for name, length in parts for index in range(length)]


def run(cache: GroupedCacheManager, ids: list[int]) -> int:
    """A request computes `ids` in chunks and leaves. Returns how many tokens were cached."""
    req = Req(
        uid=0, prompt=np.array(ids, np.int32), sampling=SamplingParams(), max_len=1000,
        order=(0, 0), stop_ids=frozenset(), num_known=len(ids), table_idx=0,
    )  # fmt: skip
    num_cached = cache.attach(req, req.prompt[:-1], next(STEPS))
    assert num_cached is not None
    start = num_cached
    while start < len(ids):
        end = cache.chunk_end(req, start, min(start + CHUNK, len(ids)))
        assert cache.extend(req, start, end, [])
        cache.publish(req, end, next(STEPS))
        start = end
    cache.release(req)
    check_pages(cache, [])
    return num_cached


def test_a_state_where_prompts_part_outlives_prompts_that_come_once() -> None:
    cache = make()
    assert run(cache, prompt((1, 6), (2, 5))) == 0
    assert run(cache, prompt((1, 6), (3, 5))) == 0  # it cannot know where the first would be left
    assert run(cache, prompt((1, 6), (4, 5))) == 6
    for name in range(10, 12 + NUM_STATES):  # each leaves one state
        assert run(cache, prompt((name, 5))) == 0
    assert run(cache, prompt((1, 6), (5, 5))) == 6


def test_a_state_that_a_prompt_passed_is_lost_before_an_older_end_of_a_prompt() -> None:
    cache = make()
    run(cache, prompt((1, 8)))
    run(cache, prompt((2, 41)))  # its 5 chunks leave 5 states, and its end one
    for name in range(10, 10 + NUM_STATES - 3):
        run(cache, prompt((name, 5)))
    assert run(cache, prompt((1, 8), (3, 3))) == 8
    assert run(cache, prompt((2, 41), (3, 3))) == 40


def test_a_state_that_saves_more_tokens_is_lost_later() -> None:
    cache = make()
    for name, length in ((1, 7), (2, 3), (3, 7)):
        run(cache, prompt((name, length)))
    for name in range(10, 10 + NUM_STATES - 2):
        run(cache, prompt((name, 5)))
    assert run(cache, prompt((2, 3), (4, 3))) == 0
    assert run(cache, prompt((1, 7), (4, 3))) == 6


def test_a_request_that_gets_no_room_uses_no_state() -> None:
    cache = make()
    run(cache, prompt((1, 7)))
    (tail,) = cache._tails
    req = Req(
        uid=0, prompt=np.array(prompt((1, 9)), np.int32), sampling=SamplingParams(), max_len=1000,
        order=(0, 0), stop_ids=frozenset(), num_known=9, table_idx=0,
    )  # fmt: skip
    for _ in range(1000):
        assert cache.attach(req, req.prompt[:-1], next(STEPS)) == 6
        cache.release(req)
    assert [entry.uses for entry in tail.entries.values()] == [0]
    assert len(tail._heap) <= 2 * len(tail.entries) + 65, "outdated items stay"
    assert run(cache, prompt((1, 9))) == 6
    assert 1 in [entry.uses for entry in tail.entries.values()]


def test_a_prefix_that_was_popular_once_is_lost_in_the_end() -> None:
    cache = make()
    for name in range(10, 40):
        run(cache, prompt((1, 6), (name, 1)))
    assert run(cache, prompt((1, 6), (40, 1))) == 6
    for name in range(50, 150):
        run(cache, prompt((name, 5)))
    assert run(cache, prompt((1, 6), (41, 1))) == 0
