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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final, Protocol

from minisgl.core.plan import Plan
from minisgl.message import StatusReply
from minisgl.scheduler.loop import PARTS, Meter
from minisgl.scheduler.scheduler import Scheduler

REPORT_EVERY_S: Final = 1.0  # Prometheus scrapes every 15 s by default; a person looks each second


class Watcher(Protocol):
    """Called for each step while it is in `LoopMeter.watchers`. meter: has the turn's times."""

    def launched(self, plan: Plan, meter: LoopMeter) -> None: ...

    def settled(self, plan: Plan, scheduler: Scheduler, meter: LoopMeter) -> None: ...

    def turn_ended(self, scheduler: Scheduler) -> bool:
        """Return whether it still watches."""


class LoopMeter(Meter):
    """Adds up the times. Mutable. The loop calls `begin`, a `lap` after each part, and `end`.

    on_report: called with a `StatusReply` every `REPORT_EVERY_S`. peak_memory_bytes: returns the
    device's, for a report. epoch, turn_began, last: when the loop and this turn began, and when the
    last part ended, on `time.perf_counter`. turn_s: the seconds of each part, the last time.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        on_report: Sequence[Callable[[StatusReply], None]] = (),
        peak_memory_bytes: Callable[[], int] = int,
    ) -> None:
        self.part_s = [0.0] * len(PARTS)
        self.num_prefill_tokens = 0
        self._rank = rank
        self._on_report = on_report
        self._peak_memory_bytes = peak_memory_bytes
        self.turn_s = [0.0] * len(PARTS)
        self.epoch = self.last = self.turn_began = time.perf_counter()
        self._due = 0.0
        self._working: bool | None = None  # None: before the first report
        self.watchers: list[Watcher] = []

    def begin(self, *, asleep: bool) -> None:
        if asleep:
            self.last = time.perf_counter()
        self.turn_began = self.last

    def lap(self, part: int) -> None:
        now = time.perf_counter()
        seconds = now - self.last
        self.part_s[part] += seconds
        self.turn_s[part] = seconds
        self.last = now

    def launched(self, plan: Plan) -> None:
        if not self._working:  # work begins; the first report comes after the first interval
            self._working = True
            self._due = self.last + REPORT_EVERY_S
        self.num_prefill_tokens += plan.num_tokens - plan.num_decodes
        for watcher in self.watchers:
            watcher.launched(plan, self)

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        for watcher in self.watchers:
            watcher.settled(plan, scheduler, self)

    def end(self, scheduler: Scheduler, *, idle: bool) -> None:
        if self.watchers:
            self.watchers = [each for each in self.watchers if each.turn_ended(scheduler)]
        is_due = self._working is not False if idle else self.last >= self._due
        if is_due and self._on_report:
            self._working = not idle
            self._due = self.last + REPORT_EVERY_S
            report = self._report(scheduler)
            for listener in self._on_report:
                listener(report)

    def _report(self, scheduler: Scheduler) -> StatusReply:
        return StatusReply(
            rank=self._rank,
            num_waiting=len(scheduler.requests.queued),
            num_running=len(scheduler.requests.running),
            num_pages=scheduler.requests.cache.num_pages,
            num_used_pages=scheduler.requests.cache.num_used_pages,
            num_cached_pages=scheduler.requests.cache.num_cached_pages,
            num_prefill_tokens=self.num_prefill_tokens,
            part_s=self.part_s[:],
            peak_memory_bytes=self._peak_memory_bytes(),
            **asdict(scheduler.stats),
        )
