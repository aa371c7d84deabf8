"""Connects the scheduler's loop of one rank to its queues, meters and recorders.

::

    source -> inbox (controls) -> [recorder] -> loop -> [recorder] -> [costs] -> outbox
                                                  plans -> executor (the engine, on its ranks)

Only rank 0 has the parts in brackets, and only if an option or a device needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl import env
from minisgl.core.executor import Executor
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.message import StatusReply, StepBroadcastMsg
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.controls import Controls
from minisgl.runtime.watched_loop import WatchedLoopMeter
from minisgl.scheduler import Scheduler, run
from minisgl.scheduler.io import (
    FollowerOutbox,
    Message,
    NoOutbox,
    Source,
    SourceInbox,
    ZmqOutbox,
)
from minisgl.scheduler.loop import WAIT, Inbox, Outbox
from minisgl.scheduler.status_line import StatusLine
from minisgl.scheduler.step_broadcast import CHECK_EVERY, Follower, Leader
from minisgl.utils.process import WorkerStatus
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue
from minisgl_gateway.watch.line_file import StepLog

if TYPE_CHECKING:
    from minisgl_gateway.watch.recorder import Recorder

TextOf = Callable[[list[int]], str]


class RankLoop:
    """The loop of one rank. Mutable: `use` gives it its scheduler.

    now: the scheduler's clock. controls: handles the messages that are not for the scheduler.
    """

    def __init__(
        self,
        args: RuntimeArgs,
        endpoints: Endpoints,
        engine: Engine,
        status: WorkerStatus,
        text_of: TextOf,
        step_log: StepLog | None,
    ) -> None:
        """text_of: returns the text of token ids, for the X-ray. step_log: rank 0's."""
        self._args, self._engine = args, engine
        self._overlap = not env.overlap_disabled()
        self._closing = ExitStack()
        leads = engine.comm.rank == 0
        shown = text_of if args.xray_text else None
        info = DistributedInfo(engine.comm.rank, engine.comm.size)
        source, self._executor, self.now = links(engine, endpoints, info, self._watched)
        outbox = _outbox(args, endpoints, engine.comm.rank)
        self.controls = Controls(engine, outbox, status, Path(args.profile_dir), shown)
        inbox = SourceInbox(source, self.controls)
        self._closing.callback(outbox.close)
        self._closing.callback(inbox.close)
        listeners: list[Callable[[StatusReply], None]] = [outbox.pass_on]
        if leads:
            listeners += [StatusLine(), *([step_log.flush] if step_log else [])]
        self.meter = WatchedLoopMeter(
            status.pulse,
            engine.tuning.step_times,
            rank=engine.comm.rank,
            on_report=listeners,
            on_step=step_log,
            peak_memory_bytes=engine.device.peak_memory_bytes,
        )
        self.controls.meter = self.meter
        self._inbox: Inbox = inbox
        self._outbox: Outbox = outbox
        self._recorder: Recorder | None = None
        if args.record and leads:
            self._record(Path(args.record), shown)
        if leads and args.nnodes == 1:
            self._add_costs(args.num_local)

    def use(self, scheduler: Scheduler) -> None:
        """Take the scheduler that the loop runs. Call this once, before `run`."""
        self._scheduler = self.controls.scheduler = scheduler

    def run(self) -> None:
        """Run the loop until an `ExitMsg`."""
        if self._recorder:
            self._recorder.begin(self._scheduler.config, overlap=self._overlap)
        run(
            self._scheduler,
            self._executor,
            self._inbox,
            self._outbox,
            overlap=self._overlap,
            meter=self.meter,
        )

    def close(self) -> None:
        self._closing.close()

    def _watched(self, source: Source) -> Source:
        """Return rank 0's source of messages, which also ends requests that have waited too long,
        and plans late, if the options ask for that."""
        if self._args.max_queue_wait:
            from minisgl.scheduler.queue_wait import QueueWait

            source = QueueWait(
                source, self._args.max_queue_wait, lambda: self._scheduler.requests.queued
            )
        if self._overlap and not self._args.offline:
            from minisgl.scheduler.late_planning import LONG_STEP_S, LatePlanning

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

    def _record(self, path: Path, text_of: TextOf | None) -> None:
        """Write messages, events and frames to the file of `--record`."""
        from minisgl_gateway.watch.recorder import RecordedInbox, RecordedOutbox, Recorder
        from minisgl_gateway.watch.xray import XRay

        self._recorder = recorder = Recorder(path)
        self._closing.callback(recorder.close)
        self._inbox = RecordedInbox(self._inbox, recorder)
        self._outbox = RecordedOutbox(self._outbox, recorder)
        self.meter.watcher = XRay(
            self.controls.send_frame, self.meter.epoch, recorder.frame, text_of
        )

    def _add_costs(self, num_local: int) -> None:
        """Add costs to the ends of requests, if the devices' energy can be read."""
        from minisgl_gateway.watch.energy import PowerMeter, meter_of

        meter = meter_of(self._engine.device.torch_device, num_local, env.powercap())
        if meter is None:
            return
        from minisgl_gateway.watch.cost import CostedExecutor, CostedOutbox, Ledger

        ledger = Ledger(PowerMeter(meter))
        self._executor = CostedExecutor(self._executor, ledger)
        self._outbox = CostedOutbox(self._outbox, ledger)


def _outbox(args: RuntimeArgs, endpoints: Endpoints, rank: int) -> ZmqOutbox | NoOutbox:
    if rank == 0:
        return ZmqOutbox(endpoints)
    return FollowerOutbox(endpoints) if args.node_rank == 0 else NoOutbox()


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
