"""The loop's inbox and outbox over ZeroMQ: what the online server hands to `run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.core.event import Event
from minisgl.message import DetokenizeMsg, ProfileMsg, ProfileReply, SchedulerMsg, StatusReply
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue


class ZmqInbox:
    """Messages of the tokenizers, of the detokenizer (stops) and of the supervisor (exit).

    on_profile: gets the messages that are for the engine's profiler, between two steps.
    """

    def __init__(
        self, endpoints: Endpoints, on_profile: Callable[[ProfileMsg], None] | None = None
    ) -> None:
        self._queue: PullQueue[SchedulerMsg | ProfileMsg] = PullQueue(
            endpoints.scheduler, SchedulerMsg | ProfileMsg
        )
        self._on_profile = on_profile

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        messages: list[SchedulerMsg] = []
        for message in self._queue.get(timeout_s):
            if not isinstance(message, ProfileMsg):
                messages.append(message)
            elif self._on_profile:
                self._on_profile(message)
        return messages

    def close(self) -> None:
        self._queue.close()


class ZmqOutbox:
    """Events go to the detokenizer, one frame per call."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._queue = PushQueue(endpoints.detokenizer)

    def send(self, events: list[Event]) -> None:
        if events:
            self._queue.put([DetokenizeMsg(events=events)])

    def pong(self, seq: int) -> None:
        self._queue.put([DetokenizeMsg(events=[], pings=[seq])])

    def pass_on(self, reply: StatusReply | ProfileReply) -> None:
        """To the API server, behind the events that were sent before."""
        self._queue.put([DetokenizeMsg(events=[], pass_on=[reply])])

    def close(self) -> None:
        self._queue.close()
