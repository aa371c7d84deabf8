"""The cost of each request: its share of the device time and energy of its steps.

The device time of a step begins at its launch, or when the previous step ends if that is later. It
ends when the host sees the step's outcome. The step's energy is this time multiplied by the power
of the device. Rows share both in proportion to their tokens. The energy of an idle device belongs
to no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from minisgl.core.event import Event, Failed, Finished, Token
from minisgl.core.plan import Executor, Flight, Plan, StepOutcome
from minisgl.core.req import Mask
from minisgl.scheduler.loop import Outbox
from minisgl_gateway.watch.energy import PowerMeter


class Ledger:
    """The device seconds and joules of the requests that have not ended. Mutable."""

    def __init__(self, power: PowerMeter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._power, self._clock = power, clock
        self._costs: dict[int, list[float]] = {}
        self._num_flights = 0
        self._free_at = 0.0

    def launched(self, plan: Plan) -> float:
        """Note the launch of the step. Returns its time."""
        if not self._num_flights:
            self._power.busy()
        self._num_flights += 1
        decodes = plan.num_decodes
        # The first row of a request is a decode if only its last prompt token is left to compute.
        has_new_decodes = 0 in plan.output_idxs[:decodes]
        for uid in plan.uids if has_new_decodes else plan.uids[decodes:]:
            self._costs.setdefault(uid, [0.0, 0.0])
        return self._clock()

    def settled(self, plan: Plan, launched_at: float) -> None:
        """Add the step's cost to its requests. launched_at: the time that `launched` returned."""
        now = self._clock()
        seconds = now - max(launched_at, self._free_at)
        self._free_at = now
        self._num_flights -= 1
        watts = self._power.watts() or 0.0
        if not self._num_flights:
            self._power.idle()
        share = seconds / plan.num_tokens
        joules = share * watts
        for cost in map(self._costs.get, plan.uids[: plan.num_decodes]):
            if cost:  # else the request ended while this step was computed
                cost[0] += share
                cost[1] += joules
        for row in range(plan.num_decodes, plan.num_rows):
            if cost := self._costs.get(plan.uids[row]):
                num_tokens = plan.ends[row] - plan.starts[row]
                cost[0] += share * num_tokens
                cost[1] += joules * num_tokens

    def cost(self, uid: int) -> tuple[float, float] | None:
        """Remove a request that ends. Returns its device seconds and joules; None if the power is
        not known."""
        device_s, joules = self._costs.pop(uid, (0.0, 0.0))
        return None if self._power.watts() is None else (device_s, joules)


class CostedExecutor:
    """An executor that adds the cost of its steps to a ledger."""

    def __init__(self, executor: Executor, ledger: Ledger) -> None:
        self._executor, self._ledger = executor, ledger

    def launch(self, plan: Plan) -> Flight:
        launched_at = self._ledger.launched(plan)
        return _CostedFlight(self._executor.launch(plan), self._ledger, plan, launched_at)


class _CostedFlight(Flight):
    def __init__(self, flight: Flight, ledger: Ledger, plan: Plan, launched_at: float) -> None:
        self._flight, self._ledger = flight, ledger
        self._plan, self._launched_at = plan, launched_at

    def wait(self) -> StepOutcome:
        outcome = self._flight.wait()
        self._ledger.settled(self._plan, self._launched_at)
        return outcome

    def sample_late(self, masks: Sequence[Mask]) -> None:
        self._flight.sample_late(masks)


class CostedOutbox:
    """An outbox that adds the cost of each request to its `Finished` event."""

    def __init__(self, outbox: Outbox, ledger: Ledger) -> None:
        self._outbox, self._ledger = outbox, ledger

    def send(self, events: list[Event]) -> None:
        for index, event in enumerate(events):
            if type(event) is Token:
                continue
            if isinstance(event, Finished):
                events[index] = replace(event, cost=self._ledger.cost(event.uid))
            elif isinstance(event, Failed):
                self._ledger.cost(event.uid)
        self._outbox.send(events)

    def pong(self, seq: int) -> None:
        self._outbox.pong(seq)
