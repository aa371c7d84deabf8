"""Handles the messages for the engine's process that are not for its scheduler.

A `ProfileMsg` starts or stops the profiler of a rank. A `WatchMsg` asks rank 0 for frames of the
X-ray, or for the state of the replica.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minisgl.core import Failed
from minisgl.engine import Engine
from minisgl.errors import MinisglError
from minisgl.message import ProfileMsg, ProfileReply, WatchReply
from minisgl.scheduler import Scheduler
from minisgl.scheduler.io import Control, NoOutbox, ZmqOutbox
from minisgl.scheduler.meter import LoopMeter
from minisgl.utils.process import WorkerStatus

if TYPE_CHECKING:
    from minisgl_gateway.watch.replica_report import ReplicaReport

PROFILE_S: Final = 600.0
"""The longest time without heartbeats: torch holds the interpreter's lock while it writes a trace,
which may have gigabytes."""


class Controls:
    """The handler of one rank. Mutable: the first request for the replica's state makes its report.

    outbox: gets the answers. profile_dir: for traces. text_of: returns the text of token ids; None
    if frames have no texts. scheduler, meter: set them before the first message arrives.
    """

    scheduler: Scheduler
    meter: LoopMeter

    def __init__(
        self,
        engine: Engine,
        outbox: ZmqOutbox | NoOutbox,
        status: WorkerStatus,
        profile_dir: Path,
        text_of: Callable[[list[int]], str] | None,
    ) -> None:
        self._engine, self._outbox, self._status = engine, outbox, status
        self._rank = engine.comm.rank
        self._profile_dir, self._text_of = profile_dir, text_of
        self._report: ReplicaReport | None = None

    def __call__(self, message: Control) -> None:
        """Handle a message, between two steps."""
        if isinstance(message, ProfileMsg):
            with self._status.quiet(PROFILE_S):
                self._outbox.pass_on(self._profile(message))
        elif self._rank == 0 and message.seq is None:
            self._watch(message.seconds)
        elif self._rank == 0:
            self._outbox.pass_on(WatchReply(frame=self._replica_state(), seq=message.seq))

    def send_frame(self, frame: bytes) -> None:
        self._outbox.pass_on(WatchReply(frame=frame))

    def _watch(self, seconds: float) -> None:
        """Send frames of the loop's steps for `seconds` from now."""
        from minisgl_gateway.watch.xray import XRay

        meter = self.meter
        if not isinstance(meter.watcher, XRay):
            meter.watcher = XRay(self.send_frame, meter.epoch, text_of=self._text_of)
        meter.watcher.watch(seconds)

    def _replica_state(self) -> bytes:
        from minisgl_gateway.watch.replica_report import ReplicaReport

        if self._report is None:
            step_times = self._engine.tuning.step_times
            self._report = ReplicaReport(self.scheduler, self.meter, step_times)
        return self._report()

    def _profile(self, message: ProfileMsg) -> ProfileReply:
        """Start the profiler, or stop it and write the trace."""
        profiler, seq, rank = self._engine.profiler, message.seq, self._rank
        try:
            if message.action == "start":
                profiler.start()
                return ProfileReply(seq=seq, rank=rank)
            self._engine.synchronize()
            trace, num_steps = profiler.stop(self._profile_dir.resolve(), rank)
            return ProfileReply(seq=seq, rank=rank, trace=str(trace), num_steps=num_steps)
        except MinisglError as error:
            return ProfileReply(seq=seq, rank=rank, failed=Failed.of(seq, error))
