"""The scheduler's rules, one by one, on plans that a person can check."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.core import Accepted, Event, Failed, Finished, Plan, SamplingParams, StepResult, Token
from minisgl.message import AbortMsg, StopMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig

EOS = 99


def make(**changes: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "num_pages": 64,
        "page_size": 4,
        "max_seq_len": 200,
        "vocab_size": 100,
        "eos_ids": frozenset([EOS]),
        "max_prefill_tokens": 32,
        "max_running": 8,
    }
    return Scheduler(SchedulerConfig(**(settings | changes)))


def add(
    scheduler: Scheduler,
    uid: int,
    prompt: list[int],
    *,
    priority: int = 0,
    namespace: str = "",
    **sampling: Any,
) -> Accepted | Failed:
    message = UserMsg(
        uid=uid,
        ids=ids_to_bytes(prompt),
        sampling=SamplingParams(**sampling),
        priority=priority,
        namespace=namespace,
    )
    return scheduler.add(message)


def spans(plan: Plan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return list(zip(plan.uids, plan.starts, plan.ends, strict=True))


def settle(scheduler: Scheduler, plan: Plan | None, token: int = 5) -> list[Event]:
    assert plan is not None
    events = scheduler.commit(plan, StepResult(next_ids=[token] * len(plan.sample_rows)))
    scheduler.check()
    return events


def test_decodes_come_first_and_on_top_of_the_budget() -> None:
    scheduler = make(max_prefill_tokens=8)
    add(scheduler, 0, [1, 2, 3])
    assert spans(scheduler.plan()) == [(0, 0, 3)]
    add(scheduler, 1, [7] * 20)
    assert spans(scheduler.plan()) == [(0, 3, 4), (1, 0, 8)]
    assert spans(scheduler.plan()) == [(0, 4, 5), (1, 8, 16)]


def test_prompts_share_a_step_and_only_the_last_chunk_samples() -> None:
    scheduler = make(max_prefill_tokens=10)
    add(scheduler, 0, [1] * 6)
    add(scheduler, 1, [2] * 9)
    plan = scheduler.plan()
    assert spans(plan) == [(0, 0, 6), (1, 0, 4)]
    assert plan is not None
    assert plan.sample_rows == [0]
    assert spans(scheduler.plan()) == [(0, 6, 7), (1, 4, 9)]


def test_chunks_are_smaller_while_more_requests_decode_than_wait() -> None:
    scheduler = make(max_prefill_tokens=16, max_stalling_tokens=4)
    for uid in range(2):
        add(scheduler, uid, [uid] * 3)
    assert spans(scheduler.plan()) == [(0, 0, 3), (1, 0, 3)]
    for uid in range(2, 5):
        add(scheduler, uid, [uid] * 18)
    # Two decode and three wait, then two decode and two wait, then three decode and one waits.
    assert spans(scheduler.plan())[2:] == [(2, 0, 16)]
    assert spans(scheduler.plan())[2:] == [(2, 16, 18), (3, 0, 12)]
    assert spans(scheduler.plan())[3:] == [(3, 12, 16)]
    assert spans(scheduler.plan())[3:] == [(3, 16, 18), (4, 0, 2)]


def test_large_chunks_go_on_while_few_of_the_tokens_wait_for_them() -> None:
    """Of 350 tokens 3 may wait: a large chunk holds up two. Of 450 it would be 4, and with a second
    chunk it were 5. And a chunk that starts nobody is small."""
    scheduler = make(max_prefill_tokens=16, max_stalling_tokens=4, max_seq_len=240, num_pages=128)
    for uid, max_tokens in enumerate((200, 100)):
        add(scheduler, uid, [uid] * 3, max_tokens=max_tokens)
    assert spans(scheduler.plan()) == [(0, 0, 3), (1, 0, 3)]
    add(scheduler, 2, [2] * 40, max_tokens=50)
    assert spans(scheduler.plan())[2:] == [(2, 0, 4)]
    for _ in range(5):
        scheduler.plan()
    assert spans(scheduler.plan())[2:] == [(2, 24, 40)]  # a large one, which starts it
    add(scheduler, 3, [3] * 12, max_tokens=100)
    assert spans(scheduler.plan())[3:] == [(3, 0, 4)]


@pytest.mark.parametrize(("num_waiting", "end"), [(1, 16), (2, 4)])
def test_no_large_chunk_where_all_that_wait_would_take_too_many(num_waiting: int, end: int) -> None:
    """Three of 200 tokens decode. One that waits holds them up once, 3 of 650 tokens; two hold up
    3 and then 4 of 700."""
    scheduler = make(
        max_prefill_tokens=16, max_stalling_tokens=4, max_seq_len=240, num_pages=256, max_running=8
    )
    for uid in range(3):
        add(scheduler, uid, [uid] * 3, max_tokens=200)
    assert len(spans(scheduler.plan())) == 3
    for uid in range(3, 3 + num_waiting):
        add(scheduler, uid, [uid] * 16, max_tokens=50)
    assert spans(scheduler.plan())[3:] == [(3, 0, end)]


def test_what_is_cached_is_no_part_of_a_chunk() -> None:
    """Four decode. Two wait, of 26 tokens of which 16 are cached: one large chunk starts both."""
    scheduler = make(max_prefill_tokens=20, max_stalling_tokens=4, max_seq_len=240, num_pages=256)
    for uid, prompt in enumerate(([0], [1], [2], list(range(16)))):
        add(scheduler, uid, prompt, max_tokens=200)
    assert len(spans(scheduler.plan())) == 4
    for uid in (4, 5):
        add(scheduler, uid, [*range(16), *[uid] * 10], max_tokens=50)
    assert spans(scheduler.plan())[4:] == [(4, 16, 26), (5, 16, 26)]


@pytest.mark.parametrize(
    ("max_running", "expected"), [(18, [(17, 0, 4)]), (19, [(17, 0, 8), (18, 0, 8)])]
)
def test_a_large_chunk_is_for_those_that_can_start(
    max_running: int, expected: list[tuple[int, int, int]]
) -> None:
    """17 decode, more than 16 for each that starts if the table has one row left."""
    scheduler = make(
        max_prefill_tokens=17, max_stalling_tokens=4, num_pages=512, max_running=max_running
    )
    for uid in range(17):
        add(scheduler, uid, [uid], max_tokens=190)
    assert len(spans(scheduler.plan())) == 17
    for uid in (17, 18):
        add(scheduler, uid, [uid] * 8)
    assert spans(scheduler.plan())[17:] == expected


def test_a_prompt_that_is_half_done_waits_too() -> None:
    """One decodes and one is behind: its chunks are large to its end."""
    scheduler = make(max_prefill_tokens=16, max_stalling_tokens=4)
    add(scheduler, 0, [0] * 3)
    scheduler.plan()
    add(scheduler, 1, [1] * 40)
    ends = [spans(scheduler.plan())[1][1:] for _ in range(3)]
    assert ends == [(0, 16), (16, 32), (32, 40)]


@pytest.mark.parametrize(("max_tokens", "end"), [(20, 8), (150, 20)])
def test_what_is_behind_may_give_tokens_too(max_tokens: int, end: int) -> None:
    """Two decode, of 100 and 60 tokens, of which one may wait; with 150 more, two may."""
    scheduler = make(max_prefill_tokens=16, max_stalling_tokens=4, max_seq_len=240, num_pages=128)
    for uid, tokens in enumerate((100, 60)):
        add(scheduler, uid, [uid] * 3, max_tokens=tokens)
    scheduler.plan()
    add(scheduler, 2, [2] * 20, max_tokens=max_tokens)
    assert spans(scheduler.plan())[2:] == [(2, 0, 4)]  # starts nobody
    assert spans(scheduler.plan())[2:] == [(2, 4, end)]


@pytest.mark.parametrize("uid", [0, 2])
def test_what_a_retracted_request_has_waited_counts(uid: int) -> None:
    """Of three times 200 tokens 5 may wait, and 6 have."""
    scheduler = make(max_prefill_tokens=16, max_stalling_tokens=4, max_seq_len=240)
    for i in range(3):
        add(scheduler, i, [i] * 5, max_tokens=200)
    settle(scheduler, scheduler.plan())
    scheduler._requests[uid].num_stalls = 6
    scheduler._retract(scheduler._requests[2])
    assert scheduler._prefill_budget([0, 1], None) == 4


def test_a_prefix_that_arrives_twice_is_computed_once() -> None:
    scheduler = make(max_prefill_tokens=8)
    prompt = list(range(18))
    add(scheduler, 0, prompt)
    add(scheduler, 1, prompt)
    assert spans(scheduler.plan()) == [(0, 0, 8)]
    assert spans(scheduler.plan()) == [(0, 8, 16)]
    # The second starts in the step that finishes the first, with its four full pages.
    assert spans(scheduler.plan()) == [(0, 16, 18), (1, 16, 18)]


def test_a_prompt_whose_last_token_is_left_alone_is_computed_once_too() -> None:
    """It goes with the decodes; its page is full, and its tokens took two steps."""
    scheduler = make(max_prefill_tokens=3)
    add(scheduler, 0, list(range(8)), max_tokens=1)
    for span in ((0, 3), (3, 4), (4, 7)):
        plan = scheduler.plan()
        assert spans(plan) == [(0, *span)]
        settle(scheduler, plan)
    last = scheduler.plan()
    assert spans(last) == [(0, 7, 8)]
    add(scheduler, 1, [*range(8), 9], max_tokens=1)
    assert spans(scheduler.plan()) == [(1, 8, 9)]
    *_, end = settle(scheduler, last)
    assert isinstance(end, Finished)
    assert end.num_chunks == 4


def test_one_token_is_left_to_compute_of_a_cached_prompt() -> None:
    scheduler = make()
    for uid in range(2):
        add(scheduler, uid, list(range(16)), max_tokens=1)
        plan = scheduler.plan()
        assert spans(plan) == [(uid, 12 if uid else 0, 16)]
        settle(scheduler, plan)


def test_only_requests_of_one_namespace_share_a_prefix() -> None:
    scheduler = make()
    for uid, namespace in enumerate(["alice", "bob", "", "alice"]):
        add(scheduler, uid, [1] * 12, namespace=namespace)
    assert spans(scheduler.plan()) == [(0, 0, 12), (1, 0, 12), (2, 0, 8)]
    assert spans(scheduler.plan())[2:] == [(2, 8, 12), (3, 8, 12)]


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
    assert scheduler.num_used_pages == 0


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


def test_priority_then_arrival() -> None:
    scheduler = make(max_running=1)
    for uid, priority in enumerate([0, 1, -1, 0]):
        add(scheduler, uid, [uid + 1], priority=priority, max_tokens=1)
    order = []
    while plan := scheduler.plan():
        order += plan.uids
        settle(scheduler, plan)
    assert order == [2, 0, 3, 1]


def test_the_last_in_the_order_gives_its_pages() -> None:
    scheduler = make(num_pages=6, page_size=1, max_seq_len=6)
    add(scheduler, 0, [1, 2], max_tokens=4)
    settle(scheduler, scheduler.plan())
    add(scheduler, 1, [3], max_tokens=5)
    uids = set()
    retracted = False
    while plan := scheduler.plan():
        uids |= set(plan.uids)
        retracted |= scheduler.stats.num_retractions > 0
        settle(scheduler, plan)
    assert uids == {0, 1}
    assert scheduler.stats.num_finished == 2


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
    assert scheduler.num_used_pages == 0


def test_stop_counts_what_the_client_was_given() -> None:
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
        ([1] * 60, {}, "the prompt has 60 tokens, but the context length holds 60"),
        ([1], {"max_tokens": 60}, "the prompt has 1 token and max_tokens asks for 60 more"),
        ([1] * 50, {"max_tokens": 11}, "61 in all, but the context length holds 60; ask for at"),
    ],
)
def test_refusals_say_the_numbers(prompt: list[int], sampling: dict[str, Any], says: str) -> None:
    answer = add(make(max_seq_len=60), 0, prompt, **sampling)
    assert isinstance(answer, Failed)
    assert says in answer.message
    assert answer.status == 400


def test_what_can_never_fit_the_pool_is_refused() -> None:
    answer = add(make(num_pages=5), 0, [1] * 15, max_tokens=6)
    assert isinstance(answer, Failed)
    assert "the KV cache holds 20" in answer.message
    assert "--num-pages" in answer.message
    accepted = add(make(num_pages=5), 0, [1] * 15)
    assert isinstance(accepted, Accepted)
    assert accepted.sampling.max_tokens == 5


def test_a_full_queue_is_busy() -> None:
    scheduler = make(max_queued=1)
    add(scheduler, 0, [1])
    answer = add(scheduler, 1, [1])
    assert isinstance(answer, Failed)
    assert answer.status == 429
    assert "full with 1 request;" in answer.message


def test_a_full_queue_does_not_hide_that_a_request_can_never_fit() -> None:
    scheduler = make(max_queued=1, max_seq_len=60)
    add(scheduler, 0, [1])
    answer = add(scheduler, 1, [1] * 60)
    assert isinstance(answer, Failed)
    assert (answer.status, answer.code) == (400, "context_length_exceeded")
