"""The observers of a rank's loop (`minisgl.runtime.observers`), one for each option or request."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import psutil

from minisgl.core import Failed
from minisgl.core.plan import Executor
from minisgl.engine import Engine
from minisgl.errors import MinisglError
from minisgl.message import Control, ProfileMsg, ProfileReply, WatchMsg, WatchReply
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import LoopObserver, Seat
from minisgl.scheduler.loop import Outbox
from minisgl_gateway import env
from minisgl_gateway.args import ours
from minisgl_gateway.nodes.settings import digest_of
from minisgl_gateway.upgrade.memory import EngineMemory
from minisgl_gateway.watch.cost import CostedExecutor, CostedOutbox, Ledger
from minisgl_gateway.watch.energy import PowerMeter, meter_of
from minisgl_gateway.watch.line_file import StepLog
from minisgl_gateway.watch.profiler import StepProfiler
from minisgl_gateway.watch.recorder import Recorder
from minisgl_gateway.watch.replica_report import ReplicaReport
from minisgl_gateway.watch.xray import XRay

PROFILE_S: Final = 600.0
"""The longest time without heartbeats: torch holds the interpreter's lock while it writes a trace,
which may have gigabytes."""


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
    """Answers requests for frames of the X-ray, for the state of the replica and for its memory.
    Mutable: the first request for the state makes its report."""

    def __init__(self) -> None:
        self._report: ReplicaReport | None = None

    def attach(self, seat: Seat) -> None:
        self._seat = seat

    def handle(self, message: Control) -> bool:
        if not isinstance(message, WatchMsg):
            return False
        seat = self._seat
        if message.memory:
            frame = msgspec.json.encode(engine_memory(seat.engine, seat.args))
            seat.send(WatchReply(frame=frame, seq=message.seq))
            return True
        if seat.engine.comm.rank:
            return True
        if message.seq is None:
            watching = (each for each in seat.meter.watchers if isinstance(each, XRay))
            if (xray := next(watching, None)) is None:
                xray = XRay.at(seat, num_output_tokens=seat.scheduler().stats.num_output_tokens)
            xray.watch(message.seconds)
            return True
        if self._report is None:
            step_times = seat.engine.tuning.step_times
            digest = digest_of(ours(seat.args), seat.args.folder)
            self._report = ReplicaReport(seat.scheduler(), seat.meter, step_times, digest=digest)
        seat.send(WatchReply(frame=self._report(), seq=message.seq))
        return True


def engine_memory(engine: Engine, args: RuntimeArgs) -> EngineMemory:
    """Return what `minisgl upgrade` asks about the device of this rank."""
    plan, device = engine.memory, engine.device
    needed = plan.weight_bytes + plan.activation_bytes + plan.vision_bytes + plan.kv_bytes
    free = device.free_bytes()
    if device.torch_device.type == "cpu":  # the system gives memory when it is first written
        written = psutil.Process().memory_info().rss
        needed = max(needed, written)
        free = max(free - (needed - written), 0)
    share = plan.memory_ratio if args.num_pages is None else 1.0
    return EngineMemory(needed=needed, free=free, usable=int(free * share))


def steps_of(args: RuntimeArgs, rank: int) -> StepLog | None:
    """Return the observer of rank 0 with `--log-steps`."""
    path = ours(args).log_steps
    return StepLog(Path(path)) if path and rank == 0 else None


def recording_of(args: RuntimeArgs, rank: int) -> Recorder | None:
    """Return the observer of rank 0 with `--record`."""
    path = ours(args).record
    return Recorder(Path(path)) if path and rank == 0 else None


def costs_of(args: RuntimeArgs, rank: int) -> Costs | None:
    """Return the observer of rank 0 of a server on one machine."""
    return Costs(args.num_local) if rank == 0 and args.num_local == args.tp else None


def profiles_of(args: RuntimeArgs, rank: int) -> Profiles:
    """Return the observer of each rank."""
    return Profiles(Path(ours(args).profile_dir))


def watching_of(args: RuntimeArgs, rank: int) -> Watching:
    """Return the observer of each rank; rank 0's answers."""
    return Watching()
