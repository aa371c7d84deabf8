"""A replica's state for a router, made only when the router asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from minisgl.core.step_times import StepTimes
from minisgl.scheduler.meter import LoopMeter
from minisgl.scheduler.scheduler import Scheduler
from minisgl_gateway.router.prefix_hashes import TreeHashes
from minisgl_gateway.router.replica_state import ReplicaState

SHARE: Final = 0.01
"""The share of the loop's time that making hashes may take. A router that asks more often gets the
last hashes again. It knows which prompts it has sent since."""

LEAST_S: Final = 0.2
"""A rate is measured over at least this many seconds of the loop's time."""


class ReplicaReport:
    """Returns the state on each call. Mutable: it keeps counters, rates and hashes."""

    def __init__(
        self,
        scheduler: Scheduler,
        meter: LoopMeter,
        step_times: StepTimes | None,
        clock: Callable[[], float] = time.perf_counter,
        digest: str = "",
    ) -> None:
        self._scheduler, self._meter, self._clock = scheduler, meter, clock
        self._digest = digest
        self._prefill_rate = step_times.rate(step_times.default_chunk) if step_times else 0.0
        self._step_times, self._context = step_times, 0.0
        self._finished_rate = 0.0
        self._before = self._counters()
        self._had_queue = False
        self._tree_hashes = TreeHashes(scheduler.requests.cache.prefix_cache)
        self._hashes, self._hashes_due = b"", 0.0

    def __call__(self) -> bytes:
        """Return the JSON of a `ReplicaState`, without the fields that the API server sets."""
        scheduler, cache = self._scheduler, self._scheduler.requests.cache
        queued = sum(req.num_left for req in scheduler.requests.queued)
        unfinished = (req.num_left for req in scheduler.requests.running)
        queued += sum(left for left in unfinished if left > 1)  # one that decodes has 1 left
        self._measure(has_queue=queued > 0)
        now = self._clock()
        if now >= self._hashes_due:
            self._hashes = self._tree_hashes().astype("<u8").tobytes()
            ended = self._clock()
            self._hashes_due = now + (ended - now) / SHARE
        state = ReplicaState(
            page_size=scheduler.config.page_size,
            num_pages=cache.num_pages,
            num_free_pages=cache.num_pages - cache.num_used_pages,
            num_waiting=len(scheduler.requests.queued),
            num_running=len(scheduler.requests.running),
            max_running=scheduler.config.max_running,
            queued_tokens=queued,
            prefill_tokens_per_s=round(self._prefill_rate, 1),
            num_finished=scheduler.stats.num_finished,
            finished_per_s=round(self._finished_rate, 4),
            row_s=round(self._row_s(), 9),
            num_output_tokens=scheduler.stats.num_output_tokens,
            hashes=self._hashes,
            digest=self._digest,
        )
        return msgspec.json.encode(state)

    def _row_s(self) -> float:
        """Return the seconds that one row adds to a decode step."""
        scheduler, times = self._scheduler, self._step_times
        if times is None:
            return 0.0
        if len(scheduler.requests.running):
            num_tokens = scheduler.requests.cache.num_used_pages * scheduler.config.page_size
            self._context = num_tokens / len(scheduler.requests.running)
        return times.row_us * 1e-6 + times.context_ns * 1e-9 * self._context

    def _counters(self) -> tuple[float, int, int]:
        """Return the loop's seconds, prompt tokens and finished requests since the start."""
        meter = self._meter
        return sum(meter.part_s), meter.num_prefill_tokens, self._scheduler.stats.num_finished

    def _measure(self, *, has_queue: bool) -> None:
        counters = self._counters()
        seconds, tokens, finished = (
            now - before for now, before in zip(counters, self._before, strict=True)
        )
        if seconds < LEAST_S:
            return
        if has_queue and self._had_queue:  # else this would be the rate of arrivals
            self._prefill_rate = tokens / seconds or self._prefill_rate
        self._finished_rate = finished / seconds
        self._before, self._had_queue = counters, has_queue
