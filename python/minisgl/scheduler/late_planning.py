"""Late planning: a step is planned shortly before the step in flight ends, not when that begins.

With overlap the next step is planned as soon as the flight begins. A request that arrives just
after that waits for two steps of other requests before its own. Where several API keys share the
server, and where a decode step is long on a CPU, rank 0 therefore goes on receiving until the
flight is about to end, and the request is in the next step (decision 0041). Short steps are planned
at once: they leave too little to gain.

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
"""How long before the flight's end the next step is planned. Broadcasting, planning and launching a
step with prompts take 1 to 2 ms on the host."""
LEAD_SHARE: Final = 0.1
"""The same as a share of the flight's time, for the error of the model of step times."""

LONG_STEP_S: Final = 10e-3
"""A decode step of this length leaves four fifths of it to requests that arrive meanwhile. Steps of
the built-in model take 1 ms, in which a prediction would be a cost and no gain."""

POLL_S: Final = 1e-3
"""A queue waits for whole milliseconds."""


class LatePlanning:
    """A `Source` of rank 0. Mutable: it waits once requests of a second key have come.

    flight: returns when the step in flight began and when it will end, on `clock`; None if no step
    is in flight. waited: called after it has waited. for_all: wait for requests of one key, too.
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
            self._waits |= isinstance(message, UserMsg) and message.share[1] > 1
        return found
