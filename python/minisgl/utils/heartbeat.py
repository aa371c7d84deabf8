"""Heartbeats: a worker process reports that it lives and that its loop makes progress.

A thread of the worker sends a `Heartbeat` on the status pipe every `HEARTBEAT_S`. The loop counts
its turns in a `Pulse`, which the thread reads. `minisgl.runtime.hang_watch` evaluates heartbeats.

::

    loop      | turn | turn | turn that never ends ...........................
    thread       beat   beat   beat(overdue 0)  beat(overdue 0.5)  beat(overdue 1.0) ...

Time is counted in intervals of at most `MAX_INTERVAL_S`. So a process that was stopped and
continued (SIGSTOP, a laptop's sleep) counts the pause as one interval, and causes no false alarm.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

import msgspec

HEARTBEAT_S: Final = 0.5
MAX_INTERVAL_S: Final = 2 * HEARTBEAT_S


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
