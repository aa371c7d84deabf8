"""What a hang of a worker process is: heartbeats that fail to come, or a turn that never ends.

A thread of the worker sends a `Heartbeat` on the status pipe every `HEARTBEAT_S`. The loop counts
its turns in a `Pulse`, which the thread reads. The supervisor evaluates heartbeats (`HangWatch`).

::

    loop      | turn | turn | turn that never ends ...........................
    thread       beat   beat   beat(overdue 0)  beat(overdue 0.5)  beat(overdue 1.0) ...

Time is counted in intervals of at most `MAX_INTERVAL_S`. So a process that was stopped and
continued (SIGSTOP, a laptop's sleep) counts the pause as one interval, and causes no false alarm.

A worker hangs if it sends no heartbeat for the timeout, or if a turn of its loop takes longer than
it may by the timeout (with ranks on several machines by `LOOP_EXTRA_S` more). The death of a worker
shows at once, by its sentinel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Final, Protocol, TypeVar

import msgspec

from minisgl.errors import WorkerHung

HEARTBEAT_S: Final = 0.5
MAX_INTERVAL_S: Final = 2 * HEARTBEAT_S

CHECK_S: Final = HEARTBEAT_S
"""How often a supervisor calls `HangWatch.check`."""

STALL_S: Final = 2.0
"""After this time without a heartbeat a worker is not ready; heartbeats may be a second late."""

LOOP_EXTRA_S: Final = 2.0
"""If a rank is stopped, the loops of the other ranks wait for it. The error must name the stopped
one, so a silent worker counts this many seconds more than a late loop. With several machines a loop
may also be late this much longer, so that the silent rank's own supervisor comes first."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process lives.

    overdue_s: seconds by which the loop's current turn has exceeded its limit; 0 below it. quiet_s:
    the process may be silent for this many seconds longer.
    """

    overdue_s: float = 0.0
    quiet_s: float = 0.0


class Pulse:
    """The progress of a worker's loop. Mutable: the loop calls `turn` and `rest`.

    allowed_s: returns the seconds that the current turn may take. The heartbeat thread calls it,
    and only during a turn that is longer than one interval. quiet_s: see `Heartbeat`.
    """

    __slots__ = ("_num_turns", "_works", "allowed_s", "quiet_s")

    def __init__(self) -> None:
        self.allowed_s: Callable[[], float] = float
        self.quiet_s = 0.0
        self._num_turns = 0
        self._works = False

    def turn(self) -> None:
        """Count a turn: the loop has made progress and works."""
        self._num_turns += 1
        self._works = True

    def rest(self) -> None:
        """The loop waits for messages, for any time."""
        self._works = False

    @property
    def state(self) -> int | None:
        """The number of the current turn; None while the loop rests."""
        return self._num_turns if self._works else None


class Stopwatch:
    """Measures how long the current turn of the loop takes. Mutable: `look` is called at
    intervals."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._seen: int | None = None
        self._turn_s = 0.0

    def look(self, interval_s: float) -> Heartbeat:
        """Return the heartbeat to send. interval_s: since the last call."""
        state = self._pulse.state
        if state is None or state != self._seen:
            self._turn_s = 0.0
        else:
            self._turn_s += min(interval_s, MAX_INTERVAL_S)
        self._seen = state
        overdue_s = self._turn_s - self._pulse.allowed_s() if self._turn_s else 0.0
        return Heartbeat(overdue_s=max(overdue_s, 0.0), quiet_s=self._pulse.quiet_s)


class Heart:
    """Sends heartbeats from a thread that ends with the process."""

    def __init__(self, connection: Connection, pulse: Pulse) -> None:
        self._connection = connection
        self._pulse = pulse
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def send(self, beat: Heartbeat) -> None:
        """Send `beat`, if the supervisor still exists. Its end ends this process in another way."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(beat))

    def _run(self) -> None:
        watch, last = Stopwatch(self._pulse), time.monotonic()
        while True:
            time.sleep(HEARTBEAT_S)
            now = time.monotonic()
            self.send(watch.look(now - last))
            last = now


class Watched(Protocol):
    """A worker, and the pipe on which its heartbeats come."""

    @property
    def name(self) -> str: ...

    @property
    def status(self) -> Connection: ...


W = TypeVar("W", bound=Watched)


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

    def check(self, workers: Sequence[W]) -> tuple[W, WorkerHung] | None:
        """Read the heartbeats that have come. Return a worker that hangs, with the error for it.

        If one worker is silent and the loop of another is late, it is the silent one, for which the
        loop may be waiting. A pause of this process counts as one interval, because the heartbeats
        of that time may be still to come.
        """
        now = time.monotonic()
        interval_s = 0.0 if self._last is None else min(now - self._last, MAX_INTERVAL_S)
        self._last = now
        hangs = False
        found: list[tuple[float, W, str]] = []
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

    def stalled(self, workers: Sequence[Watched]) -> str | None:
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

    def _read(self, worker: Watched, interval_s: float) -> bool:
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
