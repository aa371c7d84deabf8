"""What the images of a request cost: an observer of rank 0's loop (`loop_observers`)."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from minisgl.core.event import Accepted, Event, Failed, Finished, Token
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver, Seat
from minisgl.scheduler import Scheduler
from minisgl.scheduler.loop import Outbox
from minisgl_zoo.vision.tower import Count, Tower


class ImageTimes(LoopObserver):
    """Adds `images` to the ends of requests that have some."""

    def attach(self, seat: Seat) -> None:
        vision = seat.engine.vision
        self._counts = vision.count() if isinstance(vision, Tower) else None
        self._scheduler = seat.scheduler

    def outbox(self, outbox: Outbox) -> Outbox:
        return outbox if self._counts is None else _Outbox(outbox, self._counts, self._scheduler)


class _Outbox:
    """The tower's thread only adds runs to counts that are here: a request may have left before its
    step begins there."""

    def __init__(
        self, outbox: Outbox, counts: dict[int, Count], scheduler: Callable[[], Scheduler]
    ) -> None:
        self._outbox, self._counts, self._scheduler = outbox, counts, scheduler

    def send(self, events: list[Event]) -> None:
        for index, event in enumerate(events):
            if type(event) is Token:
                continue
            if isinstance(event, Accepted):
                req = self._scheduler().requests.by_uid.get(event.uid)
                if req and req.images:
                    self._counts[event.uid] = Count(len(req.images), [])
            elif isinstance(event, Finished | Failed):
                count = self._counts.pop(event.uid, None)
                if count and isinstance(event, Finished):
                    seconds = [s for run in count.runs if (s := run.seconds) is not None]
                    images = count.images, len(seconds), sum(seconds)
                    events[index] = replace(event, images=images)
        self._outbox.send(events)

    def pong(self, seq: int) -> None:
        self._outbox.pong(seq)


def times_of(args: RuntimeArgs, rank: int) -> ImageTimes | None:
    """Return the observer of rank 0."""
    return ImageTimes() if rank == 0 else None
