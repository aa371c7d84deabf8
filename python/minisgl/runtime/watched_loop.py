"""Lets the heartbeat thread of a rank see the progress of the scheduler's loop.

A turn of the loop waits for the steps that are in flight. It may take `SLACK` times the time that
the model of step times predicts (`StepTimes.plan_s`), so a long prefill on a slow CPU is no hang.

The same model says when the step in flight will end (`minisgl.scheduler.late_planning`).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from minisgl.core.plan import Plan
from minisgl.core.step_times import StepTimes
from minisgl.scheduler.loop import COMMIT, SEND, WAIT
from minisgl.scheduler.meter import LoopMeter
from minisgl.scheduler.scheduler import Scheduler
from minisgl.utils.heartbeat import Pulse

SLACK: Final = 20.0
"""Neighbours on a shared CPU slow a step down by a factor of 2 to 10."""

UNSEEN_END_S: Final = 1e-4
"""A wait that is shorter did not see the step's end."""


class WatchedLoopMeter(LoopMeter):
    """A `LoopMeter` that counts turns in `pulse`, and predicts when a step ends. Mutable.

    step_times: without them (offline) no turn is too long; only silence is then a hang.
    """

    def __init__(self, pulse: Pulse, step_times: StepTimes | None, **options: Any) -> None:
        super().__init__(**options)
        self._pulse = pulse
        self._step_times = step_times
        self._in_flight: deque[Plan] = deque()
        self._began = 0.0  # the step in flight
        self._expected_s: float | None = None  # its time, if `flight` was called
        self._ratio = 1.0  # of the times that steps took to those expected; at most 1
        pulse.allowed_s = self._allowed_s

    def begin(self, *, asleep: bool) -> None:
        self._pulse.turn()
        super().begin(asleep=asleep)

    def launched(self, plan: Plan) -> None:
        self._pulse.turn()
        if not self._in_flight:
            self._began = self._last
        self._in_flight.append(plan)
        super().launched(plan)

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        self._pulse.turn()
        self._in_flight.popleft()
        ended = self._last - self._turn_s[COMMIT] - self._turn_s[SEND]
        if self._expected_s is not None:
            self._learn((ended - self._began) / self._expected_s)
            self._expected_s = None
        self._began = ended
        super().settled(plan, scheduler)

    def end(self, scheduler: Scheduler, *, idle: bool) -> None:
        super().end(scheduler, idle=idle)
        if idle:
            self._pulse.rest()

    def flight(self) -> tuple[float, float] | None:
        """When the step in flight began and when it will end, on `time.perf_counter`; None if none
        is in flight, or if there is no model of step times."""
        if not self._in_flight or self._step_times is None:
            return None
        self._expected_s = self._step_times.plan_s(self._in_flight[0])
        return self._began, self._began + self._ratio * self._expected_s

    def _learn(self, ratio: float) -> None:
        """Believe a short time at once, a long one slowly, and none that is longer than expected.

        The device idles if the next step is launched late. A step that had ended before the host
        waited for it took less time than this one seems to have taken.
        """
        longer = self._ratio + 0.1 * (ratio - self._ratio)
        if self._turn_s[WAIT] < UNSEEN_END_S:
            longer = self._ratio
        self._ratio = min(ratio, longer, 1.0)

    def _allowed_s(self) -> float:
        """Called by the heartbeat thread."""
        if self._step_times is None:
            return math.inf
        return SLACK * sum(map(self._step_times.plan_s, list(self._in_flight)))
