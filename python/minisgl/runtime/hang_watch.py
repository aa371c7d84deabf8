"""Notices workers that are stopped or that hang, by their heartbeats (`minisgl.utils.heartbeat`).

A worker hangs if it sends no heartbeat for the timeout, or if a turn of its loop takes longer than
it may by the timeout (with ranks on several machines by `LOOP_EXTRA_S` more). The death of a worker
shows at once, by its sentinel.
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
"""If a rank is stopped, the loops of the other ranks wait for it. The error must name the stopped
one, so a silent worker counts this many seconds more than a late loop. With several machines a loop
may also be late this much longer, so that the silent rank's own supervisor comes first."""


class HangWatch:
    """The heartbeats of the workers of one supervisor. Mutable.

    timeout_s: `--hang-timeout`. is_spread: whether the engine's ranks are on several machines.
    """

    def __init__(self, timeout_s: float, *, is_spread: bool = False) -> None:
        self._timeout_s = timeout_s
        self._loop_timeout_s = timeout_s + (LOOP_EXTRA_S if is_spread else 0.0)
        self._last: float | None = None
        self._silent_s: dict[str, float] = {}
        self._beats: dict[str, Heartbeat] = {}

    def check(self, workers: Sequence[Worker]) -> tuple[Worker, WorkerHung] | None:
        """Read the heartbeats that have come. Return a worker that hangs, with the error for it.

        If one worker is silent and the loop of another is late, it is the silent one, for which the
        loop may be waiting. A pause of this process counts as one interval, because the heartbeats
        of that time may be still to come.
        """
        now = time.monotonic()
        interval_s = 0.0 if self._last is None else min(now - self._last, MAX_INTERVAL_S)
        self._last = now
        hangs = False
        found: list[tuple[float, Worker, str]] = []
        for worker in workers:
            if not self._read(worker, interval_s):
                continue  # it has ended
            beat, silent_s = self._beats[worker.name], self._silent_s[worker.name]
            beyond_s = silent_s - beat.quiet_s
            hangs |= beyond_s > self._timeout_s or beat.overdue_s > self._loop_timeout_s
            how = f"has given no sign of life for {silent_s:.0f} s: it is stopped or hangs"
            found.append((beyond_s + LOOP_EXTRA_S, worker, how))
            late = f"{beat.overdue_s:.0f} s longer than it may"
            how = f"makes no progress: a turn of its loop takes {late}"
            found.append((beat.overdue_s, worker, how))
        if not hangs:
            return None
        _, worker, how = max(found, key=lambda each: each[0])
        return worker, WorkerHung(worker.name, how)

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
