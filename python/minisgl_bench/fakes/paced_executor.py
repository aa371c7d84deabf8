"""A fake device whose steps take a given time, to measure what the rest of the engine adds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from minisgl.core.plan import Flight, Plan, StepOutcome, StepResult


def sleep_until(at: float) -> None:
    """Sleep until this time of `time.perf_counter`."""
    if (left := at - time.perf_counter()) > 0:
        time.sleep(left)


def spin_until(at: float) -> None:
    """Read the clock until this time: a sleep ends late, by as much as some measured times."""
    while time.perf_counter() < at:
        pass


class PacedExecutor:
    """Runs steps of `step_s` one after another, without host time, and samples `ids` in turn.

    wait_until: how the host waits for a step; it sleeps, as it does with a GPU, or spins. A step
    begins when the one before it ends, so late wake-ups do not add up. Mutable: it keeps the end of
    the last step.
    """

    def __init__(
        self,
        step_s: float,
        ids: Sequence[int],
        wait_until: Callable[[float], None] = sleep_until,
    ) -> None:
        self._step_s = step_s
        self._ids = cycle(ids)
        self._wait_until = wait_until
        self._free_at = 0.0

    def launch(self, plan: Plan) -> PacedFlight:
        self._free_at = max(time.perf_counter(), self._free_at) + self._step_s
        outcome = StepResult(next_ids=list(islice(self._ids, len(plan.sample_rows))))
        return PacedFlight(self._free_at, outcome, self._wait_until)


class PacedFlight(Flight):
    def __init__(
        self, ready_at: float, outcome: StepOutcome, wait_until: Callable[[float], None]
    ) -> None:
        self._ready_at, self._outcome, self._wait_until = ready_at, outcome, wait_until

    def wait(self) -> StepOutcome:
        self._wait_until(self._ready_at)
        return self._outcome
