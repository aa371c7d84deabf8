"""Starts one worker process.

A worker's code is imported in the worker, inside its body: a failing import is then reported like
any other failure to start, and this process never imports torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Final

from minisgl.errors import WorkerDied
from minisgl.runtime.signals import held
from minisgl.utils.process import WorkerStatus, run_worker

_MAIN_MODULE: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process, and the pipe on which it reports its start."""

    name: str
    process: SpawnProcess
    status: Connection

    def death(self) -> WorkerDied:
        """Return the error that says how the worker ended. Its sentinel shows that it is gone."""
        self.process.join(1.0)  # the sentinel can be ahead of the exit code
        return WorkerDied(self.name, self.process.exitcode)


def start_worker(
    name: str, body: Callable[[WorkerStatus], None], *, log_level: str | None, folder: Path
) -> Worker:
    """Start a process that runs `body`.

    log_level: None is the environment's. folder: of the sockets; the worker removes it if this
    process is killed.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=run_worker,
        args=(name, theirs, body, time.monotonic(), log_level, folder),
        name=name,
        daemon=True,
    )
    # Starting the tracker unblocks SIGINT in this process, so start it before the block below.
    resource_tracker.ensure_running()
    # A terminal sends these to every process. A signal that is blocked here stays blocked in the
    # new process, until `run_worker` ignores it: it causes no traceback there and does not end it.
    from_terminal = {signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, from_terminal)
    try:
        with held(), main_module_hidden():  # a half-started child prints a traceback
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, from_terminal)
        theirs.close()  # so that the pipe ends when the worker does
    return Worker(name=name, process=process, status=ours)


@contextlib.contextmanager
def main_module_hidden() -> Iterator[None]:
    """Hide the program's main module, which a spawned process would import again.

    Our workers do not need it, and a script without `if __name__ == "__main__"` would run twice.
    """
    with _MAIN_MODULE:  # another thread would take the empty module for the program's
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
