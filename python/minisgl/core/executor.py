"""Where the scheduler and the engine meet: a plan goes in, a flight comes back."""

from __future__ import annotations

from typing import Protocol

from minisgl.core.plan import Plan, StepOutcome


class Flight(Protocol):
    """A launched step."""

    def wait(self) -> StepOutcome:
        """Block until the step's sampled ids are on the host. Called once."""


class Executor(Protocol):
    """Runs plans in the order in which they are launched."""

    def launch(self, plan: Plan) -> Flight:
        """Enqueue the step and return at once. Within a step, every row's KV of a layer is stored
        before any prefill row attends, so a prefill row may read pages that another row writes."""
