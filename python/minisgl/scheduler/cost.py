"""The cost of each request: its share of the device time and energy of its steps.

A step's device time goes from its launch, or from the end of the step before if that is later, to
its end, as the host sees both. The energy between two readings of the meter is divided among the
steps in between by their device time; a step's time and energy are divided among its rows by the
tokens computed. Energy that is used while no step runs counts for no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from minisgl.core.event import Event, Failed, Finished
from minisgl.core.executor import Executor, Flight
from minisgl.core.masker import Mask
from minisgl.core.plan import Plan, StepOutcome
from minisgl.scheduler.loop import Outbox
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

READ_EVERY_S: Final = 0.05
"""Seconds between readings of the meter while no request ends. A reading may take a millisecond,
and the value changes some 20 times a second."""


class Ledger:
    """Mutable: device seconds and joules of the requests that have not ended.

    joules: since some time in the past. If it fails, the log says so, and no cost is reported.
    """

    def __init__(
        self, joules: Callable[[], float], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._joules, self._clock = joules, clock
        self._costs: dict[int, list[float]] = {}
        self._steps: list[tuple[float, Plan]] = []  # their energy is not read yet
        self._num_flights = 0
        self._free_at = self._read_at = 0.0
        self._last_joules = 0.0
        self._has_failed = False

    def launched(self, plan: Plan) -> float:
        """Note the launch of the step. Returns its time."""
        now = self._clock()
        if not self._num_flights and not self._steps:
            self._last_joules, self._read_at = self._read_meter(), now
        self._num_flights += 1
        for uid in plan.uids:
            self._costs.setdefault(uid, [0.0, 0.0])
        return now

    def settled(self, plan: Plan, launched_at: float) -> None:
        now = self._clock()
        self._steps.append((now - max(launched_at, self._free_at), plan))
        self._free_at = now
        self._num_flights -= 1
        if not self._num_flights or now - self._read_at >= READ_EVERY_S:
            self._read()

    def cost(self, uid: int) -> tuple[float, float] | None:
        """Return the device seconds and joules of a request that ends, and forget it."""
        if self._steps:
            self._read()
        device_s, joules = self._costs.pop(uid, (0.0, 0.0))
        return None if self._has_failed else (device_s, joules)

    def _read(self) -> None:
        """Divide the energy since the last reading."""
        joules = self._read_meter()
        gained = joules - self._last_joules
        total_s = sum(seconds for seconds, _ in self._steps)
        for seconds, plan in self._steps:
            energy = gained * seconds / total_s if total_s else 0.0
            num_tokens = plan.num_tokens
            for uid, start, end in zip(plan.uids, plan.starts, plan.ends, strict=True):
                cost = self._costs.get(uid)
                if cost:  # None: it ended while this step was computed
                    share = (end - start) / num_tokens
                    cost[0] += seconds * share
                    cost[1] += energy * share
        self._steps.clear()
        self._last_joules, self._read_at = joules, self._clock()

    def _read_meter(self) -> float:
        if self._has_failed:
            return 0.0
        try:
            return self._joules()
        except Exception as error:  # of a driver or a file: requests go on without it
            self._has_failed = True
            logger.warning("timings have no energy_j from now on: %s", error)
            return 0.0


class CostedExecutor:
    """An executor whose steps are in a ledger."""

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
    """An outbox that adds their cost to requests that end."""

    def __init__(self, outbox: Outbox, ledger: Ledger) -> None:
        self._outbox, self._ledger = outbox, ledger

    def send(self, events: list[Event]) -> None:
        self._outbox.send([self._costed(event) for event in events])

    def _costed(self, event: Event) -> Event:
        if isinstance(event, Finished):
            return msgspec.structs.replace(event, cost=self._ledger.cost(event.uid))
        if isinstance(event, Failed):
            self._ledger.cost(event.uid)
        return event

    def pong(self, seq: int) -> None:
        self._outbox.pong(seq)
