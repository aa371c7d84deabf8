"""An inbox with given messages, and an outbox that keeps the events; neither has a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.core.event import Event
from minisgl.message import ExitMsg, SchedulerMsg


class ListInbox:
    """Returns `turns[i]` at turn i, later the result of `more()`, or `ExitMsg` if that is None."""

    def __init__(
        self,
        turns: Sequence[Sequence[SchedulerMsg]],
        more: Callable[[], Sequence[SchedulerMsg] | None] | None = None,
    ) -> None:
        self._turns = list(turns)
        self._more = more
        self.num_turns = 0

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        self.num_turns += 1
        if self.num_turns <= len(self._turns):
            return self._turns[self.num_turns - 1]
        messages = self._more() if self._more else None
        return [ExitMsg()] if messages is None else messages


class ListOutbox:
    """Keeps every event, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pongs: list[int] = []

    def send(self, events: list[Event]) -> None:
        self.events += events

    def pong(self, seq: int) -> None:
        self.pongs.append(seq)
