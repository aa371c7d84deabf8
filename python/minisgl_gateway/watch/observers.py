"""The observers of a rank's loop (`minisgl.runtime.observers`), one for each option or request."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from minisgl import env
from minisgl.core import Failed
from minisgl.core.plan import Executor
from minisgl.errors import MinisglError
from minisgl.message import ProfileMsg, ProfileReply, StatusReply, WatchReply
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver, Seat
from minisgl.scheduler import SchedulerConfig
from minisgl.scheduler.io import Control
from minisgl.scheduler.loop import Inbox, Outbox
from minisgl_gateway.watch.cost import CostedExecutor, CostedOutbox, Ledger
from minisgl_gateway.watch.energy import PowerMeter, meter_of
from minisgl_gateway.watch.line_file import StepLog
from minisgl_gateway.watch.profiler import StepProfiler
from minisgl_gateway.watch.recorder import RecordedInbox, RecordedOutbox, Recorder
from minisgl_gateway.watch.replica_report import ReplicaReport
from minisgl_gateway.watch.xray import XRay

PROFILE_S: Final = 600.0
"""The longest time without heartbeats: torch holds the interpreter's lock while it writes a trace,
which may have gigabytes."""


class Steps(LoopObserver):
    """`--log-steps`."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._log = StepLog(path)

    def attach(self, seat: Seat) -> None:
        seat.meter.watchers.append(self._log)

    def reported(self, report: StatusReply) -> None:
        self._log.flush(report)

    def close(self) -> None:
        self._log.close()


class Recording(LoopObserver):
    """`--record`: writes messages, events and frames."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._recorder = Recorder(path)

    def attach(self, seat: Seat) -> None:
        send, epoch = partial(_send_frame, seat), seat.meter.epoch
        seat.meter.watchers.append(XRay(send, epoch, self._recorder.frame, seat.text_of))

    def inbox(self, inbox: Inbox) -> Inbox:
        return RecordedInbox(inbox, self._recorder)

    def outbox(self, outbox: Outbox) -> Outbox:
        return RecordedOutbox(outbox, self._recorder)

    def begin(self, config: SchedulerConfig, *, overlap: bool) -> None:
        self._recorder.begin(config, overlap=overlap)

    def close(self) -> None:
        self._recorder.close()


class Costs(LoopObserver):
    """Adds costs to the ends of requests, if the devices' energy can be read. Mutable."""

    def __init__(self, num_local: int) -> None:
        self._num_local = num_local
        self._ledger: Ledger | None = None

    def attach(self, seat: Seat) -> None:
        meter = meter_of(seat.engine.device.torch_device, self._num_local, env.powercap())
        self._ledger = Ledger(PowerMeter(meter)) if meter else None

    def outbox(self, outbox: Outbox) -> Outbox:
        return CostedOutbox(outbox, self._ledger) if self._ledger else outbox

    def executor(self, executor: Executor) -> Executor:
        return CostedExecutor(executor, self._ledger) if self._ledger else executor


class Profiles(LoopObserver):
    """Starts and stops the profiler of a rank."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._profiler = folder, StepProfiler()

    def attach(self, seat: Seat) -> None:
        self._seat = seat
        seat.engine.named = self._profiler.named

    def handle(self, message: Control) -> bool:
        if not isinstance(message, ProfileMsg):
            return False
        with self._seat.status.quiet(PROFILE_S):
            self._seat.send(self._profile(message))
        return True

    def _profile(self, message: ProfileMsg) -> ProfileReply:
        """Start the profiler, or stop it and write the trace."""
        engine, seq = self._seat.engine, message.seq
        rank = engine.comm.rank
        try:
            if message.action == "start":
                self._profiler.start()
                return ProfileReply(seq=seq, rank=rank)
            engine.synchronize()
            trace, num_steps = self._profiler.stop(self._folder.resolve(), rank)
            return ProfileReply(seq=seq, rank=rank, trace=str(trace), num_steps=num_steps)
        except MinisglError as error:
            return ProfileReply(seq=seq, rank=rank, failed=Failed.of(seq, error))


class Watching(LoopObserver):
    """Answers requests for frames of the X-ray, and for the state of the replica. Mutable: the
    first request for the state makes its report."""

    def __init__(self) -> None:
        self._report: ReplicaReport | None = None

    def attach(self, seat: Seat) -> None:
        self._seat = seat

    def handle(self, message: Control) -> bool:
        if isinstance(message, ProfileMsg):
            return False
        seat = self._seat
        if seat.engine.comm.rank:
            return True
        if message.seq is None:
            watching = (each for each in seat.meter.watchers if isinstance(each, XRay))
            if (xray := next(watching, None)) is None:
                num_output_tokens = seat.scheduler().stats.num_output_tokens
                send, epoch = partial(_send_frame, seat), seat.meter.epoch
                xray = XRay(send, epoch, None, seat.text_of, num_output_tokens)
                seat.meter.watchers.append(xray)
            xray.watch(message.seconds)
            return True
        if self._report is None:
            step_times = seat.engine.tuning.step_times
            self._report = ReplicaReport(seat.scheduler(), seat.meter, step_times)
        seat.send(WatchReply(frame=self._report(), seq=message.seq))
        return True


def _send_frame(seat: Seat, frame: bytes) -> None:
    seat.send(WatchReply(frame=frame))


def steps_of(args: RuntimeArgs, rank: int) -> Steps | None:
    """Return the observer of rank 0 with `--log-steps`."""
    return Steps(Path(args.log_steps)) if args.log_steps and rank == 0 else None


def recording_of(args: RuntimeArgs, rank: int) -> Recording | None:
    """Return the observer of rank 0 with `--record`."""
    return Recording(Path(args.record)) if args.record and rank == 0 else None


def costs_of(args: RuntimeArgs, rank: int) -> Costs | None:
    """Return the observer of rank 0 of a server on one machine."""
    return Costs(args.num_local) if rank == 0 and args.num_local == args.tp else None


def profiles_of(args: RuntimeArgs, rank: int) -> Profiles:
    """Return the observer of each rank."""
    return Profiles(Path(args.profile_dir))


def watching_of(args: RuntimeArgs, rank: int) -> Watching:
    """Return the observer of each rank; rank 0's answers."""
    return Watching()
