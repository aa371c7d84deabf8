"""A fake device whose steps take a given time, to measure what the rest of the engine adds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from minisgl.core.executor import Flight
from minisgl.core.plan import Plan, StepOutcome, StepResult


class PacedExecutor:
    """Runs steps of `step_s` one after another, without host time, and samples `ids` in turn.

    The host sleeps during a step, as it does with a GPU. A step begins when the one before it ends,
    so late wake-ups do not add up. Mutable: it keeps the end of the last step.
    """

    def __init__(self, step_s: float, ids: Sequence[int]) -> None:
        self._step_s = step_s
        self._ids = list(ids)
        self._next = 0
        self._free_at = 0.0

    def launch(self, plan: Plan) -> PacedFlight:
        self._free_at = max(time.perf_counter(), self._free_at) + self._step_s
        ids, count = self._ids, len(plan.sample_rows)
        next_ids = [ids[(self._next + i) % len(ids)] for i in range(count)]
        self._next += count
        return PacedFlight(self._free_at, StepResult(next_ids=next_ids))


class PacedFlight(Flight):
    def __init__(self, ready_at: float, outcome: StepOutcome) -> None:
        self._ready_at, self._outcome = ready_at, outcome

    def wait(self) -> StepOutcome:
        if (left := self._ready_at - time.perf_counter()) > 0:
            time.sleep(left)
        return self._outcome
