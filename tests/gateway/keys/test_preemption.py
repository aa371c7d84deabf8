"""A waiting request takes the place of running requests of a key that was served more."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.books import check_books
from minisgl.core import Accepted, Plan, SamplingParams, StepResult, Token
from minisgl.core.req import Req
from minisgl.message import KeyShare, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig

HEAVY, LIGHT = 1, 2


def make(*, num_pages: int = 64, max_running: int = 2, chunk: int = 64) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_pages=num_pages,
            page_size=4,
            max_seq_len=64,
            vocab_size=100,
            eos_ids=frozenset([99]),
            max_prefill_tokens=chunk,
            max_running=max_running,
            watermark_tokens=0,
        )
    )


def ask(
    scheduler: Scheduler,
    uid: int,
    share: tuple[int, int],
    num_prompt: int = 8,
    num_output: int = 16,
    priority: int = 0,
) -> None:
    sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
    ids = ids_to_bytes([uid + 1] * num_prompt)
    message = UserMsg(
        uid=uid, ids=ids, sampling=sampling, share=KeyShare(*share), priority=priority
    )
    assert isinstance(scheduler.add(message), Accepted)


def settle(scheduler: Scheduler, plan: Plan | None) -> list[int]:
    """Returns the uids that got a token."""
    assert plan is not None
    events = scheduler.commit(plan, StepResult(next_ids=[5] * len(plan.sample_rows)))
    check_books(scheduler)
    return [event.uid for event in events if isinstance(event, Token)]


def test_a_request_takes_the_place_of_the_last_which_resumes_later() -> None:
    scheduler = make()
    for uid in range(3):
        ask(scheduler, uid, (100 * uid, HEAVY))
    assert settle(scheduler, scheduler.plan()) == [0, 1]
    ask(scheduler, 3, (50, LIGHT), num_output=4)
    tokens = settle(scheduler, scheduler.plan())
    assert tokens == [0, 3]
    while 3 in tokens:
        tokens = settle(scheduler, scheduler.plan())
    assert tokens == [0, 1], "what was retracted comes before what had to wait"
    assert scheduler.stats.num_retractions == 1


def test_a_request_starts_while_the_retracted_one_leaves() -> None:
    scheduler = make(max_running=1)
    ask(scheduler, 0, (100, HEAVY))
    flight = scheduler.plan()
    for uid in (1, 2):
        ask(scheduler, uid, (uid, LIGHT))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.uids == [1], "its row is the spare one, and one request runs"
    assert settle(scheduler, flight) == [0]
    assert settle(scheduler, plan) == [1]
    assert settle(scheduler, scheduler.plan()) == [1]


def test_two_requests_take_two_places_in_one_step() -> None:
    scheduler = make()
    for uid in range(2):
        ask(scheduler, uid, (100, HEAVY))
    assert settle(scheduler, scheduler.plan()) == [0, 1]
    for uid in (2, 3):
        ask(scheduler, uid, (uid, LIGHT))
    assert settle(scheduler, scheduler.plan()) == [2, 3]
    assert scheduler.stats.num_retractions == 2


def test_as_many_requests_are_retracted_as_pages_are_needed() -> None:
    scheduler = make(num_pages=16, max_running=8)
    for uid in range(5):
        ask(scheduler, uid, (100 * uid, HEAVY), num_prompt=11)
    assert settle(scheduler, scheduler.plan()) == [0, 1, 2, 3, 4]
    ask(scheduler, 5, (50, LIGHT), num_prompt=30)
    assert settle(scheduler, scheduler.plan()) == [0, 1, 5]
    assert scheduler.stats.num_retractions == 3


def test_a_request_gets_the_pages_while_the_retracted_ones_leave() -> None:
    scheduler = make(num_pages=16, max_running=8)
    for uid in range(5):
        ask(scheduler, uid, (100 * uid, HEAVY), num_prompt=11)
    flight = scheduler.plan()
    ask(scheduler, 5, (50, LIGHT), num_prompt=30)
    plan = scheduler.plan()
    check_books(scheduler)
    assert plan is not None
    assert plan.uids == [0, 1, 5], "their last flight reads the pages before it writes them"
    assert settle(scheduler, flight) == [0, 1, 2, 3, 4]
    assert settle(scheduler, plan) == [0, 1, 5]
    assert scheduler.stats.num_retractions == 3


def test_prompts_of_a_key_far_ahead_wait_for_a_step() -> None:
    scheduler = make(max_running=4, chunk=64)
    ask(scheduler, 0, (0, HEAVY))
    assert settle(scheduler, scheduler.plan()) == [0]
    ask(scheduler, 1, (65, HEAVY))
    ask(scheduler, 2, (64, HEAVY))
    ask(scheduler, 3, (0, LIGHT))
    assert settle(scheduler, scheduler.plan()) == [0, 3, 2], "a step's tokens ahead is not far"
    assert settle(scheduler, scheduler.plan()) == [0, 3, 2, 1]


def test_no_request_is_retracted_if_that_is_not_enough() -> None:
    scheduler = make(num_pages=16, max_running=8)
    for uid, tag in enumerate((0, 10, 20, 30, 100)):
        ask(scheduler, uid, (tag, HEAVY), num_prompt=11)
    settle(scheduler, scheduler.plan())
    ask(scheduler, 5, (50, LIGHT), num_prompt=30)  # one request after it has too few pages
    assert settle(scheduler, scheduler.plan()) == [0, 1, 2, 3, 4]
    assert scheduler.stats.num_retractions == 0


def test_requests_of_one_key_and_those_without_keys_keep_their_places() -> None:
    for key in (0, HEAVY):
        scheduler = make()
        for uid in range(2):
            ask(scheduler, uid, (100 * (key > 0), key))
        settle(scheduler, scheduler.plan())
        ask(scheduler, 2, (0, key), priority=-1)
        assert settle(scheduler, scheduler.plan()) == [0, 1]


def test_a_request_of_a_lower_priority_takes_no_place() -> None:
    scheduler = make()
    for uid in range(2):
        ask(scheduler, uid, (100, HEAVY))
    settle(scheduler, scheduler.plan())
    ask(scheduler, 2, (0, LIGHT), priority=1)
    assert settle(scheduler, scheduler.plan()) == [0, 1]


def test_a_request_that_runs_alone_releases_its_duplicates_of_cached_pages() -> None:
    """Prompt log-probabilities are computed again where the cache has the pages, so the request
    holds them twice. The pool has no room for that, and would have no step to plan."""
    scheduler = make(num_pages=16, chunk=16)
    prompt = ids_to_bytes([1] * 56)
    scheduler.add(UserMsg(uid=0, ids=prompt, sampling=SamplingParams(max_tokens=1)))
    while scheduler.runnable:
        settle(scheduler, scheduler.plan())
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scheduler.add(UserMsg(uid=1, ids=ids_to_bytes([1] * 60), sampling=scored))
    ends = []
    while scheduler.runnable:
        plan = scheduler.plan()
        assert plan is not None
        scores = [([0.0] * len(next_ids), [[]] * len(next_ids)) for _, next_ids, _ in plan.scored]
        outcome = StepResult(next_ids=[5] * len(plan.sample_rows), scores=scores)
        ends += scheduler.commit(plan, outcome)
        check_books(scheduler)
    assert ends[-1].uid == 1


def test_a_key_alone_is_not_asked_to_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(max_running=32, chunk=8)
    ask(scheduler, 0, (100, HEAVY))
    assert settle(scheduler, scheduler.plan()) == [0]
    for uid in range(1, 21):
        ask(scheduler, uid, (uid, HEAVY))  # tags fall when answers are shorter than expected
    ask(scheduler, 21, (0, LIGHT))
    attach, tried = scheduler.requests.cache.attach, list[int]()

    def spied(req: Req, *args: Any) -> int | None:
        tried.append(req.uid)
        return attach(req, *args)

    monkeypatch.setattr(scheduler.requests.cache, "attach", spied)
    assert 21 in settle(scheduler, scheduler.plan())
    assert len(tried) <= 3, "a long queue behind the light one costs nothing"
