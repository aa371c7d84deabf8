"""What the images of a request cost: an observer of rank 0's loop (`loop_observers`)."""

from __future__ import annotations

from msgspec.structs import replace

from minisgl.core.event import Event, Failed, Finished, Token
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver, Seat
from minisgl.scheduler.loop import Outbox
from minisgl_zoo.vision.tower import Count, Tower


class ImageTimes(LoopObserver):
    """Adds `images` to the ends of requests that have some."""

    def attach(self, seat: Seat) -> None:
        self._counts: dict[int, Count] | None = None

        def uid_of(table_idx: int) -> int:
            running = seat.scheduler().requests.running
            return next(req.uid for req in running if req.table_idx == table_idx)

        if isinstance(seat.engine.vision, Tower):
            self._counts = seat.engine.vision.count(uid_of)

    def outbox(self, outbox: Outbox) -> Outbox:
        return outbox if self._counts is None else _Outbox(outbox, self._counts)


class _Outbox:
    def __init__(self, outbox: Outbox, counts: dict[int, Count]) -> None:
        self._outbox, self._counts = outbox, counts

    def send(self, events: list[Event]) -> None:
        if self._counts:
            for index, event in enumerate(events):
                if type(event) is Token or not isinstance(event, Finished | Failed):
                    continue
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
