"""Starts one worker process.

The body of a worker imports its code. So a failing import is reported like any other failure to
start, and this process never imports torch.
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
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Final

from minisgl import plugins
from minisgl.errors import WorkerDied
from minisgl.runtime.signals import held
from minisgl.utils.process import WorkerStatus, run_worker

_MAIN_MODULE: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process, and the pipe on which it reports its start and sends heartbeats."""

    name: str
    process: SpawnProcess
    status: Connection

    def death(self) -> WorkerDied:
        """Return the error that says how the worker ended. Call this when its sentinel is ready."""
        self.process.join(1.0)  # the exit code can come later than the sentinel
        return WorkerDied(self.name, self.process.exitcode)


def _with_rows(
    rows: tuple[plugins.Row, ...], body: Callable[[WorkerStatus], None], status: WorkerStatus
) -> None:
    plugins.adopt(rows)
    body(status)


def start_worker(
    name: str,
    body: Callable[[WorkerStatus], None],
    *,
    log_level: str | None,
    folder: Path,
    tells: bool = False,
) -> Worker:
    """Start a process that runs `body`.

    log_level: None for the environment's. folder: the folder of the sockets, which the worker
    removes if this process is killed. tells: it sends the log of its start on its pipe.
    """
    adopting = partial(_with_rows, plugins.installed(), body)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=run_worker,
        args=(name, theirs, adopting, time.monotonic(), log_level, folder, tells),
        name=name,
        daemon=True,
    )
    # The start of the tracker unblocks SIGINT in this process, so it must precede the blocking.
    resource_tracker.ensure_running()
    # A terminal sends these signals to every process. If they are blocked here, they are blocked in
    # the new process until `run_worker` ignores them. So they cannot end it with a traceback.
    from_terminal = {signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, from_terminal)
    try:
        with held(), main_module_hidden():  # an interrupted start would print a traceback
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, from_terminal)
        theirs.close()  # the pipe must end when the worker ends
    return Worker(name=name, process=process, status=ours)


@contextlib.contextmanager
def main_module_hidden() -> Iterator[None]:
    """Hide the program's main module, which a spawned process would import again.

    Workers do not need it, and a script without `if __name__ == "__main__"` would run again.
    """
    with _MAIN_MODULE:  # else a second thread would save the empty module as the program's
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
