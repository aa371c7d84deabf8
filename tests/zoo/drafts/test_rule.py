"""How many drafts the rule chooses, beside a search over all numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from helpers.scheduling import add, make
from minisgl.core.plan import MOST_DRAFT_ROWS, MOST_DRAFTS
from minisgl.core.req import Req
from minisgl.core.step_times import StepTimes
from minisgl.scheduler import Scheduler
from minisgl_zoo.drafts.rule import (
    HOST_S,
    MOST_STREAMS,
    DraftRule,
    Rate,
)

TIMES = StepTimes(prompt_us=((16, 50_000.0),), decode_us=10_000.0, row_us=1_000.0)


class Endless:
    """Guesses 0 for ever."""

    name = "endless"
    is_over = False
    is_fresh = False

    def __init__(self, *_: object) -> None:
        self.num_added = 0

    def next(self, count: int) -> Sequence[int]:
        return [0] * count

    def add(self, token: int) -> None:
        self.num_added += 1


def rule_for(
    num_reqs: int, times: StepTimes = TIMES, max_stall_s: float | None = None
) -> tuple[DraftRule, list[Req], Scheduler]:
    scheduler = make(max_running=64, num_pages=2000)
    for uid in range(num_reqs):
        add(scheduler, uid, [1, 2])
    config = replace(scheduler.config, step_times=times, max_stall_s=max_stall_s)
    rule = DraftRule([Endless], config, scheduler.requests)
    return rule, list(scheduler.requests.by_uid.values()), scheduler


def teach(rule: DraftRule, req: Req, rate: float, count: int = 4000) -> None:
    """Commit tokens of which this share are guessed right."""
    rng = random.Random(0)
    req.output += [0 if rng.random() < rate else 1 for _ in range(count)]
    rule.propose([req], 1, 0)
    req.output.clear()
    if req.drafts:
        req.drafts.num_seen = 0


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3, 0.6, 0.8, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("row_us", [20.0, 1_000.0, 4_000.0, 12_000.0])
def test_the_number_of_drafts_is_the_best_fixed_one(rate: float, row_us: float) -> None:
    times = replace(TIMES, row_us=row_us)
    rule, (req,), _ = rule_for(1, times)
    teach(rule, req, rate)
    drafts = rule.propose([req], 1, 60)
    chosen = len(drafts[0][1]) if drafts else 0

    def per_s(count: int) -> float:
        expected = 1 + sum(rate**index for index in range(1, count + 1))
        return expected / (times.step_s(1 + count) + (HOST_S if count else 0))

    best = max(range(MOST_DRAFTS + 1), key=per_s)
    assert per_s(chosen) >= 0.9 * per_s(best)
    if per_s(best) <= per_s(0):
        assert chosen == 0


def test_requests_with_better_guesses_get_more_drafts() -> None:
    rule, reqs, _ = rule_for(2)
    teach(rule, reqs[0], 0.8)
    rule.propose(reqs, 2, 0)
    reqs[0].drafts.guesses[0].streak = 20
    counts = {req.uid: len(ids) for req, ids, _ in rule.propose(reqs, 2, 60)}
    assert counts[0] >= counts.get(1, 0) > 0


def test_drafts_fit_the_room_of_the_step() -> None:
    rule, reqs, _ = rule_for(8, replace(TIMES, row_us=1.0))
    teach(rule, reqs[0], 1.0)
    for room in (0, 1, 5, 200):
        drafts = rule.propose(reqs, 8, room)
        assert sum(len(ids) for _, ids, _ in drafts) == min(
            room, MOST_DRAFT_ROWS - 8, 8 * MOST_DRAFTS
        )


def test_many_streams_are_not_followed() -> None:
    rule, reqs, _ = rule_for(MOST_STREAMS + 1)
    assert not rule.pays(reqs, len(reqs))
    assert rule.propose(reqs, len(reqs), 10) == []
    assert all(req.drafts is None for req in reqs)


def test_a_step_waits_for_the_one_before_only_if_that_pays() -> None:
    """The token in flight must be right, too."""
    rule, (req,), _ = rule_for(1)
    teach(rule, req, 1.0)
    assert rule.pays([req], 1)
    teach(rule, req, 0.0)
    assert not rule.pays([req], 1)
    assert rule.propose([req], 1, 10) == []


def test_rates_follow_a_change() -> None:
    rule, (req,), _ = rule_for(1)
    teach(rule, req, 0.0)
    assert not rule.propose([req], 1, 10)
    teach(rule, req, 1.0, count=300)
    assert rule.propose([req], 1, 10), "guesses are followed also while no draft is computed"


def test_each_token_is_seen_once() -> None:
    rule, (req,), _ = rule_for(1)
    for count in (0, 3, 4, 9):
        req.output += [0] * (count - len(req.output))
        rule.propose([req], 1, 1)
        rule.pays([req], 1)
        assert req.drafts.guesses[0].drafter.num_added == count


def test_drafts_hold_up_other_requests_no_longer_than_a_prompt_may() -> None:
    for max_stall_s, most in ((0.005, 4), (0.002, 1), (0.0001, 0)):
        rule, reqs, _ = rule_for(2, max_stall_s=max_stall_s)
        teach(rule, reqs[0], 1.0)
        assert sum(len(ids) for _, ids, _ in rule.propose(reqs, 2, 60)) == most
        beside = rule.propose(reqs[:1], 2, 60)
        assert sum(len(ids) for _, ids, _ in beside) == most, "the other has a token in flight"
        alone = rule.propose(reqs[:1], 1, 60)
        assert sum(len(ids) for _, ids, _ in alone) == MOST_DRAFTS, "there is no other"


class Fresh(Endless):
    """Guesses the next token only."""

    name = "fresh"
    is_fresh = True

    def next(self, count: int) -> Sequence[int]:
        return [0]


def test_a_fresh_guess_needs_no_token_in_flight_to_be_right() -> None:
    rule, (req,), _ = rule_for(1)
    rule._drafters = [Fresh]
    teach(rule, req, 0.9)
    assert rule.pays([req], 1)
    assert [ids for _, ids, _ in rule.propose([req], 1, 60)] == [[0]]


@pytest.mark.parametrize(("rate", "count"), [(0.9, MOST_DRAFTS), (0.3, 1)])
def test_one_fresh_guess_is_taken_if_the_others_are_worth_less(rate: float, count: int) -> None:
    rule, (req,), _ = rule_for(1, replace(TIMES, row_us=100.0))
    teach(rule, req, rate)
    rule._drafters = [Endless, Fresh]
    req.drafts = None
    rule._rates_of("fresh")[:] = [rule_rate(0.95) for _ in rule._rates_of("fresh")]
    ((_, ids, _),) = rule.propose([req], 1, 60)
    assert len(ids) == count


def rule_rate(value: float) -> Rate:
    return Rate(right=value * 100, count=100.0)
