"""The rules of `minisgl_bench.studies.cache_policies` on sequences on which they differ."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minisgl_bench.studies.cache_policies import (
    RULES,
    Arc,
    Gdsf,
    LeCaR,
    Lfu,
    Lru,
    Rule,
    S3Fifo,
    Sieve,
    served,
)
from minisgl_bench.studies.hit_bounds import Oracle, knows_which
from minisgl_bench.studies.prompt_traces import RECORDED_BLOCK

ROOM = 4


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_keeps_as_many_blocks_as_fit(rule: type[Rule]) -> None:
    rng, cache, seen = random.Random(0), rule(ROOM), set[int]()
    for _ in range(500):
        key = int(rng.expovariate(0.2))
        seen.add(key)
        cache.touch(key)
        assert sum(key in cache for key in seen) <= ROOM
    assert sum(key in cache for key in seen) == ROOM


@pytest.mark.parametrize(
    ("rule", "spared"), [(Lru, 0), (Lfu, 1), (Gdsf, 1), (Sieve, 1), (S3Fifo, 1), (Arc, 1)]
)
def test_a_scan_costs_only_lru_what_is_used_often(rule: type[Rule], spared: int) -> None:
    cache = rule(ROOM)
    for key in (0, 0, 0, *range(1, 6)):
        cache.touch(key)
    assert (0 in cache) == spared


def test_lecar_learns_that_age_is_the_worse_rule() -> None:
    cache = LeCaR(ROOM)
    for number in range(200):
        for key in (-1, -1, *range(number * 4, number * 4 + 4)):
            cache.touch(key)
    assert cache._by_age < 0.1


def test_no_rule_serves_more_than_the_oracle() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 9, 60).astype(np.int32)  # the prompts have one block and a token
    prompts = [np.append(np.repeat(block, RECORDED_BLOCK), 0) for block in blocks]
    best = Oracle(prompts, block=RECORDED_BLOCK, kv_bytes=1, state_bytes=0, running=0).served(
        5 * RECORDED_BLOCK
    )
    assert 0 < knows_which(prompts, block=RECORDED_BLOCK, room=5) <= best
    assert all(0 < served(prompts, rule(5)) <= best for rule in RULES)
