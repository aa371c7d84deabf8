"""What every worker process does besides its work: log, report its start, end when it should.

The supervisor starts ``multiprocessing`` processes (method "spawn") whose target is `run_worker`,
and reads one status from each pipe. After that a process says no more there: its end is its exit
code. A worker ends

- with 0 on SIGTERM (SIGINT and SIGHUP, which a terminal sends to every process, are ignored: they
  are the supervisor's to translate);
- with 1 when its body raises, before or after it was ready: on the spot, as what the interpreter
  waits for at its end (threads, a device) may itself wait for another process of the server;
- with 1 when the process that started it is gone, however that happened. The operating system
  closes a dead parent's pipe; prctl's PDEATHSIG would fire when the *thread* that started the
  worker ends, and exists on Linux only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from minisgl.errors import PEER_LOST_EXIT, MinisglError, PeerLost
from minisgl.utils.logger import get_logger, setup_logging

logger = get_logger(__name__)


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker serves from now on. `info` is what the supervisor shows or passes on."""

    info: dict[str, Any]


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker could not start; `message` is a sentence that says why.

    is_consequence: most likely as another worker could not.
    """

    message: str
    is_consequence: bool = False


class WorkerStatus:
    """The worker's end of the pipe: exactly one of `ready` and `failed` is called, once.

    spawned_at: on `time.monotonic`.
    """

    def __init__(self, connection: Connection, spawned_at: float) -> None:
        self._connection = connection
        self.spawned_at = spawned_at
        self.is_reported = False

    def ready(self, info: dict[str, object]) -> None:
        """`info` holds JSON-like values only."""
        leave_start_to_no_collector()
        self._send(Ready(info=info))

    def failed(self, message: str, *, is_consequence: bool = False) -> None:
        self._send(StartFailed(message=message, is_consequence=is_consequence))

    def _send(self, status: Ready | StartFailed) -> None:
        assert not self.is_reported, "a worker reports its start once"
        self.is_reported = True
        self._connection.send_bytes(msgspec.msgpack.encode(status))


def leave_start_to_no_collector() -> None:
    """Exempt what exists now, which lives as long as the process, from garbage collection.

    A full collection of an engine's process looks at 180,000 objects for 45 ms, in which no step
    is planned; afterwards at next to none.
    """
    gc.freeze()


def receive_status(connection: Connection) -> Ready | StartFailed:
    """The supervisor's end: blocks until the worker has reported.

    Raises EOFError if the worker died before (the supervisor must have closed its own copy of the
    worker's end, or this waits for ever).
    """
    return msgspec.msgpack.decode(connection.recv_bytes(), type=Ready | StartFailed)


def run_worker(
    name: str,
    connection: Connection,
    body: Callable[[WorkerStatus], None],
    spawned_at: float,
    log_level: str | None = None,
    leftover: Path | None = None,
) -> NoReturn:
    """The target of a worker process: `body` calls `status.ready` and then serves until SIGTERM.

    SIGTERM raises SystemExit where the main thread is, once: `body` cleans up with `try/finally`
    and must not hold back BaseException. Before it is ready there is nothing to clean up, and the
    process ends on the spot, since an exception in the middle of an import may be swallowed.
    `name` marks the log lines and the process's title. spawned_at: on `time.monotonic`.
    log_level: None is the environment's. leftover: a folder to remove if the supervisor is gone,
    which would have done it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.enable()  # a crash in native code then says where Python was
    status = WorkerStatus(connection, spawned_at)
    _watch_for_the_end(status, leftover)
    with contextlib.suppress(ImportError):  # a nicety for `ps`, no dependency of ours
        importlib.import_module("setproctitle").setproctitle(f"minisgl {name}")

    try:
        setup_logging(name, level=log_level)
        body(status)
    except Exception as error:
        # SystemExit, from here, would let the interpreter wait for threads at its end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_ours = isinstance(error, MinisglError)
        message = str(error) if is_ours else f"{type(error).__name__}: {error}"
        if status.is_reported or not is_ours:
            what = "stopped on an error" if status.is_reported else "could not start"
            logger.error("the %s process %s: %s", name, what, message, exc_info=not is_ours)
        if not status.is_reported:
            with contextlib.suppress(OSError):  # the supervisor is gone: nobody to tell
                status.failed(message, is_consequence=isinstance(error, PeerLost))
        os._exit(PEER_LOST_EXIT if isinstance(error, PeerLost) else 1)
    finally:
        # SystemExit in the middle of the interpreter's own clean-up would only make noise.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _watch_for_the_end(status: WorkerStatus, leftover: Path | None) -> None:
    """Turn SIGTERM into SystemExit, and end with the parent.

    A signal that comes just before the main thread blocks in a system call is not seen by Python
    until that call returns (met in 1 of 6 runs that were ended when they had just started). So a
    thread is told of the signal as well, by the wake-up descriptor, and knocks until it is seen.
    """
    stopping = threading.Event()

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        if not status.is_reported:
            os._exit(0)
        if not stopping.is_set():  # a second one does not break into the clean-up
            stopping.set()
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    wakeup, to_wakeup = os.pipe()
    os.set_blocking(to_wakeup, False)
    signal.set_wakeup_fd(to_wakeup, warn_on_full_buffer=False)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    parent = multiprocessing.parent_process()
    sentinels = [parent.sentinel] if parent else []  # none: started by hand

    def watch() -> None:
        if wakeup in wait([wakeup, *sentinels]):
            while not stopping.is_set() and not wait(sentinels, timeout=0.05):
                signal.pthread_kill(main_thread, signal.SIGTERM)
            wait(sentinels)
        if sentinels:
            if leftover:
                shutil.rmtree(leftover, ignore_errors=True)
            os._exit(1)  # without further clean-up: there is nobody to clean up for

    threading.Thread(target=watch, name="end-watch", daemon=True).start()
