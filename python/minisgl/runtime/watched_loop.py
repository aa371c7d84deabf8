"""Lets the heartbeat thread of a rank see the progress of the scheduler's loop.

A turn of the loop waits for the steps that are in flight. It may take `SLACK` times the time that
the model of step times predicts (`StepTimes.step_s`), so a long prefill on a slow CPU is no hang.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from minisgl.core.plan import Plan
from minisgl.core.step_times import StepTimes
from minisgl.scheduler.meter import LoopMeter
from minisgl.scheduler.scheduler import Scheduler
from minisgl.utils.heartbeat import Pulse

SLACK: Final = 20.0
"""Neighbours on a shared CPU slow a step down by a factor of 2 to 10."""


class WatchedLoopMeter(LoopMeter):
    """A `LoopMeter` that counts turns in `pulse`. Mutable.

    step_times: without them (offline) no turn is too long; only silence is then a hang.
    """

    def __init__(self, pulse: Pulse, step_times: StepTimes | None, **options: Any) -> None:
        super().__init__(**options)
        self._pulse = pulse
        self._step_times = step_times
        self._in_flight: deque[Plan] = deque()
        pulse.allowed_s = self._allowed_s

    def begin(self, *, asleep: bool) -> None:
        self._pulse.turn()
        super().begin(asleep=asleep)

    def launched(self, plan: Plan) -> None:
        self._pulse.turn()
        self._in_flight.append(plan)
        super().launched(plan)

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        self._pulse.turn()
        self._in_flight.popleft()
        super().settled(plan, scheduler)

    def end(self, scheduler: Scheduler, *, idle: bool) -> None:
        super().end(scheduler, idle=idle)
        if idle:
            self._pulse.rest()

    def _allowed_s(self) -> float:
        """Called by the heartbeat thread."""
        if self._step_times is None:
            return math.inf
        return SLACK * sum(step_s(self._step_times, plan) for plan in list(self._in_flight))


def step_s(times: StepTimes, plan: Plan) -> float:
    """Return the seconds that the step of `plan` takes by the model."""
    decodes = plan.num_decodes
    chunks = [
        (end - start, start)
        for start, end in zip(plan.starts[decodes:], plan.ends[decodes:], strict=True)
    ]
    num_tokens = sum(length for length, _ in chunks)
    pairs = sum(length * start for length, start in chunks)
    return times.step_s(decodes, sum(plan.ends[:decodes]), num_tokens) + times.attend_ns * (
        pairs * 1e-9
    )
