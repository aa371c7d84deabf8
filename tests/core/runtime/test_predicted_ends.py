"""When the step in flight will end, as the loop's meter predicts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.core import Plan
from minisgl.core.step_times import StepTimes
from minisgl.runtime.watched_loop import WatchedLoopMeter
from minisgl.scheduler import meter as meter_module
from minisgl.scheduler.loop import COMMIT, LAUNCH, SEND, WAIT
from minisgl.scheduler.requests import SchedulerStats
from minisgl.utils.hangs import Pulse

TIMES = StepTimes(prompt_us=((64, 100_000.0),))
PLAN = Plan(
    step=0, uids=[0], table_idxs=[0], starts=[0], ends=[64], token_ids=np.zeros(64, np.int32),
    num_decodes=0, sample_rows=[0], output_idxs=[0],
)  # fmt: skip
SCHEDULER: Any = SimpleNamespace(stats=SchedulerStats())


class Loop:
    """A meter on a clock of the test's, and the turns of a loop with overlap. Mutable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.meter = WatchedLoopMeter(Pulse(), TIMES)
        self.launch()

    def launch(self) -> None:
        self.meter.lap(LAUNCH)
        self.meter.launched(PLAN)

    def turn(self, wait_s: float) -> None:
        """Launch a step, wait for the one before, commit and send in 10 ms."""
        self.launch()
        self.now += wait_s
        self.meter.lap(WAIT)
        self.now += 0.01
        self.meter.lap(COMMIT)
        self.meter.lap(SEND)
        self.meter.settled(PLAN, SCHEDULER)


def test_a_step_begins_where_the_one_before_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    assert loop.meter.flight() == pytest.approx((100.0, 100.1))
    loop.turn(wait_s=0.1)
    assert loop.meter.flight() == pytest.approx((100.1, 100.2)), "not where it is committed"


def test_predictions_follow_shorter_steps_at_once_and_longer_ones_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(monkeypatch)

    def expected_s() -> float:
        flight = loop.meter.flight()
        assert flight is not None
        return flight[1] - flight[0]

    expected_s()
    loop.turn(wait_s=0.05)
    assert expected_s() == pytest.approx(0.05)
    loop.turn(wait_s=0.09)  # 0.1 with the 10 ms before it was launched
    assert expected_s() == pytest.approx(0.055)
    loop.now += 0.09
    loop.turn(wait_s=0.0)
    assert expected_s() == pytest.approx(0.055), "its end was not seen"
    for _ in range(100):
        loop.turn(wait_s=0.4)
        expected_s()
    assert expected_s() == pytest.approx(0.1), "never longer than the model says"


def test_nothing_is_predicted_without_a_step_or_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WatchedLoopMeter(Pulse(), TIMES).flight() is None
    meter = WatchedLoopMeter(Pulse(), None)
    meter.launched(PLAN)
    assert meter.flight() is None
