"""The engine's main loop: receive, plan, launch, settle.

Overlap scheduling: the host plans and launches step n while the device computes step n-1, and
settles step n-1 while the device computes step n. The idea is SGLang's "zero-overhead batch
scheduler" (2024); what makes it right here is the *promise*, see `minisgl.core.req`.

Online, offline, many ranks and tests differ only in the inbox, the outbox and the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minisgl.core.event import Event
from minisgl.core.executor import Executor, Flight
from minisgl.core.plan import Plan
from minisgl.message import ExitMsg, PingMsg, SchedulerMsg
from minisgl.scheduler.meter import COMMIT, LAUNCH, PLAN, RECEIVE, SEND, WAIT, LoopMeter
from minisgl.scheduler.scheduler import Scheduler

IDLE_WAIT_S = 1.0  # how long an idle loop sleeps at most; a message wakes it at once


class Inbox(Protocol):
    """Where messages come from."""

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        """What has arrived, oldest first; waits up to `timeout_s` for the first (0: no wait)."""


class Outbox(Protocol):
    """Where events go, in order."""

    def send(self, events: list[Event]) -> None: ...

    def pong(self, seq: int) -> None:
        """Answer a ping: the loop makes progress."""


def run(
    scheduler: Scheduler,
    executor: Executor,
    inbox: Inbox,
    outbox: Outbox,
    *,
    overlap: bool = True,
    meter: LoopMeter | None = None,
) -> None:
    """Serve until an `ExitMsg` arrives. No flight is left in the air.

    With ``overlap=False`` each step is settled before the next is planned: the same tokens, and
    nothing hidden behind the device; for debugging and for measuring what overlap gives.
    `meter` sees where the time goes, and reports.
    """
    meter = meter or LoopMeter()
    in_flight: tuple[Plan, Flight] | None = None
    leave = False
    while not leave:
        idle = in_flight is None and not scheduler.runnable
        messages = inbox.take(IDLE_WAIT_S if idle else 0)
        meter.begin(asleep=idle)
        events: list[Event] = []
        for message in messages:
            if isinstance(message, PingMsg):
                outbox.pong(message.seq)
            elif isinstance(message, ExitMsg):
                leave = True
            else:
                events += scheduler.handle(message)
        if events:
            outbox.send(events)  # refusals and aborts answer before anything is computed
        meter.lap(RECEIVE)

        plan = None if leave else scheduler.plan()
        meter.lap(PLAN)
        launched = (plan, executor.launch(plan)) if plan is not None else None
        meter.lap(LAUNCH)
        if launched:
            meter.launched(launched[0])
            if not overlap:
                in_flight, launched = launched, None
        if in_flight is not None:
            settled, flight = in_flight
            outcome = flight.wait()
            meter.lap(WAIT)
            events = scheduler.commit(settled, outcome)
            meter.lap(COMMIT)
            outbox.send(events)
            meter.lap(SEND)
            meter.settled(settled, scheduler)
        else:
            assert launched or leave or not scheduler.runnable, (
                "work is left but no step was planned"
            )
        in_flight = launched
        meter.end(scheduler, idle=in_flight is None and not scheduler.runnable)
