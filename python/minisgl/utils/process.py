"""The frame of every worker process: it sets up the log, reports the start, and ends the process.

The supervisor starts ``multiprocessing`` processes (method "spawn") whose target is `run_worker`,
and reads one status from each pipe. After that a worker sends heartbeats there
(`minisgl.utils.hangs`). It ends with an exit code:

- 0 after SIGTERM. It ignores SIGINT and SIGHUP, which a terminal sends to every process, because
  the supervisor handles them.
- 1 if its body raises, before or after it was ready. It then ends at once: the interpreter would
  wait for threads and devices, which may wait for another process of the server.
- 1 if the process that started it has ended, for any reason (`wait_for_parents_end`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import msgspec

from minisgl.errors import PEER_LOST_EXIT, MinisglError, PeerLost
from minisgl.utils.hangs import Heart, Heartbeat, Pulse
from minisgl.utils.logger import get_logger, setup_logging, tell_lines

logger = get_logger(__name__)

PARENT_CHECK_S: Final = 1.0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker serves from now on. info: values that the supervisor shows or passes on."""

    info: dict[str, Any]


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker could not start. message: a sentence that says why.

    is_consequence: whether the likely cause is that another worker could not start.
    """

    message: str
    is_consequence: bool = False


class StartLine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A line of the log of a worker that starts."""

    text: str


class WorkerStatus:
    """The worker's end of the pipe. Call either `ready` or `failed`, once, and `tell` before.

    spawned_at: on `time.monotonic`. pulse: the progress of the worker's loop.
    """

    def __init__(self, connection: Connection, spawned_at: float) -> None:
        self._connection = connection
        self.spawned_at = spawned_at
        self.is_reported = False
        self.end_lines: Callable[[], None] = lambda: None  # called when the worker is ready
        self.pulse = Pulse()
        self._native_s = 0.0
        self._heart = Heart(connection, self.pulse)

    def ready(self, info: dict[str, object]) -> None:
        """Report that the worker serves, and begin to send heartbeats.

        The objects of the start, which live as long as the process, are exempted from collection:
        during a full collection of an engine's objects no step is planned. info: holds JSON-like
        values only.
        """
        gc.freeze()
        self.end_lines()
        self._send(Ready(info=info))
        self._heart.start()

    def failed(self, message: str, *, is_consequence: bool = False) -> None:
        self._send(StartFailed(message=message, is_consequence=is_consequence))

    def tell(self, text: str) -> None:
        """Send a line of the log, unless the start is over."""
        if not self.is_reported:
            self._connection.send_bytes(msgspec.msgpack.encode(StartLine(text=text)))

    def bound_native_code(self, cpu_s: float) -> None:
        """Let the operating system end this process after so many CPU seconds without Python code.

        While native code holds the interpreter's lock, no thread notices that the parent has ended.
        """
        self._native_s = cpu_s
        self.restart_timer()

    def restart_timer(self) -> None:
        """Count the CPU seconds of `bound_native_code` from now on."""
        if self._native_s:
            signal.setitimer(signal.ITIMER_PROF, self._native_s)

    @contextlib.contextmanager
    def quiet(self, most_s: float) -> Iterator[None]:
        """Let the process be silent for `most_s` seconds longer in the block.

        Use it for native code that may hold the interpreter's lock for that long.
        """
        self.pulse.rest()
        self.pulse.quiet_s = most_s
        self._heart.send(Heartbeat(quiet_s=most_s))
        try:
            yield
        finally:
            self.pulse.quiet_s = 0.0
            self.pulse.turn()

    def _send(self, status: Ready | StartFailed) -> None:
        assert not self.is_reported, "a worker reports its start once"
        self.is_reported = True
        self._connection.send_bytes(msgspec.msgpack.encode(status))


def receive_status(connection: Connection) -> Ready | StartFailed | StartLine:
    """Return the worker's report, for which this waits, on the supervisor's end of the pipe.

    Raises EOFError if the worker ends first. The supervisor must have closed its own copy of the
    worker's end; otherwise this would wait forever.
    """
    return msgspec.msgpack.decode(connection.recv_bytes(), type=Ready | StartFailed | StartLine)


def run_worker(
    name: str,
    connection: Connection,
    body: Callable[[WorkerStatus], None],
    spawned_at: float,
    log_level: str | None = None,
    leftover: Path | None = None,
    tells: bool = False,
) -> NoReturn:
    """Run `body` in this process, until SIGTERM. `body` calls `status.ready` and then serves.

    SIGTERM raises SystemExit in the main thread, once. `body` cleans up with `try/finally` and must
    not catch BaseException. Before it is ready there is nothing to clean up, and SIGTERM ends the
    process at once, because an import could drop an exception. name: for the log. spawned_at: on
    `time.monotonic`. log_level: None for the environment's. leftover: a folder that this removes if
    the supervisor, which usually removes it, has ended. tells: send the log of the start to the
    supervisor, whatever the level.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.enable()  # a crash in native code then shows Python's stack
    status = WorkerStatus(connection, spawned_at)
    _watch_for_the_end(status, leftover)

    try:
        setup_logging(name, level=log_level)
        if tells:
            status.end_lines = tell_lines(status.tell)
        body(status)
    except Exception as error:
        # With SystemExit the interpreter would wait for threads.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_ours = isinstance(error, MinisglError)
        message = str(error) if is_ours else f"{type(error).__name__}: {error}"
        if status.is_reported or not is_ours:
            what = "stopped on an error" if status.is_reported else "could not start"
            logger.error("the %s process %s: %s", name, what, message, exc_info=not is_ours)
        if not status.is_reported:
            with contextlib.suppress(OSError):  # the supervisor is gone
                status.failed(message, is_consequence=isinstance(error, PeerLost))
        os._exit(PEER_LOST_EXIT if isinstance(error, PeerLost) else 1)
    finally:
        # During the interpreter's clean-up SystemExit would only print a traceback.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _watch_for_the_end(status: WorkerStatus, leftover: Path | None) -> None:
    """Turn SIGTERM into SystemExit, and end this process when its parent ends.

    If a signal comes just before the main thread blocks in a system call, Python does not handle it
    until the call returns (seen in 1 of 6 runs that were ended just after their start). So the
    wake-up descriptor also wakes a thread, which repeats the signal until it is handled.
    """
    stopping = threading.Event()

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        if not status.is_reported:
            os._exit(0)
        if not stopping.is_set():  # a second signal must not interrupt the clean-up
            stopping.set()
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    wakeup, to_wakeup = os.pipe()
    os.set_blocking(to_wakeup, False)
    signal.set_wakeup_fd(to_wakeup, warn_on_full_buffer=False)
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def watch() -> None:
        if not wait_for_parents_end(wakeup, on_check=status.restart_timer):
            while not stopping.is_set() and not wait_for_parents_end(timeout_s=0.05):
                signal.pthread_kill(main_thread, signal.SIGTERM)
            wait_for_parents_end()
        if leftover:
            shutil.rmtree(leftover, ignore_errors=True)
        os._exit(1)  # there is nothing to clean up for

    threading.Thread(target=watch, name="end-watch", daemon=True).start()


def wait_for_parents_end(
    wakeup: int | None = None,
    timeout_s: float = math.inf,
    on_check: Callable[[], None] = lambda: None,
) -> bool:
    """Wait until the process that started this one has ended; forever if it was started by hand.

    Returns True then, and False after `timeout_s`, or if the descriptor `wakeup` is readable first.
    The operating system closes the pipe of a parent that ends, unless a fork of the parent has it,
    too. So the parent's id is checked every `PARENT_CHECK_S`, each time after a call of `on_check`.
    prctl's PDEATHSIG exists on Linux only, and comes when the *thread* that started this process
    ends.
    """
    parent = multiprocessing.parent_process()
    watched = [*([parent.sentinel] if parent else []), *([wakeup] if wakeup is not None else [])]
    deadline = time.monotonic() + timeout_s
    while True:
        on_check()
        left_s = max(deadline - time.monotonic(), 0)
        ready = wait(watched, min(left_s, PARENT_CHECK_S))
        if wakeup is not None and wakeup in ready:
            return False
        if ready or (parent and os.getppid() != parent.pid):
            return True
        if not left_s:
            return False
