"""Late planning: the next step is planned just before the step in flight ends.

With overlap the next step is usually planned as soon as the flight begins. A request that arrives
after that waits for two steps of other requests before its own. If rank 0 receives messages until
the flight is about to end, the request is in the next step. Rank 0 does so if several API keys
share the server (docs/security.md), or if a decode step on a CPU is long. It plans at once if the
step in flight is short.

Rank 0's clock decides only when messages are taken. All ranks get the same messages in the same
turn, so plans depend on no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from minisgl.message import UserMsg
from minisgl.scheduler.io import Message, Source

LEAD_S: Final = 2e-3
"""How long before the flight's end the next step is planned: the host's time to broadcast, plan and
launch a step with prompts."""
LEAD_SHARE: Final = 0.1
"""The lead as a share of the flight's time, if that is longer: the prediction of step times
errs."""

LONG_STEP_S: Final = 10e-3
"""A request can arrive in four fifths of a decode step of this length and still be in the next one.
For steps of 1 ms, as the built-in model has, a prediction would cost more than it gains."""

POLL_S: Final = 1e-3
"""The shortest wait: a queue waits for whole milliseconds."""


class LatePlanning:
    """A `Source` of rank 0. Mutable: it begins to wait when a request of a second key has come.

    flight: returns when the step in flight began and when it will end, on `clock`; None if no step
    is in flight. waited: called after each wait. for_all: wait from the start, with any keys.
    """

    def __init__(
        self,
        source: Source,
        flight: Callable[[], tuple[float, float] | None],
        waited: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        *,
        for_all: bool = False,
    ) -> None:
        self._source = source
        self._flight = flight
        self._waited = waited
        self._clock = clock
        self._waits = for_all

    def get(self, timeout_s: float | None) -> Sequence[Message]:
        found = self._receive(timeout_s)
        if not self._waits or (flight := self._flight()) is None:
            return found
        began, end = flight
        until = end - max(LEAD_S, LEAD_SHARE * (end - began))
        if (left_s := until - self._clock()) < POLL_S:
            return found
        while left_s >= POLL_S:
            found += self._receive(left_s)
            left_s = until - self._clock()
        self._waited()
        return found

    def close(self) -> None:
        self._source.close()

    def _receive(self, timeout_s: float | None) -> list[Message]:
        found = list(self._source.get(timeout_s))
        for message in found:
            # Keys are numbered from 1; requests without a key have 0.
            self._waits |= isinstance(message, UserMsg) and message.share.key > 1
        return found
