"""Planning, rule by rule, on plans that a person can check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.books import check_books
from helpers.scheduling import add, make, settle, spans, whole_image
from minisgl.core import (
    Accepted,
    Finished,
    SamplingParams,
    Token,
)
from minisgl.core.groups import CacheGroup
from minisgl.core.image import LOWEST, Image, places_of
from minisgl.core.step_times import StepTimes
from minisgl.message import KeyShare, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler
from minisgl.scheduler.budget import prompt_budget

TIMES = StepTimes(prompt_us=((8, 1000), (1024, 102_600)), decode_us=500, row_us=0, attend_ns=10_000)
"""Steps with prompts take 0.2 ms and 0.1 ms a token, and decode steps 0.5 ms."""


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


@pytest.mark.parametrize(("budget", "of_first"), [(1, 1), (5, 3)])
def test_the_first_prompt_has_half_of_an_odd_budget(budget: int, of_first: int) -> None:
    scheduler = make(max_prefill_tokens=budget)
    add(scheduler, 0, [1] * 20)
    add(scheduler, 1, [2] * 9)
    plan = scheduler.plan()
    assert plan is not None
    assert spans(plan)[-1] == (0, 0, of_first)
    assert plan.num_tokens == budget


def test_short_prompts_together_have_half_of_the_stall_bound() -> None:
    """16 tokens fit: 7 into the time of the first, and 4 more into half of the rest."""
    scheduler = make(max_stall_s=1.6e-3, step_times=TIMES)
    add(scheduler, 0, [0] * 4)
    scheduler.plan()
    for uid, length in enumerate((40, 8, 8, 8, 8), 1):
        add(scheduler, uid, [uid] * length)
    assert spans(scheduler.plan())[1:] == [(2, 0, 8), (3, 0, 3), (1, 0, 4), (4, 0, 1)]


def test_short_prompts_beside_streams_do_not_starve_the_first() -> None:
    """Padded steps take as long with 64 tokens as with one, so half of the bound pays for as many
    tokens as the whole."""
    times = StepTimes(
        prompt_us=((64, 9000), (128, 9500), (256, 11_000)), decode_us=8000, padded_tokens=256
    )
    bounds = {"max_prefill_tokens": 256, "max_stall_s": 1.5e-3, "step_times": times}
    scheduler = make(num_pages=999, max_seq_len=3000, **bounds)
    add(scheduler, 0, [1, 2, 3])
    settle(scheduler, scheduler.plan())
    add(scheduler, 1, [7] * 2000)
    gap = longest = 0
    for uid in range(2, 42):
        add(scheduler, uid, [uid] * 150, max_tokens=1)
        plan = scheduler.plan()
        assert plan is not None
        gap = 0 if 1 in plan.uids else gap + 1
        longest = max(longest, gap)
        settle(scheduler, plan)
    assert 1 <= longest <= 2


def test_an_image_is_computed_whole() -> None:
    scheduler = make(max_prefill_tokens=16)
    add(scheduler, 0, [1] * 40, images=[whole_image(10, 22), whole_image(23, 27)])
    assert spans(scheduler.plan()) == [(0, 0, 10)]
    assert spans(scheduler.plan()) == [(0, 10, 23)]
    assert spans(scheduler.plan()) == [(0, 23, 36)]


def test_an_image_does_not_wait_for_shorter_prompts() -> None:
    scheduler = make(max_prefill_tokens=16)
    add(scheduler, 0, [1] * 40, images=[whole_image(4, 18)])
    add(scheduler, 1, [2] * 30, images=[whole_image(2, 12)])
    assert spans(scheduler.plan()) == [(1, 0, 2), (0, 0, 4)]
    add(scheduler, 2, [3] * 8)
    assert spans(scheduler.plan()) == [(0, 4, 20)]


def test_an_image_may_exceed_the_stall_bound() -> None:
    """Its tower's time counts in the step that computes it, not in one that ends before it."""
    times = replace(TIMES, image_ns=1e7)  # 10 ms for the images below
    scheduler = make(max_prefill_tokens=100, max_stall_s=2e-3, step_times=times)
    add(scheduler, 0, [1, 2, 3])
    scheduler.plan()
    add(scheduler, 1, [7] * 60, images=[whole_image(3, 53)])
    add(scheduler, 2, [8] * 60, images=[whole_image(0, 50, key=2)])
    assert spans(scheduler.plan()) == [(0, 3, 4), (1, 0, 3)]
    assert spans(scheduler.plan()) == [(0, 4, 5), (1, 3, 53)]
    assert spans(scheduler.plan()) == [(0, 5, 6), (1, 53, 56)]  # time is owed to the stream


def test_an_image_whose_chunk_lacks_pages_owes_nothing() -> None:
    times = replace(TIMES, image_ns=1e7)
    scheduler = make(num_pages=16, max_prefill_tokens=8, max_stall_s=2e-3, step_times=times)
    add(scheduler, 0, [1, 2])
    scheduler.plan()
    add(scheduler, 1, [7] * 16, images=[whole_image(9, 15)])
    assert spans(scheduler.plan()) == [(0, 2, 3), (1, 0, 8)]
    free = scheduler.requests.cache._allocator
    taken = free.allocate(free.num_free)
    assert spans(scheduler.plan()) == [(0, 3, 4)]
    assert scheduler.requests.owed_s == 0
    free.free(taken)


@pytest.mark.needs("minisgl_zoo")
def test_the_first_decode_frees_the_state_before_the_prompts() -> None:
    from minisgl_zoo.cache_groups.groups import StateGroup

    states = StateGroup(interval=8, num_pages=9)
    groups = (CacheGroup(num_pages=50), states)
    scheduler = make(num_pages=0, groups=groups, max_prefill_tokens=12)
    add(scheduler, 0, [1] * 18)
    assert spans(scheduler.plan()) == [(0, 0, 8)]
    assert spans(scheduler.plan()) == [(0, 8, 18)]  # it reads the state at 8, and writes that at 16
    holding = scheduler.requests.by_uid[0].handle
    assert [index for index, page in enumerate(holding.tails[0]) if page >= 0] == [1, 3]
    assert spans(scheduler.plan()) == [(0, 18, 19)]
    assert [index for index, page in enumerate(holding.tails[0]) if page >= 0] == [3]


def test_a_stall_bound_counts_only_beside_decode_rows() -> None:
    """A step of 3 decode rows and n tokens takes 0.2 + 0.1 (n + 3) ms; 0.5 of them without."""
    scheduler = make(max_prefill_tokens=32, max_stall_s=1.6e-3, step_times=TIMES)
    add(scheduler, 0, [0] * 64)
    assert spans(scheduler.plan()) == [(0, 0, 32)]
    assert spans(scheduler.plan()) == [(0, 32, 64)]
    add(scheduler, 1, [1] * 40)
    # 16 tokens add 1.6 ms; the next ones also attend to those, at 0.16 ms each.
    assert spans(scheduler.plan())[1:] == [(1, 0, 16)]
    assert spans(scheduler.plan())[1:] == [(1, 16, 20)]


def test_a_step_may_compute_a_page_whatever_the_stall_bound_is() -> None:
    scheduler = make(max_stall_s=1e-6, step_times=TIMES)
    add(scheduler, 0, [0] * 4)
    scheduler.plan()
    add(scheduler, 1, [1] * 10)
    ends = [spans(scheduler.plan())[1:] for _ in range(3)]
    assert ends == [[(1, 0, 4)], [(1, 4, 8)], [(1, 8, 10)]]


def test_attention_of_a_chunk_counts_against_the_next() -> None:
    """A chunk that reads a long context takes more of the stall bound than one that reads none."""
    config = make(max_prefill_tokens=1024, max_stall_s=0.02, step_times=TIMES).config
    fitting = []
    for start in (0, 1000):
        budget = prompt_budget(config, num_decodes=1)
        budget.take(start, 1)
        fitting.append(budget.fitting(0, 1024))
    assert 0 < fitting[1] < fitting[0]


def test_beside_streams_a_step_runs_the_tower_for_one_large_image() -> None:
    """Or for small ones that the stall bound allows. Neither may hold up streams for longer."""
    times = replace(TIMES, image_ns=1000.0)  # 10 ms and 0.1 ms for the images below
    scheduler = make(max_stall_s=4e-3, step_times=times, num_pages=128)
    add(scheduler, 0, [0] * 4)
    scheduler.plan()  # from now on it decodes
    large = [picture(4, 3, 10_000), picture(8, 3, 10_000)]
    add_with(scheduler, 1, 12, large)
    assert spans(scheduler.plan())[1:] == [(1, 0, 8)]
    # 10 ms: 6.4 more than 0.9 of the bound, which the streams get back in two steps.
    assert spans(scheduler.plan())[1:] == []
    add(scheduler, 3, [3] * 8)
    assert spans(scheduler.plan())[1:] == [(1, 8, 12)]
    assert spans(scheduler.plan())[1:] == [(1, 12, 13), (3, 0, 8)]
    assert scheduler.requests.owed_s == pytest.approx(2.8e-3)
    scheduler.plan()
    small = [picture(4 * index, 3, 100) for index in range(1, 5)]
    add_with(scheduler, 2, 20, small)
    assert spans(scheduler.plan())[3:] == [(2, 0, 20)]


def test_an_image_that_another_request_began_leaves_the_next_one_out() -> None:
    scheduler = make(max_stall_s=4e-3, step_times=replace(TIMES, image_ns=1000.0))
    add(scheduler, 0, [0] * 4)
    scheduler.plan()
    for uid in (1, 2):
        add_with(scheduler, uid, 10, [picture(2, 3, 10_000, fill=uid)])
    assert spans(scheduler.plan())[1:] == [(1, 0, 10)]
    assert spans(scheduler.plan())[2:] == [(2, 0, 2)]
    assert spans(scheduler.plan())[2:] == [(2, 2, 10)]


def test_images_count_only_beside_decode_rows() -> None:
    scheduler = make(max_stall_s=4e-3, step_times=replace(TIMES, image_ns=1000.0))
    add_with(scheduler, 1, 12, [picture(4, 3, 10_000), picture(8, 3, 10_000)])
    assert spans(scheduler.plan()) == [(1, 0, 12)]


def picture(first: int, num_places: int, num_bytes: int, fill: int = 0) -> Image:
    places = ids_to_bytes(range(first, first + num_places))
    return Image(digest=bytes([fill]), places=places, token=7, shape=(num_bytes,), sizes=())


def add_with(scheduler: Scheduler, uid: int, num_tokens: int, images: list[Image]) -> None:
    prompt = [uid] * num_tokens
    for image in images:
        for place in places_of(image).tolist():
            prompt[place] = LOWEST + place + 1000 * uid
    message = UserMsg(
        uid=uid, ids=ids_to_bytes(prompt), sampling=SamplingParams(), images=tuple(images)
    )
    assert isinstance(scheduler.add(message), Accepted)


def test_short_prompts_share_the_budget_with_a_long_one() -> None:
    """Half of it, the shortest first, while the long one needs more than a step."""
    scheduler = make(max_prefill_tokens=32, num_pages=128)
    add(scheduler, 0, [0] * 150)
    assert spans(scheduler.plan()) == [(0, 0, 32)]
    add(scheduler, 1, [1] * 12)
    add(scheduler, 2, [2] * 8)
    assert spans(scheduler.plan()) == [(2, 0, 8), (1, 0, 8), (0, 32, 48)]
    assert spans(scheduler.plan()) == [(2, 8, 9), (1, 8, 12), (0, 48, 76)]
    assert spans(scheduler.plan())[2:] == [(0, 76, 108)]
    # What needs no more than one step is not held up.
    for _ in range(1):
        assert spans(scheduler.plan())[2:] == [(0, 108, 140)]
    add(scheduler, 3, [3] * 5)
    assert spans(scheduler.plan())[2:] == [(0, 140, 150), (3, 0, 5)]


def test_longer_prompts_and_lower_priorities_wait_for_the_first() -> None:
    scheduler = make(max_prefill_tokens=16, num_pages=128)
    add(scheduler, 0, [0] * 60)
    assert spans(scheduler.plan()) == [(0, 0, 16)]
    add(scheduler, 1, [1] * 80)
    add(scheduler, 2, [2] * 4, priority=1)
    assert spans(scheduler.plan()) == [(0, 16, 32)]
    add(scheduler, 3, [3] * 4, priority=-1)
    assert spans(scheduler.plan()) == [(3, 0, 4), (0, 32, 44)]


def test_cached_tokens_do_not_count_in_the_length_of_a_prompt() -> None:
    scheduler = make(max_prefill_tokens=16, num_pages=128)
    add(scheduler, 0, [0] * 61, max_tokens=1)
    while scheduler.runnable:
        settle(scheduler, scheduler.plan())
    add(scheduler, 1, [1] * 60)
    assert spans(scheduler.plan()) == [(1, 0, 16)]
    add(scheduler, 2, [0] * 60 + [5] * 4)
    assert spans(scheduler.plan()) == [(2, 60, 64), (1, 16, 28)]


def test_the_first_token_of_a_short_prompt_comes_within_four_steps() -> None:
    """And the prompt of 100,000 tokens ends at most 5 % later."""

    def steps_to_first_tokens(*others: int) -> dict[int, int]:
        scheduler = make(num_pages=8000, page_size=16, max_seq_len=110_000, max_prefill_tokens=2048)
        add(scheduler, 0, [0] * 100_000, max_tokens=2)
        steps: dict[int, int] = {}
        for step in range(1, 60):
            if step == 10:
                for uid in others:
                    add(scheduler, uid, [uid] * 100, max_tokens=2)
            if (plan := scheduler.plan()) is None:
                break
            for event in settle(scheduler, plan):
                if isinstance(event, Token):
                    steps.setdefault(event.uid, step)
        return steps

    alone, beside = steps_to_first_tokens(), steps_to_first_tokens(1, 2, 3)
    assert all(beside[uid] - 10 < 4 for uid in (1, 2, 3))
    assert beside[0] <= 1.05 * alone[0]


def test_prompts_with_a_common_prefix_compute_it_once_while_others_go_on() -> None:
    """The second waits for the pages that the first computes; a third, which shares none, does
    not."""
    scheduler = make(max_prefill_tokens=16, num_pages=256)
    common = list(range(40))
    add(scheduler, 0, common + [50] * 30)
    assert spans(scheduler.plan()) == [(0, 0, 16)]
    add(scheduler, 1, common + [51] * 4)
    add(scheduler, 2, [7] * 6)
    assert spans(scheduler.plan()) == [(2, 0, 6), (0, 16, 24)]
    assert spans(scheduler.plan())[1:] == [(0, 24, 40)]
    # Now all 40 are there, and 4 are left of the second.
    assert spans(scheduler.plan())[1:] == [(1, 40, 44), (0, 40, 52)]


def test_a_request_does_not_wait_for_a_prefix_of_a_lower_priority() -> None:
    scheduler = make(max_prefill_tokens=16, num_pages=256)
    add(scheduler, 0, list(range(60)))
    assert spans(scheduler.plan()) == [(0, 0, 16)]
    add(scheduler, 1, list(range(60)), priority=-1)
    assert spans(scheduler.plan()) == [(1, 16, 32)]


def test_requests_of_two_namespaces_do_not_wait_for_each_other() -> None:
    scheduler = make(max_prefill_tokens=16, num_pages=256)
    add(scheduler, 0, list(range(60)))
    assert spans(scheduler.plan()) == [(0, 0, 16)]
    message = UserMsg(
        uid=1, ids=ids_to_bytes(list(range(40))), sampling=SamplingParams(), namespace="other"
    )
    scheduler.add(message)
    assert spans(scheduler.plan()) == [(1, 0, 8), (0, 16, 24)]


def test_a_prefix_that_arrives_twice_is_computed_once() -> None:
    scheduler = make(max_prefill_tokens=8)
    prompt = list(range(18))
    add(scheduler, 0, prompt)
    add(scheduler, 1, prompt)
    assert spans(scheduler.plan()) == [(0, 0, 8)]
    assert spans(scheduler.plan()) == [(0, 8, 16)]
    # The second starts in the step that finishes the first, with its four full pages.
    assert spans(scheduler.plan()) == [(0, 16, 18), (1, 16, 18)]


def test_a_prompt_that_ends_with_a_decode_row_is_computed_once_too() -> None:
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


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
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


def test_the_order_is_by_priority_then_by_arrival() -> None:
    scheduler = make(max_running=1)
    for uid, priority in enumerate([0, 1, -1, 0]):
        add(scheduler, uid, [uid + 1], priority=priority, max_tokens=1)
    order = []
    while plan := scheduler.plan():
        order += plan.uids
        settle(scheduler, plan)
    assert order == [2, 0, 3, 1]


def test_the_last_request_in_the_order_is_retracted() -> None:
    scheduler = make(num_pages=12, page_size=1, max_seq_len=12, watermark_tokens=0)
    add(scheduler, 0, [1, 2], max_tokens=8)
    settle(scheduler, scheduler.plan())
    add(scheduler, 1, [3], max_tokens=8)
    retractions: dict[int, int] = {}
    while plan := scheduler.plan():
        for event in settle(scheduler, plan):
            if isinstance(event, Finished):
                retractions[event.uid] = event.num_retractions
    assert retractions == {0: 0, 1: 1}


def test_a_small_request_does_not_overtake_one_that_lacks_pages() -> None:
    scheduler = make(num_pages=8, watermark_tokens=4)
    add(scheduler, 0, [1] * 12)
    assert spans(scheduler.plan()) == [(0, 0, 12)]
    add(scheduler, 1, [2] * 20)  # it needs 6 pages, and 4 are free
    add(scheduler, 2, [3])
    assert spans(scheduler.plan()) == [(0, 12, 13)]
    assert [req.uid for req in scheduler.requests.waiting] == [1, 2]
    check_books(scheduler)


def test_a_request_needs_room_for_the_token_behind_its_prompt() -> None:
    """Else it would start, find no page for that token, and be retracted."""
    scheduler = make(num_pages=4, watermark_tokens=0)
    add(scheduler, 0, [1] * 5, max_tokens=3)  # 2 pages
    add(scheduler, 1, [2] * 8, max_tokens=3)  # 2 pages for its prompt, 3 for its answer
    plan = scheduler.plan()
    assert spans(plan) == [(0, 0, 5)]
    while plan:
        settle(scheduler, plan)
        plan = scheduler.plan()
    assert (scheduler.stats.num_finished, scheduler.stats.num_retractions) == (2, 0)


def test_a_request_does_not_start_with_pages_that_unfinished_prompts_need() -> None:
    scheduler = make(num_pages=8, max_prefill_tokens=8, watermark_tokens=4)
    add(scheduler, 0, [1] * 24)  # 7 pages in the end
    assert spans(scheduler.plan()) == [(0, 0, 8)]
    add(scheduler, 1, [2] * 8)
    assert spans(scheduler.plan()) == [(0, 8, 16)]
    assert [req.uid for req in scheduler.requests.waiting] == [1]
    check_books(scheduler)


def test_a_prompt_whose_tokens_are_scored_does_not_wait_for_a_common_prefix() -> None:
    scheduler = make(max_prefill_tokens=32)
    add(scheduler, 0, [1] * 80)
    assert spans(scheduler.plan()) == [(0, 0, 32)]
    add(scheduler, 1, [1] * 40, prompt_logprobs=0)  # it computes all of them itself
    assert spans(scheduler.plan()) == [(1, 0, 16), (0, 32, 48)]


def test_a_shorter_prompt_of_a_key_that_is_ahead_counts_as_longer() -> None:
    for tag, expected in ((10, [(1, 0, 16), (0, 32, 48)]), (30, [(0, 32, 64)])):
        scheduler = make(max_prefill_tokens=32)
        add(scheduler, 0, [1] * 80, share=KeyShare(0, 1))
        assert spans(scheduler.plan()) == [(0, 0, 32)]
        add(scheduler, 1, [2] * 20, share=KeyShare(tag, 2))  # 48 tokens of the first are left
        assert spans(scheduler.plan()) == expected


def test_a_prompt_does_not_wait_for_the_page_with_its_last_token() -> None:
    """It computes that token itself, so the page is of no use to it."""
    scheduler = make(max_prefill_tokens=32)
    add(scheduler, 0, [1] * 80)
    assert spans(scheduler.plan()) == [(0, 0, 32)]
    add(scheduler, 1, [1] * 36)
    assert spans(scheduler.plan()) == [(1, 32, 36), (0, 32, 60)]


def test_the_stall_bound_counts_the_pairs_of_all_chunks_of_a_step() -> None:
    times = StepTimes(prompt_us=((1, 10.0), (64, 10.0)), attend_ns=1000.0)
    config = make(max_stall_s=1e-3, step_times=times).config

    def left(*sizes: int) -> int:
        """Return what still fits behind 100 tokens, after chunks of these sizes behind as many."""
        budget = prompt_budget(config, num_decodes=1)
        for size in sizes:
            budget.take(100, size)
        return budget.fitting(100, 64)

    assert left(2, 2) == left(4) < left(2)


def test_the_garbage_collector_visits_few_records_of_new_pages() -> None:
    """A prompt of 4,096 tokens has 256 pages: a record for each made collections frequent."""
    scheduler = make(page_size=2)
    add(scheduler, 0, [1, 2, 3, 4])
    plan = scheduler.plan()
    assert plan is not None
    assert [len(run.pages) for run in plan.new_pages] == [2]
