"""The cost of the prefix tree: operations on a million tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minisgl.core.req import IdArray
from minisgl.kvcache import create_prefix_cache

VOCAB_SIZE = 32_000
TREE_TOKENS = 1_000_000


def measure_tree(page_size: int) -> Iterator[dict[str, Any]]:
    """Yield the median microseconds of each operation on a tree of `TREE_TOKENS` tokens.

    Prompts of 1,024 tokens, of which 256 are one of 32 system prompts.
    """
    rng = np.random.default_rng(0)
    cache = create_prefix_cache("radix", page_size)
    systems = rng.integers(0, VOCAB_SIZE, (32, 256), dtype=np.int32)
    num_prompts = (TREE_TOKENS - systems.size) // 768 + 1
    next_page = 0

    def prompt(index: int) -> IdArray:
        own = rng.integers(0, VOCAB_SIZE, 768, dtype=np.int32)
        return np.concatenate([systems[index % 32], own])

    def insert(ids: IdArray) -> None:
        nonlocal next_page
        root = cache.match(ids[:0])
        count = len(ids) // page_size
        cache.insert(root, ids, list(range(next_page, next_page + count)), 0)
        next_page += count

    prompts = [prompt(index) for index in range(num_prompts)]
    for ids in prompts:
        insert(ids)
    num_cached = cache.num_evictable * page_size
    assert num_cached >= TREE_TOKENS, num_cached
    fresh = [prompt(index) for index in range(500)]
    hits = [prompts[index] for index in rng.integers(0, num_prompts, 500)]
    strangers = list(rng.integers(0, VOCAB_SIZE, (500, 1024), dtype=np.int32))
    handles = [cache.match(ids) for ids in hits]

    def lock(index: int) -> None:
        cache.lock(handles[index])
        cache.unlock(handles[index])

    operations: dict[str, Callable[[int], object]] = {
        "match, all 1,024 tokens": lambda index: cache.match(hits[index]),
        "match, system prompt only": lambda index: cache.match(fresh[index]),
        "match, nothing": lambda index: cache.match(strangers[index]),
        "lock and unlock": lock,
        "insert 768 new tokens": lambda index: insert(fresh[index]),
        "evict 1,024 tokens": lambda index: cache.evict(1024 // page_size),
    }
    for name, operation in operations.items():
        times = []
        for index in range(500):
            start = time.perf_counter_ns()
            operation(index)
            times.append(time.perf_counter_ns() - start)
        yield {
            "name": f"{name}, page size {page_size}",
            "cached_tokens": num_cached,
            "median_us": round(statistics.median(times) / 1e3, 2),
            "p99_us": round(float(np.percentile(times, 99)) / 1e3, 2),
        }
