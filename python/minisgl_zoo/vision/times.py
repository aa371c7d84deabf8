"""What the images of a request cost: an observer of rank 0's loop (`loop_observers`)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from minisgl.core.event import Event, Failed, Finished, Token
from minisgl.core.plan import Executor, Flight, Plan, StepOutcome, StepResult
from minisgl.core.req import Mask
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver, Seat
from minisgl.scheduler.loop import Outbox
from minisgl_zoo.vision.tower import Tower


class ImageTimes(LoopObserver):
    """Adds `images` to the ends of requests that have some. Mutable: it counts."""

    def __init__(self) -> None:
        self._tower: Tower | None = None
        self._counts: dict[int, tuple[int, int, float]] = {}  # by uid, see `Finished.images`

    def attach(self, seat: Seat) -> None:
        self._seat = seat
        if isinstance(seat.engine.vision, Tower):
            self._tower = seat.engine.vision
            self._tower.runs = {}

    def outbox(self, outbox: Outbox) -> Outbox:
        return _Outbox(outbox, self._counts) if self._tower else outbox

    def executor(self, executor: Executor) -> Executor:
        return _Executor(executor, self) if self._tower else executor

    def launched(self, plan: Plan) -> None:
        running = self._seat.scheduler().requests.running
        uids = {req.table_idx: req.uid for req in running}
        for table_idx, images in plan.image_begins:
            self._counts.setdefault(uids[table_idx], (len(images), 0, 0.0))

    def settled(self, plan: Plan, outcome: StepOutcome) -> None:
        assert self._tower
        assert self._tower.runs is not None
        runs = self._tower.runs.pop(plan.step, [])
        if not isinstance(outcome, StepResult):
            return  # a GPU may not have come to the end of a run
        for run in runs:
            if count := self._counts.get(run.uid):  # else it has ended meanwhile
                images, computed, seconds = count
                self._counts[run.uid] = images, computed + 1, seconds + run.seconds


class _Executor:
    def __init__(self, executor: Executor, times: ImageTimes) -> None:
        self._executor, self._times = executor, times

    def launch(self, plan: Plan) -> Flight:
        if plan.image_begins:
            self._times.launched(plan)
        flight = self._executor.launch(plan)
        return _Flight(flight, self._times, plan) if plan.images else flight


class _Flight(Flight):
    def __init__(self, flight: Flight, times: ImageTimes, plan: Plan) -> None:
        self._flight, self._times, self._plan = flight, times, plan

    def wait(self) -> StepOutcome:
        outcome = self._flight.wait()
        self._times.settled(self._plan, outcome)
        return outcome

    def sample_late(self, masks: Sequence[Mask]) -> None:
        self._flight.sample_late(masks)


class _Outbox:
    def __init__(self, outbox: Outbox, counts: dict[int, tuple[int, int, float]]) -> None:
        self._outbox, self._counts = outbox, counts

    def send(self, events: list[Event]) -> None:
        if self._counts:
            for index, event in enumerate(events):
                if type(event) is Token or not isinstance(event, Finished | Failed):
                    continue
                count = self._counts.pop(event.uid, None)
                if count and isinstance(event, Finished):
                    events[index] = replace(event, images=count)
        self._outbox.send(events)

    def pong(self, seq: int) -> None:
        self._outbox.pong(seq)


def times_of(args: RuntimeArgs, rank: int) -> ImageTimes | None:
    """Return the observer of rank 0."""
    return ImageTimes() if rank == 0 else None
