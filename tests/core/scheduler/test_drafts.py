"""Drafts change no answer, whoever makes them: adversaries, oracles, and planted faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from helpers.drafters import KINDS, ScriptedDrafts
from helpers.random_runs import run_once
from helpers.scheduling import EOS, add, make, settle, spans
from minisgl.core import Finished, Plan, StepResult, Token
from minisgl.core.plan import most_decode_rows
from minisgl.core.req import Mask, Req
from minisgl.errors import InvalidSampling
from minisgl.message import AbortMsg
from minisgl.scheduler import Scheduler
from minisgl.scheduler import drafting as drafting_module
from minisgl.scheduler.drafting import Draft
from minisgl.scheduler.masks import LateMasks

RECURRENT_SEEDS = range(41_000, 41_005)


def test_random_runs_with_drafts() -> None:
    for seed in range(40_000, 40_030):
        for fail in (False, True):
            try:
                run_once(random.Random(seed), fail=fail, drafts=True)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, fail {fail}: {error}") from error


@pytest.mark.needs("minisgl_zoo")
@pytest.mark.parametrize("intervals", [(1,), (4, 1), (2, 3)])
def test_random_runs_with_drafts_of_recurrent_layers(intervals: tuple[int, ...]) -> None:
    for seed in RECURRENT_SEEDS:
        for fail in (False, True):
            rng = random.Random(seed)
            run_once(rng, fail=fail, grouped=True, intervals=intervals, drafts=True)


_ACCEPT = drafting_module.accept


def _accept_all(req: Req, plan: Plan, index: int, unmasked: object) -> bool:
    req.num_computed += 1
    req.num_known += 1
    return not req.ended


def _accept_behind_wrong_ones(req: Req, plan: Plan, index: int, unmasked: object) -> bool:
    token = plan.token_ids[plan.sample_rows[index]]
    if req.ended or not req.output or req.output[-1] != token:
        return False
    req.num_computed += 1
    req.num_known += 1
    return True


def _count_rejected(req: Req, plan: Plan, index: int, unmasked: Any) -> bool:
    is_accepted = _ACCEPT(req, plan, index, unmasked)
    if not is_accepted and not req.ended:
        req.num_computed += 1
        req.num_known += 1
    return is_accepted


def _plans_ahead(self: Scheduler, launched: Plan) -> bool:
    return False


def _mask_without_drafts(mask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, req, drafts: mask(self, req, [])


@pytest.mark.needs("minisgl_zoo")
@pytest.mark.parametrize("fault", ["a draft ends an interval", "a rejected draft is published"])
def test_random_runs_find_faults_of_states(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl_zoo.cache_groups.manager import GroupedCacheManager

    if fault == "a draft ends an interval":
        monkeypatch.setattr(GroupedCacheManager, "num_free_tokens", lambda *_: 5)
    else:
        monkeypatch.setattr(drafting_module, "accept", _count_rejected)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_many(RECURRENT_SEEDS, grouped=True, intervals=(2,))


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "every draft is accepted": (drafting_module, "accept", _accept_all),
    "a draft behind a wrong one is accepted": (
        drafting_module,
        "accept",
        _accept_behind_wrong_ones,
    ),
    "a rejected draft counts as computed": (drafting_module, "accept", _count_rejected),
    "the next step is planned before": (Scheduler, "settles_first", _plans_ahead),
    "a mask does not see the drafts": (LateMasks, "_mask", _mask_without_drafts(LateMasks._mask)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_random_runs_find_each_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_many(range(40_000, 40_060))


def run_many(seeds: Iterable[int], **options: Any) -> None:
    for seed in seeds:
        run_once(random.Random(seed), fail=False, drafts=True, **options)


def drafting(drafts: Callable[[Req], list[int]], **config: Any) -> tuple[Scheduler, Plan]:
    """A scheduler whose first request, of two tokens, has just got its first output token, 5; and
    the plan with these drafts behind it."""
    scheduler = make(
        create_drafts=lambda *_: ScriptedDrafts(random.Random(0), [], 50, tokens=drafts), **config
    )
    add(scheduler, 0, [1, 2], **({"max_tokens": 9} | config.pop("sampling", {})))
    settle(scheduler, scheduler.plan(), token=5)
    plan = scheduler.plan()
    assert plan is not None
    return scheduler, plan


def commit(scheduler: Scheduler, plan: Plan, ids: list[int]) -> list[int]:
    events = scheduler.commit(plan, StepResult(next_ids=ids))
    return [event.id for event in events if isinstance(event, Token)]


def test_drafts_are_decode_rows_behind_the_known_token() -> None:
    _, plan = drafting(lambda req: [7, 8])
    assert (plan.num_decodes, plan.num_drafts, plan.uids) == (3, 2, [0, 0, 0])
    assert plan.token_ids.tolist() == [5, 7, 8]
    assert (plan.starts, plan.ends) == ([2, 3, 4], [3, 4, 5])
    assert (plan.sample_rows, plan.output_idxs) == ([0, 1, 2], [1, 2, 3])


@pytest.mark.parametrize(
    ("sampled", "output"), [([7, 8, 9], [7, 8, 9]), ([7, 6, 9], [7, 6]), ([6, 8, 9], [6])]
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    sampled: list[int], output: list[int]
) -> None:
    scheduler, plan = drafting(lambda req: [7, 8])
    assert scheduler.settles_first(plan)
    assert commit(scheduler, plan, sampled) == output
    req = scheduler.requests.by_uid[0]
    assert (req.num_computed, req.num_known) == (2 + len(output), 3 + len(output))
    assert (req.num_drafted, req.num_accepted) == (2, len(output) - 1)
    stats = scheduler.stats
    assert stats.drafted_by == {"scripted": 2}
    assert sum(stats.accepted_by.values()) == stats.num_accepted == len(output) - 1


def test_a_stop_token_inside_accepted_drafts_ends_the_request() -> None:
    scheduler, plan = drafting(lambda req: [7, 8, 9])
    events = scheduler.commit(plan, StepResult(next_ids=[7, EOS, 9, 9]))
    assert [event.id for event in events if isinstance(event, Token)] == [7, EOS]
    (end,) = (event for event in events if isinstance(event, Finished))
    assert (end.reason, end.num_output_tokens, end.num_drafted, end.num_accepted) == (
        "stop",
        3,
        3,
        1,
    )
    assert not scheduler.requests.by_uid
    assert scheduler.requests.cache.num_used_pages == 0


def test_no_row_computes_a_stop_token_or_beyond_the_end() -> None:
    scheduler, plan = drafting(lambda req: [7, EOS, 8])
    assert plan.num_drafts == scheduler.requests.by_uid[0].num_drafted == 1
    _, plan = drafting(lambda req: [7] * 20, max_running=32)
    assert plan.ends[-1] == 2 + 9 - 1, "the last token is sampled, and not computed"


class _NoneBehindDrafts:
    """Allows any token, and has no mask behind a draft."""

    def mask(self, output: Sequence[int], drafts: Sequence[int] = ()) -> Mask:
        if drafts:
            raise InvalidSampling("the grammar takes too much work", param="structured_outputs")
        return np.full(4, 0xFFFFFFFF, np.uint32)

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()


def test_a_draft_whose_row_has_no_mask_is_computed_again() -> None:
    """Its row samples any token, which the grammar might forbid."""
    scheduler = make(
        create_drafts=lambda *_: ScriptedDrafts(random.Random(0), [], 50, tokens=lambda req: [7])
    )
    scheduler._create_masker = lambda message: _NoneBehindDrafts()
    add(scheduler, 0, [1, 2], max_tokens=9)
    first = scheduler.plan()
    assert first is not None
    scheduler.masks(first)
    settle(scheduler, first, token=5)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.num_drafts == 1
    scheduler.masks(plan)
    assert commit(scheduler, plan, [7, 8]) == [7]
    assert scheduler.requests.by_uid[0].output == [5, 7]


def test_an_aborted_request_drops_its_drafts() -> None:
    scheduler, plan = drafting(lambda req: [7, 8])
    scheduler.handle(AbortMsg(uid=0))
    assert commit(scheduler, plan, [7, 8, 9]) == []
    assert not scheduler.requests.by_uid
    assert scheduler.requests.cache.num_used_pages == 0


def test_drafts_take_no_places_of_requests() -> None:
    scheduler, plan = drafting(lambda req: [7] * 9, max_running=1)
    assert (plan.num_rows, plan.num_drafts) == (8, 7)
    assert scheduler.requests.num_places == 0
    assert commit(scheduler, plan, [7] * 8) == [7] * 8


@pytest.mark.parametrize("max_running", [1, 2, 4, 64, 100])
def test_a_step_has_no_more_rows_than_the_engine_has_room_for(max_running: int) -> None:
    rooms: list[int] = []

    class Watching(ScriptedDrafts):
        def propose(self, reqs: Sequence[Req], num_rows: int, room: int) -> list[Draft]:
            rooms.append(num_rows + room)
            return super().propose(reqs, num_rows, room)

    drafts = Watching(random.Random(0), [], 50, tokens=lambda req: [7] * 120)
    scheduler = make(create_drafts=lambda *_: drafts, max_running=max_running, num_pages=200)
    add(scheduler, 0, [1, 2], max_tokens=150)
    settle(scheduler, scheduler.plan())
    plan = scheduler.plan()
    assert plan is not None
    assert rooms == [most_decode_rows(max_running, has_drafts=True)] == [plan.num_rows]
    assert plan.num_rows == max(min(16 * max_running, 64), max_running)


def test_drafts_take_free_pages_only() -> None:
    """The prefix tree has four of the 14 pages, of a request that has ended."""
    scheduler = make(
        create_drafts=lambda *_: ScriptedDrafts(
            random.Random(0), [], 50, tokens=lambda req: [7] * 9
        ),
        page_size=1,
        num_pages=14,
        watermark_tokens=0,
    )
    add(scheduler, 0, [3, 4, 5, 6], max_tokens=1)
    settle(scheduler, scheduler.plan())
    add(scheduler, 1, [1, 2], max_tokens=12)
    settle(scheduler, scheduler.plan())
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.num_decodes, plan.ends[-1]) == (8, 10)
    assert scheduler.requests.cache.num_cached_pages == 4


def test_a_prompt_is_not_delayed_by_drafts() -> None:
    scheduler, plan = drafting(lambda req: [7, 8])
    commit(scheduler, plan, [7, 8, 9])
    add(scheduler, 1, [1] * 9)
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.num_drafts, plan.num_decodes, plan.num_rows) == (0, 1, 2)


def test_a_prompt_that_cannot_start_delays_no_drafts() -> None:
    """The only place is taken; when it is free, the prompt starts."""
    scheduler, plan = drafting(lambda req: [7, 8], max_running=1)
    add(scheduler, 1, [1] * 9)
    assert commit(scheduler, plan, [7, 8, 9]) == [7, 8, 9]
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.num_drafts, plan.uids) == (2, [0, 0, 0])
    assert scheduler.settles_first(plan)
    commit(scheduler, plan, [7, EOS, 9])
    assert spans(scheduler.plan()) == [(1, 0, 9)]


@pytest.mark.parametrize("kind", KINDS)
def test_scripted_drafts_are_what_they_say(kind: str) -> None:
    """Else the random runs would prove less."""
    num_drafted = num_accepted = 0
    answer = list(range(10, 40))
    for seed in range(20):
        drafts = ScriptedDrafts(random.Random(seed), [answer], 50, kind)
        req = make_req(answer[:3])
        for _, tokens, _ in drafts.propose([req], 1, 9):
            right = next((i for i, t in enumerate(tokens) if t != answer[3 + i]), len(tokens))
            num_drafted, num_accepted = num_drafted + len(tokens), num_accepted + right
    share = num_accepted / num_drafted
    low, high = {"never": (0, 0), "always": (1, 1)}.get(kind, (0.1, 0.95))
    assert low <= share <= high


def make_req(output: list[int]) -> Req:
    scheduler = make()
    add(scheduler, 0, [1, 2])
    req = scheduler.requests.by_uid[0]
    req.output = output
    return req
