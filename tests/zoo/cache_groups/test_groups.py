"""The pages of window and state groups: the tree against a plain list of what it must have."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.books import check_pages
from minisgl.core import Req, SamplingParams
from minisgl.core.groups import CacheGroup
from minisgl.core.plan import NewPages
from minisgl.errors import ConfigError
from minisgl.kernel.radix import load_common_prefix
from minisgl.kvcache import CacheManager
from minisgl_zoo.cache_groups.groups import GROUPS as CLASSES
from minisgl_zoo.cache_groups.groups import RowsGroup, StateGroup, TailGroup, WindowGroup
from minisgl_zoo.cache_groups.manager import GroupedCacheManager
from minisgl_zoo.cache_groups.tree import GroupedPrefixCache

PAGE_SIZE = 2


def make(*groups: CacheGroup, chunk: int = 8) -> GroupedCacheManager:
    tree = GroupedPrefixCache(PAGE_SIZE, load_common_prefix(), groups, shares=True)
    return GroupedCacheManager(tree, chunk)


def request(ids: list[int], uid: int = 0) -> Req:
    return Req(
        uid=uid, prompt=np.array(ids, np.int32), sampling=SamplingParams(), max_len=1000,
        order=(0, uid), stop_ids=frozenset(), num_known=len(ids), table_idx=uid,
    )  # fmt: skip


def compute(cache: CacheManager, req: Req, end: int, step: int) -> list[NewPages]:
    """The request computes up to `end` in a step, and shares it."""
    new_pages: list[NewPages] = []
    assert cache.extend(req, req.num_computed, end, new_pages)
    req.num_computed = end
    cache.publish(req, end, step)
    return new_pages


def test_where_a_group_reads() -> None:
    window = WindowGroup(window=5)
    assert [window.first_page(position, 2) for position in (0, 4, 5, 6, 7)] == [0, 0, 0, 1, 1]
    state = StateGroup(interval=4)
    assert [state.first_page(position, 2) for position in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 3]
    # Up to position 9: the state at 8 is the newest, and the page of index 4 ends at no multiple.
    assert list(state.new_pages(0, 0, 9, 2)) == [3]
    assert list(state.new_pages(6, 11, 12, 2)) == [5]
    assert [list(state.new_pages(6, start, start + 1, 2)) for start in (8, 9, 10)] == [[], [], []]
    rows = RowsGroup(interval=4)
    assert [rows.first_page(position, 2) for position in (0, 3, 4, 7, 8)] == [0, 0, 2, 2, 4]
    assert list(rows.new_pages(0, 0, 11, 2)) == [4, 5]
    assert list(rows.new_pages(5, 10, 11, 2)) == [5]
    assert list(rows.new_pages(0, 0, 12, 2)) == []


def test_a_group_that_no_request_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="a state group needs at least 2 pages, got 1"):
        StateGroup(interval=4, num_pages=1).most_tokens(8, 2)
    rows = RowsGroup(interval=4, num_pages=3)
    assert rows.most_tokens(8, 2) == 6  # 4 pages hold the rows that a chunk reads and writes
    window = WindowGroup(window=5, num_pages=7)
    assert window.most_tokens(8, 2) == 14  # 8 pages hold a window, a chunk and a page begun
    assert WindowGroup(window=5, num_pages=8).most_tokens(8, 2) is None


def test_window_pages_are_given_back_behind_the_window() -> None:
    cache = make(CacheGroup(num_pages=50), WindowGroup(window=5, num_pages=50))
    req = request(list(range(100)))
    assert cache.attach(req, req.prompt[:99], 0) == 0
    for step, end in enumerate(range(8, 80, 8)):
        assert [len(run.pages) for run in compute(cache, req, end, step)] == [4, 4]  # of each group
        check_pages(cache, [req])
        held = sum(page >= 0 for page in req.handle.tails[0])
        assert held <= 4 + 2, "more than a chunk and a window"
    assert cache.num_used_pages == 36 + held
    cache.release(req)
    assert cache.num_used_pages == 0
    check_pages(cache, [])


def test_a_match_needs_the_pages_that_come_next_are_read_from() -> None:
    cache = make(CacheGroup(num_pages=50), WindowGroup(window=5, num_pages=12))
    ids = list(range(40))
    req = request(ids)
    assert cache.attach(req, req.prompt, 0) == 0
    for step, end in enumerate(range(8, 41, 8)):
        compute(cache, req, end, step)
    cache.release(req)
    # 12 pages show the last 24 tokens: a position reads two pages before it.
    assert cache.num_cached(req, req.prompt) == 40
    assert cache.num_cached(req, req.prompt[:30]) == 30
    assert cache.num_cached(req, req.prompt[:20]) == 20
    assert cache.num_cached(req, req.prompt[:19]) == 0
    other = request([*ids[:19], 99, 98, 97], uid=1)
    assert cache.attach(other, other.prompt, 9) == 0
    assert other.num_stored == 18  # computed again, for the window group alone
    new_pages = compute(cache, other, 8, 9)
    [run] = new_pages
    assert (run.group, run.first, len(run.pages)) == (1, 0, 4)
    check_pages(cache, [other])
    cache.release(other)
    assert cache.num_cached(other, other.prompt[:8]) == 8
    check_pages(cache, [])


def test_a_state_is_read_in_a_later_step_than_it_is_written() -> None:
    cache = make(CacheGroup(num_pages=50), StateGroup(interval=4, num_pages=9))
    first, second = request(list(range(10))), request(list(range(10)), uid=1)
    assert cache.attach(first, first.prompt[:9], 3) == 0
    compute(cache, first, 10, 3)
    assert cache.attach(second, second.prompt[:9], 3) is None  # the next step can use 8 tokens
    assert second.handle is None
    assert cache.attach(second, second.prompt[:9], 4) == 8
    check_pages(cache, [first, second])


@pytest.mark.parametrize("interval", [PAGE_SIZE, 2 * PAGE_SIZE])
def test_prompts_that_part_save_a_state_there(interval: int) -> None:
    state = StateGroup(interval=interval, num_pages=9)
    cache = make(CacheGroup(num_pages=50), state)
    first = request(list(range(30)))
    cache.attach(first, first.prompt[:29], 0)
    assert cache.chunk_end(first, 0, 23) == 23 // interval * interval
    compute(cache, first, 30, 0)
    second = request([*range(17), *range(90, 100)], uid=1)
    assert cache.attach(second, second.prompt, 1) == 0
    assert second.num_stored == 16
    assert cache.chunk_end(second, 0, 27) == 16
    compute(cache, second, 16, 1)
    compute(cache, second, 27, 2)
    third = request([*range(17), *range(50, 60)], uid=2)
    assert cache.attach(third, third.prompt, 3) == 16
    check_pages(cache, [first, second, third])


def test_chunks_end_where_every_group_has_a_state() -> None:
    states = (StateGroup(interval=n * PAGE_SIZE, num_pages=9) for n in (2, 3))
    cache = make(CacheGroup(num_pages=50), *states)
    req = request(list(range(40)))
    assert cache.attach(req, req.prompt[:39], 0) == 0
    assert cache.chunk_end(req, 0, 14 * PAGE_SIZE) == 12 * PAGE_SIZE
    assert cache.interval == PAGE_SIZE, "each step that may write a state"


GROUPS: dict[str, tuple[CacheGroup, ...]] = {
    "full and window": (
        CacheGroup(num_pages=30), WindowGroup(window=5, num_pages=14)
    ),
    "window alone": (WindowGroup(window=4, num_pages=20),),
    "two windows": (
        WindowGroup(window=3, num_pages=16),
        WindowGroup(window=9, num_pages=24),
    ),
    "full, window and state": (
        CacheGroup(num_pages=40), WindowGroup(window=4, num_pages=20),
        StateGroup(interval=4, num_pages=10),
    ),
    "full, rows and state": (
        CacheGroup(num_pages=40), RowsGroup(interval=4, num_pages=20),
        StateGroup(interval=4, num_pages=10),
    ),
    "two intervals": (
        CacheGroup(num_pages=40), RowsGroup(interval=4, num_pages=20),
        StateGroup(interval=4, num_pages=10),
        StateGroup(interval=6, num_pages=10),
    ),
}  # fmt: skip


def longest(
    cache: GroupedCacheManager,
    groups: tuple[CacheGroup, ...],
    ids: list[int],
    wrote: list[dict[int, tuple[tuple[int, ...], int]]],
    step: int,
) -> int:
    """The longest prefix after which a row of `step` can resume, by trying all."""
    held: list[dict[tuple[int, ...], int]] = [{} for _ in groups]  # page by the ids up to its end
    for node in cache._tree.nodes():
        path, above = node.ids.tolist(), node.parent
        while above is not None:
            path, above = above.ids.tolist() + path, above.parent
        columns = ([node.pages] if groups[0].kind == "full" else []) + node.tails
        first = len(path) // PAGE_SIZE - len(columns[0])
        for pages, found in zip(columns, held, strict=True):
            for index, page in enumerate(pages, first):
                if page >= 0:
                    found[tuple(path[: (index + 1) * PAGE_SIZE])] = page

    def fits(group: CacheGroup, found: dict[tuple[int, ...], int], end: int) -> bool:
        if group.kind == "state":
            page = found.get(tuple(ids[:end]))
            return page is not None and wrote[groups.index(group)][page][1] < step
        if group.kind == "rows":
            return end % group.interval == 0
        first = max(end - group.window + 1, 0) // PAGE_SIZE if group.kind == "window" else 0
        return all(
            tuple(ids[: (index + 1) * PAGE_SIZE]) in found
            for index in range(first, end // PAGE_SIZE)
        )

    for end in range(len(ids) // PAGE_SIZE * PAGE_SIZE, 0, -PAGE_SIZE):
        if all(fits(group, found, end) for group, found in zip(groups, held, strict=True)):
            return end
    return 0


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("seed", range(10))
def test_random_operations(name: str, seed: int) -> None:
    run_operations(random.Random(seed), GROUPS[name], num_operations=250)


def run_operations(rng: random.Random, groups: tuple[CacheGroup, ...], num_operations: int) -> None:
    """Requests start, compute, leave and fail. The oracle says which ids each page has, by group,
    and so whether a request was given pages with its own tokens, and where it may resume."""
    cache = make(*groups)
    wrote: list[dict[int, tuple[tuple[int, ...], int]]] = [{} for _ in groups]  # (ids, step)
    running: list[Req] = []
    step = uid = 0
    for _ in range(num_operations):
        step += 1
        roll = rng.random()
        if roll < 0.35 and len(running) < 3:
            ids = [rng.randrange(2) for _ in range(rng.randint(2, 30))]
            if rng.random() < 0.5:
                ids = [0] * rng.randint(2, 12) + ids
            req, uid = request(ids, uid), uid + 1
            later = longest(cache, groups, ids[:-1], wrote, step + 1)
            num_tokens = cache.attach(req, req.prompt[:-1], step)
            if num_tokens is None:
                assert later > longest(cache, groups, ids[:-1], wrote, step)
                continue
            assert num_tokens == longest(cache, groups, ids[:-1], wrote, step)
            req.num_computed = num_tokens
            tables = ([req.pages] if groups[0].kind == "full" else []) + req.handle.tails
            for group, pages, written in zip(groups, tables, wrote, strict=True):
                is_tail = isinstance(group, TailGroup)
                first = group.first_page(num_tokens, PAGE_SIZE) if is_tail else 0
                for index in range(first, num_tokens // PAGE_SIZE):
                    if group.kind == "state" and (index + 1) * PAGE_SIZE < num_tokens:
                        continue
                    ids_there, then = written[pages[index]]
                    assert ids_there == tuple(ids[: (index + 1) * PAGE_SIZE]), "another's page"
                    assert then < step or group.kind != "state"
            running.append(req)
        elif roll < 0.85 and running:
            req = rng.choice(running)
            start = req.num_computed
            end = min(start + rng.randint(1, 8), req.num_prompt)
            if start == end or not cache.extend(req, start, end, new_pages := []):
                cache.release(req)
                running.remove(req)
            else:
                for group, _, first, pages in new_pages:
                    for index, page in enumerate(pages, first):
                        ids_there = tuple(req.prompt[: (index + 1) * PAGE_SIZE].tolist())
                        wrote[group][page] = (ids_there, step)
                req.num_computed = end
                cache.publish(req, end, step)
        elif roll < 0.97 and running:
            cache.release(running.pop(rng.randrange(len(running))))
        elif roll > 0.98:
            while running:
                cache.release(running.pop())
            cache.drop(step - rng.randint(0, 3))
        check_pages(cache, running)
    for req in running:
        cache.release(req)
    assert cache.num_used_pages == 0
    check_pages(cache, [])


def test_there_is_room_only_if_others_can_grow_in_each_group() -> None:
    window = WindowGroup(window=5, num_pages=20)
    cache = make(CacheGroup(num_pages=100), window)
    req = request(list(range(8)))
    assert cache.attach(req, req.prompt[:7], 0) == 0
    num_others = (20 - window.most_pages(9, 8, PAGE_SIZE)) // 2  # 4 tokens are 2 pages
    assert cache.has_room(req, 9, (), [req] * num_others, growth=4)
    assert not cache.has_room(req, 9, (), [req] * (num_others + 1), growth=4)


def test_a_request_alone_starts_in_the_fewest_pages() -> None:
    groups = [CLASSES[kind](interval=4) for kind in ("rows", "state")]
    least = [replace(x, num_pages=x.most_pages(1000, 8, PAGE_SIZE)) for x in groups]
    assert all(group.most_tokens(8, PAGE_SIZE) is None for group in least)
    cache = make(CacheGroup(num_pages=50), *least)
    req = request([1] * 30)
    assert cache.attach(req, req.prompt[:29], 0) == 0
    assert cache.has_room(req, 31, (), (), growth=4)
    for step, end in enumerate(range(8, 31)):
        compute(cache, req, end, step)
    assert not cache.has_room(request([2] * 30, uid=1), 31, (), [req], growth=4)


def test_no_node_without_pages_is_left_by_a_failed_step() -> None:
    cache = make(StateGroup(interval=2, num_pages=2))
    req = request([1] * 6)
    assert cache.attach(req, req.prompt[:5], 0) == 0
    for step, end in enumerate((2, 4, 6)):  # three nodes; the third state takes the first's page
        compute(cache, req, end, step)
    cache.release(req)
    cache.drop(1)
    check_pages(cache, [])
    assert cache.num_cached_pages == 0


@pytest.mark.parametrize("kind", ["state", "rows"])
def test_the_peak_of_decoding_requests_is_what_they_hold(kind: Any) -> None:
    """Requests decode a token each in a step, planned in any order: the most pages that they hold
    at once are the peak, at most."""
    rng = random.Random(7)
    for _ in range(40):
        interval = PAGE_SIZE * rng.choice([1, 2, 4])
        group = CLASSES[kind](interval=interval, num_pages=1000)
        others = [StateGroup(interval=interval, num_pages=1000)]
        cache = make(CacheGroup(num_pages=1000), *(others if kind == "rows" else []), group)
        tail = cache._tails[-1]
        reqs = [request([uid] * rng.randint(2 * interval, 40), uid) for uid in range(8)]
        for req in reqs:
            assert cache.attach(req, req.prompt[:1], 0) == 0
            compute(cache, req, req.num_known, 0)
        peak = tail.peak([req.num_computed + 1 for req in reqs])
        most = 0
        for step in range(1, 3 * interval):
            rng.shuffle(reqs)
            for req in reqs:
                req.num_known += 1
                assert cache.extend(req, req.num_computed, req.num_computed + 1, [])
                req.num_computed += 1
                if step > interval:
                    most = max(most, group.num_pages - tail.num_available)
        assert len(reqs) <= most <= peak


def test_requests_start_only_if_states_last_an_interval() -> None:
    """In step with each other, all write a state at once; apart, a few."""
    state = StateGroup(interval=64, num_pages=40)
    rows = RowsGroup(interval=64, num_pages=60 * 64 // PAGE_SIZE)
    cache = make(CacheGroup(num_pages=10_000), state, rows)
    req = request([1] * 100)
    assert cache.attach(req, req.prompt[:1], 0) == 0

    def fitting(phases: list[int]) -> int:
        running = [request([1] * (64 + phase)) for phase in phases]
        return next(
            count
            for count in range(len(running) + 1)
            if count == len(running) or not cache.has_room(req, 101, (), running[:count], growth=4)
        )

    apart, together = fitting([(index * 21) % 64 for index in range(60)]), fitting([5] * 60)
    assert (apart, together) == (37, 20)
