"""Admission, ends and failures of requests, on plans that a person can check."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.books import check_books
from helpers.scheduling import EOS, add, make, settle, spans
from minisgl.core import (
    Accepted,
    Failed,
    Finished,
    SamplingParams,
    StepFailed,
    StepResult,
    Token,
)
from minisgl.errors import EngineError, InvalidSampling
from minisgl.message import (
    AbortMsg,
    CompiledMsg,
    KeyShare,
    StopMsg,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.scheduler import Scheduler
from minisgl.scheduler.admission import admissible_max_tokens
from minisgl.scheduler.io import Message


def test_promised_tokens_are_not_planned_past_the_end() -> None:
    scheduler = make()
    add(scheduler, 0, [1, 2], max_tokens=2)
    first, second = scheduler.plan(), scheduler.plan()
    assert scheduler.plan() is None
    assert second is not None
    assert second.token_ids.tolist() == [-1]
    assert [type(event) for event in settle(scheduler, first)] == [Token]
    events = settle(scheduler, second)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    assert not scheduler.runnable


def test_end_of_sequence_is_seen_one_step_late_and_the_extra_token_is_discarded() -> None:
    scheduler = make()
    add(scheduler, 0, [1, 2])
    first, second = scheduler.plan(), scheduler.plan()
    token, end = settle(scheduler, first, token=EOS)
    assert token == Token(uid=0, id=EOS, silent=True)
    assert isinstance(end, Finished)
    assert (end.reason, end.num_output_tokens) == ("stop", 1)
    assert settle(scheduler, second) == []
    assert scheduler.requests.cache.num_used_pages == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_request_whose_scores_are_not_finite_fails(value: float) -> None:
    """An infinite logit makes the log-probabilities of all others -inf, and its own NaN."""
    scheduler = make(max_prefill_tokens=4)
    add(scheduler, 0, [1] * 8, prompt_logprobs=0)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.sample_rows == []
    (failed,) = scheduler.commit(
        plan, StepResult(next_ids=[], scores=[([-1.0, value, -1.0, -1.0], [[]] * 4)])
    )
    assert isinstance(failed, Failed)
    assert failed.code == "non_finite_logits"
    assert scheduler.stats.num_output_tokens == 0


def test_the_times_of_a_request() -> None:
    clock = [10.0]
    scheduler = Scheduler(make().config, clock=lambda: clock[-1])
    add(scheduler, 0, [1, 2], max_tokens=3)
    clock.append(11.0)
    plan = scheduler.plan()
    for now in (13.0, 14.0, 16.0):
        clock.append(now)
        events = settle(scheduler, plan)
        plan = scheduler.plan()
    assert isinstance(events[-1], Finished)
    assert (events[-1].queued_s, events[-1].prefill_s, events[-1].decode_s) == (1, 2, 3)


def test_a_request_that_resumes_is_counted_once() -> None:
    """The prompt tokens that it finds in the cache then are its own."""
    scheduler = make()
    add(scheduler, 0, [1] * 8, max_tokens=10)
    for _ in range(9):
        settle(scheduler, scheduler.plan())
    scheduler.requests.retract(scheduler.requests.by_uid[0])
    end = settle(scheduler, scheduler.plan())[-1]
    assert isinstance(end, Finished)
    assert (end.num_cached_tokens, end.num_retractions, end.num_chunks) == (0, 1, 1)
    assert (scheduler.stats.num_prompt_tokens, scheduler.stats.num_cached_tokens) == (8, 0)


def test_a_request_whose_scores_are_reported_resumes_from_the_cache() -> None:
    scheduler = make()
    add(scheduler, 0, [1] * 8, prompt_logprobs=0)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, StepResult(next_ids=[5], scores=[([-1.0] * 7, [[]] * 7)]))
    for _ in range(8):
        settle(scheduler, scheduler.plan())
    scheduler.requests.retract(scheduler.requests.by_uid[0])
    assert spans(scheduler.plan()) == [(0, 16, 17)]


def test_a_request_of_an_earlier_engine_goes_on() -> None:
    """It is no new request for the queue's limit, its prompt is not scored again, and the next
    token has the index behind its output."""
    scheduler = make(max_queued=1)
    add(scheduler, 0, [1, 2])
    assert isinstance(add(scheduler, 1, [1, 2]), Failed)
    options = SamplingParams(max_tokens=5, prompt_logprobs=0)
    message = UserMsg(uid=1, ids=ids_to_bytes([1] * 8), sampling=options)
    accepted = scheduler.add(msgspec.structs.replace(message, output=ids_to_bytes([6, 7, 8])))
    assert isinstance(accepted, Accepted)
    assert ids_from_bytes(accepted.output).tolist() == [6, 7, 8]
    scheduler.handle(AbortMsg(uid=0))
    plan = scheduler.plan()
    assert plan is not None
    assert spans(plan) == [(1, 0, 11)]
    assert (plan.token_ids.tolist(), plan.output_idxs) == ([1] * 8 + [6, 7, 8], [3])
    assert plan.scored == []
    settle(scheduler, plan)
    end = settle(scheduler, scheduler.plan())[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.num_prompt_tokens, end.num_output_tokens) == ("length", 8, 5)
    assert end.prefill_s > 0

    # The tree has the output of the first, too, but only the prompt counts as cached.
    longer = msgspec.structs.replace(options, max_tokens=6)
    again = msgspec.structs.replace(message, uid=2, output=ids_to_bytes([6, 7, 8, 5, 5]))
    scheduler.add(msgspec.structs.replace(again, sampling=longer))
    plan = scheduler.plan()
    assert spans(plan) == [(2, 12, 13)]
    end = settle(scheduler, plan)[-1]
    assert isinstance(end, Finished)
    assert (end.num_cached_tokens, end.num_output_tokens) == (8, 6)
    assert scheduler.stats.num_cached_tokens == 8, "else the hit rate exceeds 1"

    # What a router says that another server has made is checked as a prompt is.
    add(scheduler, 4, [1, 2])
    for ids, says in (
        ([100], "between 0 and 99, got 100"),
        ([-1], "between 0 and 99, got -1"),
        ([], "the queue is full"),
    ):
        sent = msgspec.structs.replace(message, output=ids_to_bytes(ids), repeats=True)
        refused = scheduler.add(sent)
        assert isinstance(refused, Failed)
        assert says in refused.message
    scheduler.handle(AbortMsg(uid=4))
    refused = scheduler.add(msgspec.structs.replace(message, output=ids_to_bytes([5] * 5)))
    assert isinstance(refused, Failed)
    assert "5 of at most 5 output tokens" in refused.message

    # One without output begins anew.
    scheduler.add(msgspec.structs.replace(message, uid=3, output=b""))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.output_idxs == [0]
    assert len(plan.scored) == 1


@pytest.mark.parametrize(
    ("token", "ignore_eos", "stop_match"), [(7, False, 7), (EOS, False, None), (EOS, True, 99)]
)
def test_the_end_names_the_stop_token_id(
    token: int, ignore_eos: bool, stop_match: int | None
) -> None:
    scheduler = make()
    stops = (7, EOS) if ignore_eos else (7,)
    add(scheduler, 0, [1, 2], ignore_eos=ignore_eos, stop_token_ids=stops)
    end = settle(scheduler, scheduler.plan(), token)[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_match) == ("stop", stop_match)


def test_a_failed_step_keeps_the_pages_of_requests_that_ended_before() -> None:
    scheduler = make()
    add(scheduler, 0, [1, 2, 3], max_tokens=2)
    settle(scheduler, scheduler.plan())
    settle(scheduler, scheduler.plan())  # the fourth token completes a page
    add(scheduler, 1, [7] * 5)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, StepFailed(error=EngineError("out of memory"), uids=(1,)))
    add(scheduler, 2, [1, 2, 3, 5, 9])
    assert spans(scheduler.plan()) == [(2, 4, 5)]
    check_books(scheduler)


def test_aborts() -> None:
    scheduler = make(max_running=1)
    add(scheduler, 0, [1, 2])
    add(scheduler, 1, [1, 2])
    plan = scheduler.plan()
    for uid in (1, 0):  # waiting, and in flight
        (end,) = scheduler.handle(AbortMsg(uid=uid))
        assert isinstance(end, Finished)
        assert end.reason == "abort"
    assert scheduler.handle(AbortMsg(uid=0)) == []
    assert scheduler.handle(AbortMsg(uid=77)) == []
    assert settle(scheduler, plan) == []
    assert not scheduler.runnable
    assert scheduler.requests.cache.num_used_pages == 0


def test_a_stop_counts_the_tokens_that_the_client_has() -> None:
    scheduler = make()
    add(scheduler, 0, [1, 2])
    for _ in range(3):
        settle(scheduler, scheduler.plan())
    (end,) = scheduler.handle(StopMsg(uid=0, num_tokens=2))
    assert isinstance(end, Finished)
    assert (end.reason, end.num_output_tokens) == ("stop", 2)


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 100], {}, "between 0 and 99, got 100"),
        ([-3], {}, "between 0 and 99, got -3"),
        ([1], {"stop_token_ids": (99, 100, 3)}, "stop_token_ids must be between 0 and 99, got 100"),
        (
            [1] * 60,
            {},
            "the prompt has 60 tokens, but this model's maximum context length is 60 tokens, and"
            " at least one must be left for the answer; the prompt is too long, so shorten it",
        ),
        (
            [1] * 61,
            {"max_tokens": 0, "echo": True},
            "context length is 60 tokens; the prompt is too long, so shorten it",
        ),
        ([1], {"max_tokens": 60}, "the prompt has 1 token and max_tokens asks for 60 more"),
        (
            [1] * 50,
            {"max_tokens": 11},
            "61 in all, but this model's maximum context length is 60 tokens; ask for at",
        ),
    ],
)
def test_refusals_state_the_limits(prompt: list[int], sampling: dict[str, Any], says: str) -> None:
    answer = add(make(max_seq_len=60), 0, prompt, **sampling)
    assert isinstance(answer, Failed)
    assert says in answer.message
    assert answer.status == 400


def test_a_request_that_can_never_fit_the_pool_is_refused() -> None:
    answer = add(make(num_pages=5), 0, [1] * 15, max_tokens=6)
    assert isinstance(answer, Failed)
    assert "length is 20 tokens (the KV cache holds no more)" in answer.message
    assert "--num-pages" in answer.message
    accepted = add(make(num_pages=5), 0, [1] * 15)
    assert isinstance(accepted, Accepted)
    assert accepted.sampling.max_tokens == 5


@pytest.mark.parametrize("num_pages", [5, 6])
def test_a_prompt_without_an_answer_may_fill_the_pool(num_pages: int) -> None:
    """A token is sampled all the same, but its KV is not computed."""
    scheduler = make(num_pages=num_pages, max_seq_len=20)
    add(scheduler, 0, [1] * 20, max_tokens=0, echo=True)
    assert isinstance(settle(scheduler, scheduler.plan())[-1], Finished)
    assert isinstance(add(scheduler, 1, [1] * 21, max_tokens=0, echo=True), Failed)


def test_a_full_queue_is_busy() -> None:
    scheduler = make(max_queued=1)
    add(scheduler, 0, [1])
    answer = add(scheduler, 1, [1])
    assert isinstance(answer, Failed)
    assert answer.status == 429
    assert "full with 1 request;" in answer.message


def test_a_key_cannot_fill_the_queue_of_another() -> None:
    """Each key may have an equal share; the queue is then longer than its bound."""
    scheduler, uid = make(max_queued=4), count()

    def accepts(key: int) -> bool:
        return isinstance(add(scheduler, next(uid), [1], share=KeyShare(0, key)), Accepted)

    assert [accepts(1) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [accepts(2) for _ in range(4)] == [True] * 2 + [False] * 2
    assert [accepts(key) for key in (3, 3, 1, 2, 4, 5, 5)] == [True] + [False] * 3 + [True] * 2 + [
        False
    ]


def test_a_full_queue_does_not_hide_that_a_request_can_never_fit() -> None:
    scheduler = make(max_queued=1, max_seq_len=60)
    add(scheduler, 0, [1])
    answer = add(scheduler, 1, [1] * 60)
    assert isinstance(answer, Failed)
    assert (answer.status, answer.code) == (400, "context_length_exceeded")


@pytest.mark.needs("minisgl_gateway")
def test_a_message_ends_a_request_that_waits_too_long() -> None:
    """A request that has started may wait for longer, after a retraction for instance."""
    from minisgl_gateway.queue_wait import QueueWait

    now = 100.0
    scheduler = Scheduler(make(max_running=1).config, clock=lambda: now)
    add(scheduler, 0, [1, 2, 3])
    settle(scheduler, scheduler.plan())
    add(scheduler, 1, [4, 5, 6])
    source = QueueWait(ListSource(), 2.0, lambda: scheduler.requests.queued, clock=lambda: now)
    now += 2.0
    assert source.get(0) == []
    now += 0.05
    assert source.get(0) == [], "it looks every 0.1 s"
    now += 0.33
    (message,) = source.get(0)
    assert isinstance(message, AbortMsg)
    (failed,) = scheduler.handle(message)
    assert isinstance(failed, Failed)
    assert (failed.uid, failed.status, failed.code) == (1, 503, "queue_timeout")
    assert "has waited 2.4 s in the queue, longer than --max-queue-wait 2 allows" in failed.message
    assert scheduler.handle(message) == [], "it has ended already"
    check_books(scheduler)
    now += 1
    assert source.get(0) == []
    scheduler.requests.retract(scheduler.requests.running[0])
    now += 60
    assert source.get(0) == []


@pytest.mark.needs("minisgl_gateway")
def test_a_request_waits_for_its_grammar_and_others_go_on() -> None:
    from minisgl_gateway.queue_wait import QueueWait

    now = 100.0
    scheduler = Scheduler(make(max_queued=3).config, clock=lambda: now)
    for uid in range(3):
        add(scheduler, uid, [1, 2], grammar="g", max_tokens=1)
    assert not scheduler.runnable, "the loop sleeps until a message comes"
    full = add(scheduler, 3, [3, 4])
    assert isinstance(full, Failed)
    assert full.status == 429, "what compiles is in the queue"
    assert [type(event) for event in scheduler.handle(AbortMsg(uid=0))] == [Finished]
    assert scheduler.handle(AbortMsg(uid=0)) == [], "it has ended already"
    add(scheduler, 4, [3, 4], max_tokens=1)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.uids == [4]
    settle(scheduler, plan)
    assert scheduler.plan() is None
    for uid in (0, 1, 9):  # an ended one, the next, an unknown one
        assert scheduler.handle(CompiledMsg(uid=uid)) == []
    plan = scheduler.plan()
    assert plan is not None
    assert plan.uids == [1]
    source = QueueWait(ListSource(), 2.0, lambda: scheduler.requests.queued, clock=lambda: now)
    now += 3
    (message,) = source.get(0)
    assert isinstance(message, AbortMsg)
    (failed,) = scheduler.handle(message)
    assert isinstance(failed, Failed)
    assert (failed.uid, failed.code) == (2, "queue_timeout")
    check_books(scheduler)
    settle(scheduler, plan)
    assert not scheduler.requests.by_uid


class ListSource:
    def get(self, timeout_s: float | None) -> list[Message]:
        return []

    def close(self) -> None:
        pass


def test_no_page_of_a_request_with_damaged_logits_is_reused() -> None:
    """-1 says that a row's logits are not finite, so its KV may be damaged since its first step."""
    scheduler = make()
    add(scheduler, 0, [1] * 8)
    add(scheduler, 1, [2] * 8)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.uids == [0, 1]
    events = scheduler.commit(plan, StepResult(next_ids=[-1, 5]))
    assert [(type(event), event.uid) for event in events] == [(Token, 1), (Failed, 0)]
    add(scheduler, 2, [1] * 8)
    # The other request is computed again, and the same prompt finds nothing in the cache.
    assert sorted(spans(scheduler.plan())) == [(1, 0, 9), (2, 0, 8)]
    check_books(scheduler)


def test_the_first_step_of_all_damaged_requests_counts() -> None:
    scheduler = make()
    add(scheduler, 0, [1] * 8)
    settle(scheduler, scheduler.plan())
    add(scheduler, 1, [2] * 8)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.uids == [0, 1]
    events = scheduler.commit(plan, StepResult(next_ids=[-1, -1]))
    assert [(type(event), event.uid) for event in events] == [(Failed, 0), (Failed, 1)]
    add(scheduler, 2, [1] * 8)
    assert spans(scheduler.plan()) == [(2, 0, 8)], "pages of the first step are damaged too"
    check_books(scheduler)


def test_a_request_gets_as_many_likely_tokens_as_it_asks_for() -> None:
    """A step computes the largest number that a row asks for."""
    scheduler = make()
    add(scheduler, 0, [1], logprobs=True, top_logprobs=1)
    add(scheduler, 1, [2], logprobs=True, top_logprobs=3)
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.top_rows, plan.num_top) == ([0, 1], 3)
    top = [(5, -0.1), (6, -2.0), (7, -3.0)]
    outcome = StepResult(next_ids=[5, 5], logprobs={0: -0.1, 1: -0.1}, tops={0: top, 1: top})
    events = scheduler.commit(plan, outcome)
    assert [len(event.top) for event in events if isinstance(event, Token)] == [1, 3]


@pytest.mark.needs("minisgl_zoo")
def test_min_tokens_needs_an_allowed_token_that_does_not_end_the_answer() -> None:
    config, prompt = make().config, np.array([1], np.int32)

    def admit(**fields: Any) -> int:
        sampling = SamplingParams(allowed_token_ids=(EOS,), min_tokens=1, **fields)
        return admissible_max_tokens(config, prompt, sampling)

    for ends in ({}, {"ignore_eos": True, "stop_token_ids": (EOS,)}):
        with pytest.raises(InvalidSampling, match="has only tokens that end the answer"):
            admit(**ends)
    assert admit(ignore_eos=True, max_tokens=3) == 3
