"""The oracle of the study `oracle` is right as often as it says."""

from __future__ import annotations

import pytest

from helpers.scheduling import add, make, settle
from minisgl_bench.studies.oracle import FixedDrafts, Oracle


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_an_oracle_is_right_at_its_rate(rate: float) -> None:
    answer = list(range(100, 4100))
    oracle = Oracle(answer, rate, seed=1)
    right = 0
    for token in answer:
        right += oracle.next(1)[0] == token
        oracle.add(token)
    assert right / len(answer) == pytest.approx(rate, abs=0.03)
    assert list(oracle.next(2)) == []


def test_fixed_drafts_begin_behind_the_output_and_fit_the_room() -> None:
    scheduler = make()
    add(scheduler, 0, [1, 2, 3])
    settle(scheduler, scheduler.plan(), 10)
    req = scheduler.requests.by_uid[0]
    drafts = FixedDrafts([[10, 11, 12, 13, 14]], 1.0, 3)
    assert drafts.propose([req], 1, 60) == [(req, [11, 12, 13], "oracle")]
    assert drafts.propose([req], 1, 2) == [(req, [11, 12], "oracle")]
