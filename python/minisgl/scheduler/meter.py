"""Measures where the loop's time goes, and reports once a second.

::

    turn n    | receive | plan n | launch n | wait n-1 | commit n-1 | send n-1 |
    turn n+1                                                                   | receive | ...

The parts add up to the loop's whole time without its sleep, so a sum of them is busy time. All of
it costs 1.3 us a step, of the 150 us that the host spends on one with 256 running requests
(docs/observability.md). Reports go out at the start, while there is work, and when it ends; an
idle loop reports nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from minisgl.core.plan import Plan
from minisgl.message import StatusReply
from minisgl.scheduler.loop import PARTS, WAIT, Meter
from minisgl.scheduler.scheduler import Scheduler

REPORT_EVERY_S: Final = 1.0  # Prometheus scrapes every 15 s by default; a person looks each second


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Its first three parts are of the turn that launched it, the others of the turn
    that settled it: with overlap the next one.

    start_s and settle_s: when these two series of parts began, on a clock that starts with the
    loop. tokens: computed, prompt and decode. output_tokens: given to requests. running and
    waiting: requests after the step; used_pages and cached_pages: what these hold of the KV pool's
    num_pages, and what is kept for whoever comes with the same prefix.
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


class LoopMeter(Meter):
    """Mutable: it adds up. The loop calls `begin`, a `lap` after each part, and `end`.

    on_report: get a `StatusReply` each `REPORT_EVERY_S`. on_step: gets a record of each step.
    peak_memory_bytes: asked for each report.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        on_report: Sequence[Callable[[StatusReply], None]] = (),
        on_step: Callable[[StepRecord], None] | None = None,
        peak_memory_bytes: Callable[[], int] = int,
    ) -> None:
        self.part_s = [0.0] * len(PARTS)
        self.num_prefill_tokens = 0
        self._rank = rank
        self._on_report = on_report
        self._on_step = on_step
        self._peak_memory_bytes = peak_memory_bytes
        self._turn_s = [0.0] * len(PARTS)
        self._epoch = self._last = self._begin = time.perf_counter()
        self._due = 0.0
        self._working: bool | None = None  # None: nothing was reported yet
        self._launches: deque[tuple[float, ...]] = deque()
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
        if not self._working:  # it begins; how it goes is told a while later
            self._working = True
            self._due = self._last + REPORT_EVERY_S
        self.num_prefill_tokens += plan.num_tokens - plan.num_decodes
        if self._on_step:
            self._launches.append((self._begin, *self._turn_s[:WAIT]))

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        if not self._on_step:
            return
        start, receive, plan_s, launch = self._launches.popleft()
        wait, commit, send = self._turn_s[WAIT:]
        num_output_tokens = scheduler.stats.num_output_tokens
        self._on_step(
            StepRecord(
                step=plan.step,
                start_s=round(start - self._epoch, 7),
                settle_s=round(self._last - wait - commit - send - self._epoch, 7),
                receive_us=round(receive * 1e6, 1),
                plan_us=round(plan_s * 1e6, 1),
                launch_us=round(launch * 1e6, 1),
                wait_us=round(wait * 1e6, 1),
                commit_us=round(commit * 1e6, 1),
                send_us=round(send * 1e6, 1),
                rows=plan.num_rows,
                decodes=plan.num_decodes,
                tokens=plan.num_tokens,
                output_tokens=num_output_tokens - self._num_output_tokens,
                running=scheduler.num_running,
                waiting=len(scheduler.waiting),
                used_pages=scheduler.num_used_pages,
                cached_pages=scheduler.num_cached_pages,
                num_pages=scheduler.num_pages,
            )
        )
        self._num_output_tokens = num_output_tokens

    def end(self, scheduler: Scheduler, *, idle: bool) -> None:
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
            num_waiting=len(scheduler.waiting),
            num_running=scheduler.num_running,
            num_pages=scheduler.num_pages,
            num_used_pages=scheduler.num_used_pages,
            num_cached_pages=scheduler.num_cached_pages,
            num_steps=stats.num_steps,
            num_retractions=stats.num_retractions,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_prefill_tokens=self.num_prefill_tokens,
            num_output_tokens=stats.num_output_tokens,
            part_s=self.part_s[:],
            peak_memory_bytes=self._peak_memory_bytes(),
        )
