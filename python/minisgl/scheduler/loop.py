"""The engine's main loop. Each turn has four phases: receive, plan, launch, settle.

    receive  take the messages that have arrived and apply them to the scheduler
    plan     let the scheduler choose the rows of the next step
    launch   enqueue the step on the device; the launched step is a *flight*
    settle   wait for the previous flight, commit its outcome and send the events

Overlap scheduling: the host plans and launches step n while the device computes step n-1, and
settles step n-1 while the device computes step n. The idea is SGLang's "zero-overhead batch
scheduler" (2024). Step n can be planned before the ids of step n-1 are known, because each row that
samples *promises* one token; see `minisgl.core.req`.

Late sampling: if a mask restricts a row of step n, the mask depends on the row's token of step n-1.
The forward pass of such a step is launched at once; sampling waits until step n-1 is settled::

    host     | launch n | settle n-1 | masks n | sample n | plan, launch n+1 | settle n |
    device       | forward n ........................... | sample n | forward n+1 ....

Drafts: a step after one with drafts is planned when that one is settled, because it depends on how
many of them are accepted (`minisgl.scheduler.drafting`).

The server, `LLM`, several ranks and tests differ only in inbox, outbox and executor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Protocol

from minisgl.core.event import Event
from minisgl.core.plan import Executor, Flight, Plan
from minisgl.message import ExitMsg, PingMsg, SchedulerMsg, UserMsg
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler

IDLE_WAIT_S = 1.0  # the longest sleep of an idle loop; a message wakes it at once

PARTS: Final = ("receive", "plan", "launch", "wait", "commit", "send")
"""The parts of a turn, which a meter times. To settle is to wait, commit and send."""
RECEIVE, PLAN, LAUNCH, WAIT, COMMIT, SEND = range(len(PARTS))


class Inbox(Protocol):
    """The source of messages."""

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        """Return what has arrived, oldest first. Wait up to `timeout_s` for the first message."""


class Outbox(Protocol):
    """The receiver of events, in order."""

    def send(self, events: list[Event]) -> None: ...

    def pong(self, seq: int) -> None:
        """Answer a ping, which shows that the loop makes progress."""


class Meter:
    """Called after each part of a turn. This one does nothing; `LoopMeter` measures."""

    def begin(self, *, asleep: bool) -> None:
        """The inbox has returned. asleep: the loop slept until now; do not count that time."""

    def lap(self, part: int) -> None:
        """`part` took the time since the last call of `begin` or `lap`."""

    def launched(self, plan: Plan) -> None:
        """The step is launched."""

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        """The step is committed, and its events are sent."""

    def end(self, scheduler: Scheduler, *, idle: bool) -> None:
        """The turn is over. idle: there is nothing to do until a message arrives."""


def run(
    scheduler: Scheduler,
    executor: Executor,
    inbox: Inbox,
    outbox: Outbox,
    *,
    overlap: bool = True,
    meter: Meter | None = None,
) -> None:
    """Serve until an `ExitMsg` arrives. Every launched step is settled when this returns.

    With ``overlap=False`` each step is settled before the next is planned. The tokens are the same,
    but the device waits for the host; this is for debugging and for measuring the overlap.
    `meter` measures the time of each part of a turn and reports it.
    """
    meter = meter or Meter()
    in_flight: tuple[Plan, Flight] | None = None
    held: Sequence[SchedulerMsg] = ()
    exiting = False

    def settle(plan: Plan, flight: Flight) -> None:
        outcome = flight.wait()
        meter.lap(WAIT)
        events = scheduler.commit(plan, outcome)
        meter.lap(COMMIT)
        outbox.send(events)
        meter.lap(SEND)
        meter.settled(plan, scheduler)

    while not exiting:
        idle = in_flight is None and not scheduler.runnable
        asleep = idle and not held
        messages = [*held, *inbox.take(IDLE_WAIT_S if asleep else 0)]
        meter.begin(asleep=asleep)
        count = _num_for_step(messages, scheduler.config) if idle else len(messages)
        messages, held = messages[:count], messages[count:]
        events: list[Event] = []
        for message in messages:
            if isinstance(message, PingMsg):
                outbox.pong(message.seq)
            elif isinstance(message, ExitMsg):
                exiting = True
            else:
                events += scheduler.handle(message)
        if events:
            outbox.send(events)  # send refusals and aborts before the step is computed
        meter.lap(RECEIVE)

        previous, in_flight = in_flight, None
        if previous is not None and scheduler.settles_first(previous[0]):
            settle(*previous)
            previous = None
        plan = None if exiting else scheduler.plan()
        meter.lap(PLAN)
        if plan is not None:
            in_flight = plan, executor.launch(plan)
            meter.lap(LAUNCH)
            meter.launched(plan)
        if previous is not None:
            settle(*previous)
        assert in_flight or previous or exiting or not scheduler.runnable, (
            "requests are left, but no step was planned"
        )
        if in_flight and in_flight[0].late_rows:
            in_flight[1].sample_late(scheduler.masks(in_flight[0]))
            meter.lap(LAUNCH)
        if in_flight and not overlap:
            settle(*in_flight)
            in_flight = None
        meter.end(scheduler, idle=in_flight is None and not scheduler.runnable)


def _num_for_step(messages: Sequence[SchedulerMsg], config: SchedulerConfig) -> int:
    """Return how many messages to handle if the device waits: the prompts of one step. The others
    are handled while it computes that step."""
    lengths = (len(each.ids) // 4 if isinstance(each, UserMsg) else 0 for each in messages)
    return bisect_left([*accumulate(lengths)], config.max_prefill_tokens) + 1
