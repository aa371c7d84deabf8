"""A hybrid with a cached prefix computes only the tokens after its newest state."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.books import check_books
from minisgl.core import SamplingParams, StepFailed
from minisgl.core.groups import CacheGroup
from minisgl.errors import EngineError
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl_bench.fakes import InstantExecutor
from minisgl_zoo.cache_groups.groups import RowsGroup, StateGroup

INTERVAL, PAGE_SIZE, MATCH = 64, 16, 4096


def make_scheduler() -> Scheduler:
    groups = (
        CacheGroup(num_pages=2000),
        RowsGroup(interval=INTERVAL, num_pages=64),
        StateGroup(interval=INTERVAL, num_pages=64),
    )
    return Scheduler(
        SchedulerConfig(
            groups=groups, page_size=PAGE_SIZE, max_seq_len=8192, vocab_size=1000,
            eos_ids=frozenset(), max_prefill_tokens=8192, max_running=8,
        )
    )  # fmt: skip


def computed(scheduler: Scheduler, *prompts: list[int]) -> int:
    """Requests for one token each arrive together. Returns the prompt tokens in their steps."""
    executor, sampling = InstantExecutor(), SamplingParams(max_tokens=1, ignore_eos=True)
    for uid, prompt in enumerate(prompts):
        scheduler.handle(UserMsg(uid=uid, ids=ids_to_bytes(prompt), sampling=sampling))
    count = 0
    while scheduler.runnable:
        plan = scheduler.plan()
        assert plan is not None
        count += plan.num_tokens
        scheduler.commit(plan, executor.launch(plan).wait())
    check_books(scheduler)
    return count


def ids(count: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, 1000, count).tolist()
    return drawn


@pytest.mark.parametrize("gap", [0, 16, 48])
def test_a_cached_prompt_computes_the_tokens_after_the_state(gap: int) -> None:
    scheduler, stem = make_scheduler(), ids(MATCH + gap, 0)
    assert computed(scheduler, stem + ids(1, 1)) == MATCH + gap + 1
    assert computed(scheduler, stem + ids(100, 2)) == gap + 100
    assert computed(scheduler, stem + ids(70, 3)) == gap + 70


def test_only_the_second_prompt_computes_a_new_branch() -> None:
    scheduler, stem = make_scheduler(), ids(MATCH, 0)
    costs = [computed(scheduler, stem + ids(300, seed)) for seed in (1, 2, 3, 4)]
    assert costs == [MATCH + 300, MATCH + 300, 300, 300]


def test_a_state_of_a_failed_step_is_not_found() -> None:
    """The pages of its tokens are of an earlier step, and stay."""
    scheduler, stem = make_scheduler(), ids(MATCH, 0)
    computed(scheduler, stem + ids(300, 1))
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    message = UserMsg(uid=0, ids=ids_to_bytes(stem + ids(300, 2)), sampling=sampling)
    scheduler.handle(message)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.ends == [MATCH]
    scheduler.commit(plan, StepFailed(error=EngineError("the device failed"), uids=(0,)))
    check_books(scheduler)
    assert computed(scheduler, stem + ids(300, 3)) == MATCH + 300
    assert computed(scheduler, stem + ids(300, 4)) == 300


def test_eight_choices_compute_their_prompt_once() -> None:
    rest = 20  # since the last state: rows are a request's own
    prompt = ids(MATCH + rest, 0)
    assert computed(make_scheduler(), *[prompt] * 8) == MATCH + 8 * rest
