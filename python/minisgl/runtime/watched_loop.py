"""Compares the scheduler's loop of a rank with the model of step times (`StepTimes.plan_s`).

The heartbeat thread needs the longest time of a turn, which waits for the steps in flight: `SLACK`
times their predicted time, so a long prefill on a slow CPU is no hang. Late planning needs the time
at which the step in flight will end (`minisgl.scheduler.late_planning`).
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
from minisgl.utils.hangs import Pulse

SLACK: Final = 20.0
"""Other programs on a shared CPU slow a step down by a factor of 2 to 10. A byte of the largest
image takes up to 7 times as long as one of the largest that the start measures."""

UNSEEN_END_S: Final = 1e-4
"""If the host waits for less time, the step had already ended."""


class WatchedLoopMeter(LoopMeter):
    """A `LoopMeter` that counts turns in `pulse`, and predicts when a step ends. Mutable.

    step_times: None offline. Then no turn is too long, and only silence counts as a hang.
    """

    def __init__(self, pulse: Pulse, step_times: StepTimes | None, **options: Any) -> None:
        super().__init__(**options)
        self._pulse = pulse
        self._step_times = step_times
        self._in_flight: deque[Plan] = deque()
        self._began = 0.0  # when the step in flight began
        self._expected_s: float | None = None  # its predicted time, if `flight` was called
        self._ratio = 1.0  # of measured to predicted times of steps; at most 1
        pulse.allowed_s = self._allowed_s

    def begin(self, *, asleep: bool) -> None:
        self._pulse.turn()
        super().begin(asleep=asleep)

    def launched(self, plan: Plan) -> None:
        self._pulse.turn()
        if not self._in_flight:
            self._began = self.last
        self._in_flight.append(plan)
        super().launched(plan)

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        self._pulse.turn()
        self._in_flight.popleft()
        ended = self.last - self.turn_s[COMMIT] - self.turn_s[SEND]
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
        """Return when the step in flight began and when it will end, on `time.perf_counter`. None
        if no step is in flight, if there is no model of step times, or if the step has images, for
        which the vision tower may run."""
        if not self._in_flight or self._step_times is None or self._in_flight[0].images:
            return None
        self._expected_s = self._step_times.plan_s(self._in_flight[0])
        return self._began, self._began + self._ratio * self._expected_s

    def _learn(self, ratio: float) -> None:
        """Update the ratio with that of a step: fully if it is lower, by a tenth if it is higher.

        Too high a ratio is worse: the next step would be launched late, and the device would idle.
        So the ratio stays at most 1. If the host did not wait for the step, the step took less time
        than was measured, which is no reason for a higher ratio.
        """
        longer = self._ratio + 0.1 * (ratio - self._ratio)
        if self.turn_s[WAIT] < UNSEEN_END_S:
            longer = self._ratio
        self._ratio = min(ratio, longer, 1.0)

    def _allowed_s(self) -> float:
        """Return the most seconds of the current turn. The heartbeat thread calls this."""
        if self._step_times is None:
            return math.inf
        times, plans = self._step_times, list(self._in_flight)
        return SLACK * sum(times.plan_s(plan) + times.images_s(plan) for plan in plans)
