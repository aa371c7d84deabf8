"""Detects workers that are stopped or hang, by their heartbeats (`minisgl.utils.heartbeat`).

A worker hangs if it sends no heartbeat during the timeout. It also hangs if a turn of its loop
takes longer than it may by more than the timeout (with several ranks plus `LOOP_EXTRA_S`). The
supervisor notices the end of a worker by its sentinel, not here.
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
"""The time between two calls of `HangWatch.check`."""

STALL_S: Final = 2.0
"""After this time without a heartbeat the server is not ready. Heartbeats may be a second late."""

LOOP_EXTRA_S: Final = 2.0
"""If a rank is stopped, the loops of the others wait for it. With this extra time its silence is
found before their turns are, so the error names the cause."""


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
        """Read the heartbeats that have come. Returns a worker that hangs, with its error.

        If several hang, it is the one that has been silent longest. A pause of this process counts
        as one interval, because the heartbeats of that time may not be read yet.
        """
        now = time.monotonic()
        interval_s = 0.0 if self._last is None else min(now - self._last, MAX_INTERVAL_S)
        self._last = now
        found: list[tuple[float, Worker, WorkerHung]] = []
        for worker in workers:
            if not self._read(worker, interval_s):
                continue  # it has ended
            if how := self._problem(worker, self._timeout_s, self._loop_timeout_s):
                found.append((self._silent_s[worker.name], worker, WorkerHung(worker.name, how)))
        if not found:
            return None
        _, worker, error = max(found, key=lambda hung: hung[0])
        return worker, error

    def stalled(self, workers: Sequence[Worker]) -> str | None:
        """Return a sentence about a worker that makes no progress, by the last `check`, if any.

        A turn that takes long, but no longer than it may, is progress.
        """
        for worker in workers:
            if how := self._problem(worker, STALL_S, STALL_S):
                return f"the {worker.name} process {how}"
        return None

    def _problem(self, worker: Worker, most_silent_s: float, most_overdue_s: float) -> str:
        """Complete the sentence "the NAME process ..." for a worker beyond a limit; else ""."""
        beat, silent_s = self._beats.get(worker.name), self._silent_s.get(worker.name, 0.0)
        if beat and silent_s > most_silent_s + beat.quiet_s:
            return f"has given no sign of life for {silent_s:.0f} s"
        if beat and beat.overdue_s > most_overdue_s:
            late = f"{beat.overdue_s:.0f} s longer than it may"
            return f"makes no progress: a turn of its loop takes {late}"
        return ""

    def _read(self, worker: Worker, interval_s: float) -> bool:
        """Read the worker's heartbeats. Returns False if it has ended."""
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
