"""The status line in the log, from the reports of the meter."""

from __future__ import annotations

import time
from typing import Final

from minisgl.message import StatusReply
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver
from minisgl.utils.logger import get_logger
from minisgl_gateway.watch.json_lines import log_fields

logger = get_logger(__name__)

LINE_EVERY_S: Final = 5.0


class StatusLine(LoopObserver):
    """Logs a line at most every `LINE_EVERY_S`, and only if a step ran since the last line.

    Rates are per second of the loop's busy time, so pauses do not lower them; `busy` is the busy
    share of all time. Mutable: it remembers the report of the last line.
    """

    def __init__(self) -> None:
        self._last: StatusReply | None = None
        self._last_at = time.monotonic()

    def reported(self, now: StatusReply) -> None:
        at = time.monotonic()
        seconds = at - self._last_at
        if self._last is not None and seconds < LINE_EVERY_S:
            return
        last = self._last
        if now.num_steps == (last.num_steps if last else 0):
            return
        busy = sum(now.part_s) - (sum(last.part_s) if last else 0.0)

        def gained(name: str) -> int:
            return int(getattr(now, name)) - (int(getattr(last, name)) if last else 0)

        prompt, cached = gained("num_prompt_tokens"), gained("num_cached_tokens")
        log_fields(
            logger,
            "status",
            running=now.num_running,
            waiting=now.num_waiting,
            prefill_tokens_per_s=round(gained("num_prefill_tokens") / busy),
            decode_tokens_per_s=round(gained("num_output_tokens") / busy),
            kv_used=round(now.num_used_pages / now.num_pages, 3),
            hit_rate=round(cached / prompt, 3) if prompt else None,
            retractions=gained("num_retractions"),
            steps=gained("num_steps"),
            busy=round(min(busy / seconds, 1.0), 3),
        )
        self._last, self._last_at = now, at


def status_of(args: RuntimeArgs, rank: int) -> StatusLine | None:
    """Return the observer of rank 0."""
    return StatusLine() if rank == 0 else None
