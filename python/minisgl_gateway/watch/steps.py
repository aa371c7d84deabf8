"""The record of each step of a rank's loop, for `--log-steps` and the X-ray."""

from __future__ import annotations

from collections import deque

import msgspec

from minisgl.core.plan import Plan
from minisgl.scheduler.loop import WAIT
from minisgl.scheduler.meter import LoopMeter
from minisgl.scheduler.scheduler import Scheduler


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step. The first three parts belong to the turn that launched it, the others to the turn
    that settled it. With overlap that is the next turn.

    start_s, settle_s: when these two groups of parts began, in seconds since the loop started.
    tokens: computed tokens, prompt and decode. output_tokens: tokens that requests received.
    running, waiting: requests after the step. used_pages: the pages that these hold, of the
    num_pages in the KV pool. cached_pages: pages that only the prefix cache holds.
    """

    step: int
    start_s: float
    settle_s: float
    receive_us: float
    plan_us: float
    launch_us: float
    wait_us: float
    commit_us: float
    send_us: float
    rows: int
    decodes: int
    tokens: int
    output_tokens: int
    running: int
    waiting: int
    used_pages: int
    cached_pages: int
    num_pages: int


class StepWatcher:
    """A `minisgl.scheduler.meter.Watcher` that makes the record of each step. Mutable: it keeps
    what it knows of the steps in flight."""

    def __init__(self, num_output_tokens: int = 0) -> None:
        """num_output_tokens: of the scheduler, until now."""
        self._num_output_tokens = num_output_tokens
        self._launches: deque[tuple[float, ...]] = deque()  # begin with the step's number

    def stepped(self, record: StepRecord, plan: Plan) -> None:
        """A step is settled. A subclass overrides this."""

    def launched(self, plan: Plan, meter: LoopMeter) -> None:
        self._launches.append((plan.step, meter.turn_began, *meter.turn_s[:WAIT]))

    def settled(self, plan: Plan, scheduler: Scheduler, meter: LoopMeter) -> None:
        num_output_tokens = scheduler.stats.num_output_tokens
        num_new_tokens = num_output_tokens - self._num_output_tokens
        self._num_output_tokens = num_output_tokens
        if not self._launches or self._launches[0][0] != plan.step:
            return  # this did not watch when it was launched
        _, start, receive, plan_s, launch = self._launches.popleft()
        wait, commit, send = meter.turn_s[WAIT:]
        cache = scheduler.requests.cache
        record = StepRecord(
            step=plan.step,
            start_s=round(start - meter.epoch, 7),
            settle_s=round(meter.last - wait - commit - send - meter.epoch, 7),
            receive_us=round(receive * 1e6, 1),
            plan_us=round(plan_s * 1e6, 1),
            launch_us=round(launch * 1e6, 1),
            wait_us=round(wait * 1e6, 1),
            commit_us=round(commit * 1e6, 1),
            send_us=round(send * 1e6, 1),
            rows=plan.num_rows,
            decodes=plan.num_decodes,
            tokens=plan.num_tokens,
            output_tokens=num_new_tokens,
            running=len(scheduler.requests.running),
            waiting=len(scheduler.requests.queued),
            used_pages=cache.num_used_pages,
            cached_pages=cache.num_cached_pages,
            num_pages=cache.num_pages,
        )
        self.stepped(record, plan)

    def turn_ended(self, scheduler: Scheduler) -> bool:
        """Return whether it still watches."""
        return True
