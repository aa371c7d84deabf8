"""Measures how much time each part of the loop takes, and reports once a second.

::

    turn n    | receive | plan n | launch n | wait n-1 | commit n-1 | send n-1 |
    turn n+1                                                                   | receive | ...

The parts add up to the time that the loop is awake. docs/observability.md says what measuring
costs. The meter reports at the start, each second while there is work, and when the work ends. An
idle loop reports nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from minisgl.core.plan import Plan
from minisgl.message import StatusReply
from minisgl.scheduler.loop import PARTS, WAIT, Meter
from minisgl.scheduler.scheduler import Scheduler

REPORT_EVERY_S: Final = 1.0  # Prometheus scrapes every 15 s by default; a person looks each second


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


class Watcher(Protocol):
    """Called for each step while a client watches."""

    def settled(self, record: StepRecord, plan: Plan) -> None: ...

    def turn_ended(self, scheduler: Scheduler) -> bool:
        """Return whether it still watches."""


class LoopMeter(Meter):
    """Adds up the times. Mutable. The loop calls `begin`, a `lap` after each part, and `end`.

    on_report: called with a `StatusReply` every `REPORT_EVERY_S`. on_step: called with the record
    of each step. peak_memory_bytes: returns the device's, for a report. watcher: None while no
    client watches. epoch: the zero of the records' clock on `time.perf_counter`.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        on_report: Sequence[Callable[[StatusReply], None]] = (),
        on_step: Sequence[Callable[[StepRecord], None]] = (),
        peak_memory_bytes: Callable[[], int] = int,
    ) -> None:
        self.part_s = [0.0] * len(PARTS)
        self.num_prefill_tokens = 0
        self._rank = rank
        self._on_report = on_report
        self._on_step = on_step
        self._peak_memory_bytes = peak_memory_bytes
        self._turn_s = [0.0] * len(PARTS)
        self.epoch = self._last = self._begin = time.perf_counter()
        self._due = 0.0
        self._working: bool | None = None  # None: before the first report
        self._launches: deque[tuple[float, ...]] = deque()  # begin with the step's number
        self.watcher: Watcher | None = None
        self._num_output_tokens = 0

    def begin(self, *, asleep: bool) -> None:
        if asleep:
            self._last = time.perf_counter()
        self._begin = self._last

    def lap(self, part: int) -> None:
        now = time.perf_counter()
        seconds = now - self._last
        self.part_s[part] += seconds
        self._turn_s[part] = seconds
        self._last = now

    def launched(self, plan: Plan) -> None:
        if not self._working:  # work begins; the first report comes after the first interval
            self._working = True
            self._due = self._last + REPORT_EVERY_S
        self.num_prefill_tokens += plan.num_tokens - plan.num_decodes
        if self._on_step or self.watcher:
            self._launches.append((plan.step, self._begin, *self._turn_s[:WAIT]))

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        num_output_tokens = scheduler.stats.num_output_tokens
        num_new_tokens = num_output_tokens - self._num_output_tokens
        self._num_output_tokens = num_output_tokens
        if not self._launches or self._launches[0][0] != plan.step:
            return  # no client watched when it was launched
        _, start, receive, plan_s, launch = self._launches.popleft()
        wait, commit, send = self._turn_s[WAIT:]
        record = StepRecord(
            step=plan.step,
            start_s=round(start - self.epoch, 7),
            settle_s=round(self._last - wait - commit - send - self.epoch, 7),
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
            running=scheduler.num_running,
            waiting=len(scheduler.requests.queued),
            used_pages=scheduler.requests.cache.num_used_pages,
            cached_pages=scheduler.requests.cache.num_cached_pages,
            num_pages=scheduler.requests.cache.num_pages,
        )
        for listener in self._on_step:
            listener(record)
        if self.watcher:
            self.watcher.settled(record, plan)

    def end(self, scheduler: Scheduler, *, idle: bool) -> None:
        if self.watcher and not self.watcher.turn_ended(scheduler):
            self.watcher = None
        is_due = self._working is not False if idle else self._last >= self._due
        if is_due and self._on_report:
            self._working = not idle
            self._due = self._last + REPORT_EVERY_S
            report = self._report(scheduler)
            for listener in self._on_report:
                listener(report)

    def _report(self, scheduler: Scheduler) -> StatusReply:
        stats = scheduler.stats
        return StatusReply(
            rank=self._rank,
            num_waiting=len(scheduler.requests.queued),
            num_running=scheduler.num_running,
            num_pages=scheduler.requests.cache.num_pages,
            num_used_pages=scheduler.requests.cache.num_used_pages,
            num_cached_pages=scheduler.requests.cache.num_cached_pages,
            num_steps=stats.num_steps,
            num_retractions=stats.num_retractions,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_prefill_tokens=self.num_prefill_tokens,
            num_output_tokens=stats.num_output_tokens,
            part_s=self.part_s[:],
            peak_memory_bytes=self._peak_memory_bytes(),
        )
