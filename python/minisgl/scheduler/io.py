"""The inbox and the outboxes that connect the loop to other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from minisgl.core.event import Event
from minisgl.message import Control, DetokenizeMsg, Report, SchedulerMsg
from minisgl.utils.zmq import Endpoints, PushQueue

Message = SchedulerMsg | Control


class Source(Protocol):
    """The source of an inbox's messages: a `PullQueue`, or the broadcasts of rank 0."""

    def get(self, timeout_s: float | None) -> Sequence[Message]: ...

    def close(self) -> None: ...


class SourceInbox:
    """Takes messages of the tokenizers, the detokenizer (stops) and the supervisor (exit).

    on_control: called between two steps with each message that is not for the scheduler.
    """

    def __init__(self, source: Source, on_control: Callable[[Control], None] | None = None) -> None:
        self._source = source
        self._on_control = on_control

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        messages: list[SchedulerMsg] = []
        for message in self._source.get(timeout_s):
            if not isinstance(message, Control):
                messages.append(message)
            elif self._on_control:
                self._on_control(message)
        return messages

    def close(self) -> None:
        self._source.close()


class ZmqOutbox:
    """Sends events to the detokenizer, in one frame for each call."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._queue = PushQueue(endpoints.detokenizer)

    def send(self, events: list[Event]) -> None:
        if events:
            self._queue.put([DetokenizeMsg(events=events)])

    def pong(self, seq: int) -> None:
        self._queue.put([DetokenizeMsg(events=[], pings=[seq])])

    def pass_on(self, reply: Report) -> None:
        """Send a record to the API server. It arrives after the events that were sent before."""
        self._queue.put([DetokenizeMsg(events=[], pass_on=[reply])])

    def close(self) -> None:
        self._queue.close()


class FollowerOutbox(ZmqOutbox):
    """The outbox of a rank above 0: it sends its own status and pongs. Rank 0 sends the events."""

    def send(self, events: list[Event]) -> None:
        pass


class NoOutbox:
    """The outbox of a rank that runs on another machine than the detokenizer: it sends nothing."""

    def send(self, events: list[Event]) -> None:
        pass

    def pong(self, seq: int) -> None:
        pass

    def pass_on(self, reply: Report) -> None:
        pass

    def close(self) -> None:
        pass
