"""Connects the scheduler's loop of one rank to its queues, its meter and its observers.

::

    source -> inbox -> [observers] -> loop -> [observers] -> outbox
                                       plans -> [observers] -> executor (the engine, on its ranks)

An observer (`minisgl.runtime.observers`) is there only if an option or a device needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from minisgl import env
from minisgl.core.plan import Executor
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.message import Control, StepBroadcastMsg
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver, Seat, TextOf
from minisgl.runtime.watched_loop import WatchedLoopMeter
from minisgl.scheduler import Scheduler, run
from minisgl.scheduler.io import FollowerOutbox, Message, NoOutbox, Source, SourceInbox, ZmqOutbox
from minisgl.scheduler.late_planning import LONG_STEP_S, LatePlanning
from minisgl.scheduler.loop import WAIT, Inbox, Outbox
from minisgl.scheduler.step_broadcast import CHECK_EVERY, Follower, Leader
from minisgl.utils.process import WorkerStatus
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue


class RankLoop:
    """The loop of one rank. Mutable: `use` gives it its scheduler.

    now: the scheduler's clock.
    """

    def __init__(
        self,
        args: RuntimeArgs,
        endpoints: Endpoints,
        engine: Engine,
        status: WorkerStatus,
        text_of: TextOf,
        observers: Sequence[LoopObserver],
    ) -> None:
        """text_of: returns the text of token ids, for observers."""
        self._args, self._engine, self._observers = args, engine, observers
        self._overlap = not env.overlap_disabled()
        self._closing = ExitStack()
        info = DistributedInfo(engine.comm.rank, engine.comm.size)
        source, self._executor, self.now = links(engine, endpoints, info, self._watched)
        outbox = _outbox(args, endpoints, engine.comm.rank)
        inbox = SourceInbox(source, self._handle)
        self._closing.callback(outbox.close)
        self._closing.callback(inbox.close)
        self.meter = WatchedLoopMeter(
            status.pulse,
            engine.tuning.step_times,
            rank=engine.comm.rank,
            on_report=[outbox.pass_on, *(observer.reported for observer in observers)],
            peak_memory_bytes=engine.device.peak_memory_bytes,
        )
        self._inbox: Inbox = inbox
        self._outbox: Outbox = outbox
        seat = Seat(
            engine=engine,
            meter=self.meter,
            send=outbox.pass_on,
            text_of=text_of,
            args=args,
            scheduler=lambda: self._scheduler,
            status=status,
        )
        for observer in observers:
            observer.attach(seat)
            self._inbox = observer.inbox(self._inbox)
            self._outbox = observer.outbox(self._outbox)
            self._executor = observer.executor(self._executor)

    def use(self, scheduler: Scheduler) -> None:
        """Take the scheduler that the loop runs. Call this once, before `run`."""
        self._scheduler = scheduler

    def run(self) -> None:
        """Run the loop until an `ExitMsg`."""
        for observer in self._observers:
            observer.begin(self._scheduler.config, overlap=self._overlap)
        run(
            self._scheduler,
            self._executor,
            self._inbox,
            self._outbox,
            overlap=self._overlap,
            meter=self.meter,
        )

    def close(self) -> None:
        """Close the queues. The observers are closed by whoever made them."""
        self._closing.close()

    def _handle(self, message: Control) -> None:
        """Handle a message that is not for the scheduler, between two steps."""
        is_handled = any(observer.handle(message) for observer in self._observers)
        assert is_handled, f"no observer handles {type(message).__name__}"

    def _watched(self, source: Source) -> Source:
        """Return rank 0's source of messages, with those of observers, and with late planning."""
        for observer in self._observers:
            source = observer.source(source)
        if self._overlap and not self._args.offline:
            times, device = self._engine.tuning.step_times, self._engine.device.torch_device
            source = LatePlanning(
                source,
                lambda: self.meter.flight(),
                lambda: self.meter.lap(WAIT),
                for_all=device.type == "cpu"
                and times is not None
                and times.step_s(1) >= LONG_STEP_S,
            )
        return source


def _outbox(args: RuntimeArgs, endpoints: Endpoints, rank: int) -> ZmqOutbox | NoOutbox:
    if rank == 0:
        return ZmqOutbox(endpoints)
    return FollowerOutbox(endpoints) if 0 in args.local_ranks else NoOutbox()


def links(
    engine: Engine,
    endpoints: Endpoints,
    ranks: DistributedInfo,
    watched: Callable[[Source], Source],
) -> tuple[Source, Executor, Callable[[], float]]:
    """Return this rank's source of messages, the executor of its plans, and its scheduler's clock.

    watched: returns the source that rank 0 uses instead of its queue.
    """
    check_every = 1 if env.check_plans() else CHECK_EVERY
    if ranks.rank > 0:
        broadcasts: PullQueue[StepBroadcastMsg] = PullQueue(
            endpoints.broadcasts(ranks.rank), StepBroadcastMsg
        )
        follower = Follower(broadcasts, engine, check_every=check_every)
        return follower, follower, lambda: follower.now
    queue: PullQueue[Message] = PullQueue(endpoints.scheduler, Message)
    source = watched(queue)
    if ranks.size == 1:
        return source, engine, time.monotonic
    followers = [PushQueue(endpoints.broadcasts(rank)) for rank in range(1, ranks.size)]
    leader = Leader(source, engine, followers, check_every=check_every)
    return leader, leader, time.monotonic
