"""The loop's inbox and outbox over ZeroMQ: what the online server hands to `run`."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.event import Event
from minisgl.message import DetokenizeMsg, SchedulerMsg
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue


class ZmqInbox:
    """Messages of the tokenizers, of the detokenizer (stops) and of the supervisor (exit)."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._queue: PullQueue[SchedulerMsg] = PullQueue(endpoints.scheduler, SchedulerMsg)

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        return self._queue.get(timeout_s)

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

    def close(self) -> None:
        self._queue.close()
