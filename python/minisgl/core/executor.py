"""The interface of the engine to the scheduler's loop: a plan goes in, a flight comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minisgl.core.plan import Plan, StepOutcome
from minisgl.core.req import Mask


class Flight(Protocol):
    """A launched step. If its plan has late rows, call `sample_late` before `wait`."""

    def sample_late(self, masks: Sequence[Mask]) -> None:
        """Enqueue the sampling of a step with late rows and return at once.

        Called once, after the step before it is committed and before the next launch. masks: one
        for each of the plan's `late_rows`.
        """
        raise AssertionError("this executor samples every row at launch")

    def wait(self) -> StepOutcome:
        """Block until the step's sampled ids are on the host. Called once."""
        ...


class Executor(Protocol):
    """Runs plans in the order in which they are launched."""

    def launch(self, plan: Plan) -> Flight:
        """Enqueue the step and return at once. If it has late rows, enqueue the forward pass only.

        In each layer, the KV of all rows is stored before a prompt row attends, so it may read
        pages that another row of the step writes.
        """
        ...
