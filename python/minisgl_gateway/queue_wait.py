"""Ends requests that have waited too long in the queue: `--max-queue-wait`.

A rank's clock must not influence its plans. So rank 0 checks its queue, and adds a message for each
request that must end. Every rank receives it in the same turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from minisgl.core.event import Failed
from minisgl.core.req import Req
from minisgl.message import AbortMsg
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver, Seat
from minisgl.scheduler.io import Message, Source
from minisgl_gateway.args import ours

CHECK_S: Final = 0.1
"""The time between two checks: short beside any wait that a user sets, and long beside a check."""


class QueueWait:
    """A `Source` of rank 0 that adds an `AbortMsg` for each request that has waited too long.

    waiting: returns the requests in the scheduler's queues. A request that was retracted may wait
    longer, since its client may have tokens. Mutable: it keeps the time of the next check.
    """

    def __init__(
        self,
        source: Source,
        max_wait_s: float,
        waiting: Callable[[], Sequence[Req]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._waiting = waiting
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._next = 0.0

    def get(self, timeout_s: float | None) -> Sequence[Message]:
        messages = self._source.get(timeout_s)
        now = self._clock()
        if now < self._next:
            return messages
        self._next = now + CHECK_S
        late = [
            req
            for req in self._waiting()
            if req.num_retractions == 0 and now - req.queued_at > self._max_wait_s
        ]
        return [*messages, *(self._end(req.uid, now - req.queued_at) for req in late)]

    def close(self) -> None:
        self._source.close()

    def _end(self, uid: int, waited_s: float) -> AbortMsg:
        because = Failed(
            uid=uid,
            message=f"the request has waited {waited_s:.1f} s in the queue, longer than "
            f"--max-queue-wait {self._max_wait_s:g} allows; try again later",
            code="queue_timeout",
            status=503,
        )
        return AbortMsg(uid=uid, because=because)


class WaitingRequests(LoopObserver):
    """Lets rank 0 receive from a `QueueWait`."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s

    def attach(self, seat: Seat) -> None:
        self._seat = seat

    def source(self, source: Source) -> Source:
        return QueueWait(source, self._max_wait_s, lambda: self._seat.scheduler().requests.queued)


def queue_wait_of(args: RuntimeArgs, rank: int) -> WaitingRequests | None:
    """Return the observer of rank 0 with `--max-queue-wait`."""
    wait_s = ours(args).max_queue_wait
    return WaitingRequests(wait_s) if wait_s and rank == 0 else None
