"""The cost of the prefix tree: operations on a million tokens, and its share of scheduling."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from minisgl.core import SamplingParams
from minisgl.core.req import IdArray
from minisgl.kvcache import CacheManager, create_prefix_cache
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl_bench.fakes import InstantExecutor, ListInbox, ListOutbox

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


def measure_share(cache: Literal["radix", "naive"], num_requests: int = 1000) -> dict[str, Any]:
    """Return the share of the scheduler's time for finding, keeping and freeing pages.

    The scheduler alone, with an executor that computes nothing: 64 requests run at a time, with
    prompts of 1,024 tokens of which 256 are one of 32 system prompts, and 64 tokens out. The pool
    holds a third of all prompts, so that pages are evicted too.
    """
    rng = np.random.default_rng(0)
    systems = rng.integers(8, VOCAB_SIZE, (32, 256), dtype=np.int32)
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    messages = []
    for uid in range(num_requests):
        own = rng.integers(8, VOCAB_SIZE, 768, dtype=np.int32)
        ids = ids_to_bytes(np.concatenate([systems[uid % 32], own]))
        messages.append(UserMsg(uid=uid, ids=ids, sampling=sampling))
    page_size = 16
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=max(num_requests // 3, 64 + 8) * 1088 // page_size,
            page_size=page_size,
            max_seq_len=4096,
            vocab_size=VOCAB_SIZE,
            eos_ids=frozenset(),
            max_prefill_tokens=8192,
            max_running=64,
            cache=cache,
        )
    )
    in_cache_s = _time_calls(scheduler)
    inbox = ListInbox([messages], more=lambda: [] if scheduler.runnable else None)
    gc.collect()
    gc.freeze()  # as a server does: a full collection would take longer than the run
    start = time.perf_counter()
    run(scheduler, InstantExecutor(), inbox, ListOutbox())
    seconds = time.perf_counter() - start
    gc.unfreeze()
    assert scheduler.stats.num_finished == num_requests
    return {
        "name": cache,
        "scheduling_us_a_request": round(1e6 * seconds / num_requests, 1),
        "cache_us_a_request": round(1e6 * sum(in_cache_s) / num_requests, 1),
        "cache_share": round(sum(in_cache_s) / seconds, 4),
        "cached_tokens_share": round(
            scheduler.stats.num_cached_tokens / scheduler.stats.num_prompt_tokens, 4
        ),
    }


def _time_calls(scheduler: Scheduler) -> list[float]:
    """Wrap the methods of the cache manager. The returned list gets the seconds of each call."""
    manager: CacheManager = scheduler.requests.cache
    seconds: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            seconds.append(time.perf_counter() - start)
            return result

        return wrapped

    for name in ("attach", "extend", "publish", "release"):
        setattr(manager, name, timed(getattr(manager, name)))
    return seconds
