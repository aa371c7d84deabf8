"""Runs a server as a child process, for `minisgl serve --dp` and for Ray.

It listens on a port that the system chooses. Signals of a terminal do not reach it; its parent ends
it, and it ends when its parent has ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait

from minisgl.errors import StartupFailed
from minisgl.runtime.worker import main_module_hidden
from minisgl.server.args import ServerArgs
from minisgl.utils.process import wait_for_parents_end


class ServerProcess:
    """A server that starts, serves and ends. Mutable: `url` is set once it is ready."""

    def __init__(self, name: str, args: ServerArgs, env: Mapping[str, str] | None = None) -> None:
        """Start the server. env: environment variables, in addition to those of this process."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self.name, self.url = name, ""
        self._is_asked_to_end = False
        self._process = context.Process(target=_serve, args=(args, dict(env or {}), theirs))
        with main_module_hidden():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        return self._process.sentinel

    @property
    def is_alive(self) -> bool:
        return not wait([self.sentinel], 0)

    def wait_ready(self) -> str:
        """Return the URL once the server is ready. Raises StartupFailed."""
        try:
            self.url = str(self._pipe.recv())
        except EOFError:
            self._process.join()
            raise StartupFailed(
                f"{self.name} could not start (exit code {self._process.exitcode}); the log above "
                "says why"
            ) from None
        return self.url

    def terminate(self) -> None:
        """Ask the server to end. It first lets open requests finish, for `--drain-timeout`."""
        if not self._is_asked_to_end:  # a second signal would end it at once
            self._is_asked_to_end = True
            self._process.terminate()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait for the server's end. After `timeout_s` kill it, which ends its workers too."""
        if not wait([self.sentinel], timeout_s):
            self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(args: ServerArgs, env: Mapping[str, str], pipe: Connection) -> None:
    os.setpgrp()  # Ctrl-C and a closed terminal go to the parent's group
    os.environ.update(env)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    from minisgl.server.launch import launch_server

    raise SystemExit(launch_server(args, on_url=pipe.send))


def _end_with_parent() -> None:
    wait_for_parents_end()
    os.kill(os.getpid(), signal.SIGTERM)
