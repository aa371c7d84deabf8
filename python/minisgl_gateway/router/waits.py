"""Requests whose answer has not begun. A replica that answers other questions may have lost one.

How long a head may take has no bound that fits all: an answer that is no stream has one when it is
whole, after the queue and all tokens. So the router asks: it adds the ids of such requests to its
question for the replica's state. A request that the replica does not name fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from typing import Final
from urllib.parse import quote

ASKED_AFTER_S: Final = 10.0
"""A request whose answer has not begun after this time is asked for."""

LOST_S: Final = 10.0
"""A request fails if the replica has not named it for this time. Its answer may be on the way."""

MOST_ASKED: Final = 300
"""A question has at most so many requests: 300 ids of 128 characters fit in a head of 64 KiB. The
others are asked for in the next questions."""


class Wait:
    """One such request. Mutable. limit: raises TimeoutError in its block when the request fails."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.limit = asyncio.timeout(None)
        self.ask_at = time.monotonic() + ASKED_AFTER_S
        self._missed_since: float | None = None

    def answered(self, is_known: bool) -> None:
        """Take the replica's answer to a question that named this request."""
        now = time.monotonic()
        self.ask_at = now
        if is_known:
            self.ask_at, self._missed_since = now + ASKED_AFTER_S, None
        elif self._missed_since is None:
            self._missed_since = now
        elif now - self._missed_since >= LOST_S:
            self.limit.reschedule(asyncio.get_running_loop().time())


def to_ask(waits: Iterable[Wait]) -> list[Wait]:
    """Return those that the next question names, the most overdue first."""
    now = time.monotonic()
    due = sorted((wait for wait in waits if wait.ask_at <= now), key=lambda wait: wait.ask_at)
    return due[:MOST_ASKED]


def query_of(asked: Collection[Wait]) -> str:
    """Return the query of the question; "" if it names no request."""
    return f"?open={quote(','.join(wait.id for wait in asked))}" if asked else ""
