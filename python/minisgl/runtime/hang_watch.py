"""Notices workers that are stopped or that hang, by their heartbeats (`minisgl.utils.heartbeat`).

A worker hangs if it sends no heartbeat for the timeout, or if its loop is in one turn for the
timeout longer than that turn may take (with several ranks for `LOOP_EXTRA_S` more). The death of a
worker shows at once by other means: its sentinel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from minisgl.errors import WorkerHung
from minisgl.runtime.worker import Worker
from minisgl.utils.heartbeat import HEARTBEAT_S, MAX_INTERVAL_S, Heartbeat

CHECK_S: Final = HEARTBEAT_S
"""How often a supervisor calls `HangWatch.check`."""

STALL_S: Final = 2.0
"""After this time without a heartbeat a worker is not ready; heartbeats may be a second late."""

LOOP_EXTRA_S: Final = 2.0
"""A rank that is stopped makes the loops of the others wait. It is silent before they are overdue,
so the error names the cause."""


class HangWatch:
    """The heartbeats of the workers of one supervisor. Mutable.

    timeout_s: `--hang-timeout`. num_ranks: of the engine, on all machines.
    """

    def __init__(self, timeout_s: float, num_ranks: int = 1) -> None:
        self._timeout_s = timeout_s
        self._loop_timeout_s = timeout_s + (LOOP_EXTRA_S if num_ranks > 1 else 0.0)
        self._last: float | None = None
        self._silent_s: dict[str, float] = {}
        self._beats: dict[str, Heartbeat] = {}

    def check(self, workers: Sequence[Worker]) -> tuple[Worker, WorkerHung] | None:
        """Read the heartbeats that have come. Return a worker that hangs, with the error for it.

        Among several it is the one that has been silent longest. A pause of this process counts as
        one interval, because the heartbeats of that time may be still to come.
        """
        now = time.monotonic()
        interval_s = 0.0 if self._last is None else min(now - self._last, MAX_INTERVAL_S)
        self._last = now
        found: list[tuple[float, Worker, WorkerHung]] = []
        for worker in workers:
            if not self._read(worker, interval_s):
                continue  # it has ended
            beat, silent_s = self._beats[worker.name], self._silent_s[worker.name]
            if silent_s > self._timeout_s + beat.quiet_s:
                how = f"has given no sign of life for {silent_s:.0f} s: it is stopped or hangs"
            elif beat.overdue_s > self._loop_timeout_s:
                how = (
                    f"makes no progress: a turn of its loop takes {beat.overdue_s:.0f} s longer "
                    "than it may"
                )
            else:
                continue
            found.append((silent_s, worker, WorkerHung(worker.name, how)))
        if not found:
            return None
        _, worker, error = max(found, key=lambda hung: hung[0])
        return worker, error

    def stalled(self, workers: Sequence[Worker]) -> str | None:
        """Return what is wrong with a worker that makes no progress, by the last `check`.

        A turn that takes long, but no longer than it may, is progress.
        """
        for worker in workers:
            beat, silent_s = self._beats.get(worker.name), self._silent_s.get(worker.name, 0.0)
            if beat and silent_s > STALL_S + beat.quiet_s:
                return f"the {worker.name} process has given no sign of life for {silent_s:.0f} s"
            if beat and beat.overdue_s > STALL_S:
                return (
                    f"the {worker.name} process makes no progress: a turn of its loop takes "
                    f"{beat.overdue_s:.0f} s longer than it may"
                )
        return None

    def _read(self, worker: Worker, interval_s: float) -> bool:
        """Take over what the worker sent. Returns False if it has ended."""
        name = worker.name
        self._silent_s[name] = self._silent_s.get(name, 0.0) + interval_s
        self._beats.setdefault(name, Heartbeat())
        try:
            while worker.status.poll(0):
                data = worker.status.recv_bytes()
                self._beats[name] = msgspec.msgpack.decode(data, type=Heartbeat)
                self._silent_s[name] = 0.0
        except (EOFError, OSError):
            return False
        return True
