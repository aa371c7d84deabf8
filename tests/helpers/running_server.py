"""A whole server, started as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row.

    They are below the ports that the system hands out, and depend on the process id, because tests
    run side by side.
    """
    for base in range(20000 + os.getpid() % 1000 * 10, 32000, 10):
        try:
            for port in range(base, base + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return base
    raise AssertionError("no free ports")


WAIT_S = 150  # the longest time that a test waits for a line of a server

# 1,024 tokens: less than the built-in model's context, so that the pool is a limit of its own.
POOL = ("--num-pages", "64", "--page-size", "16", "--max-prefill-length", "256")


class RunningServer:
    """``python -m minisgl`` as a child process.

    sockets: the folder of its sockets. Its name is short, whatever pytest's folders are called.
    """

    def __init__(self, *args: str, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="s-", ignore_cleanup_errors=True)
        self.sockets = Path(self._folder.name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": self._folder.name, "OMP_NUM_THREADS": "1", **env},
        )
        self.output = {"out": "", "err": ""}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: Any) -> None:
        for line in stream:
            self.output[name] += line

    def wait_for(self, pattern: str, where: str = "out", timeout_s: float = WAIT_S) -> str:
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.output[where])):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)
        return found[1]

    @property
    def url(self) -> str:
        return self.wait_for(r"Serving \S+ on (http://\S+)")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=150)

    def pid(self, worker: str) -> int:
        return int(self.wait_for(rf"the {worker} is ready after .* \(pid (\d+)\)", "err"))

    def wait_open(self, num: int) -> None:
        """Wait until `num` prompts are open."""
        deadline = time.monotonic() + WAIT_S
        while f"minisgl_requests_open {num}.0" not in httpx.get(f"{self.url}/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def family(self) -> list[psutil.Process]:
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """Return the worker processes that run, in the order of their start."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def ended(self, timeout_s: float = 60) -> int:
        """Wait until the process has ended and its output is read. Returns the exit code."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(60)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # SIGTERM would wait for open streams
            self.ended()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
        self._folder.cleanup()


def assert_nothing_left(server: RunningServer, family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert list(server.sockets.iterdir()) == []
    assert "Traceback" not in server.output["err"], server.output["err"]


@contextlib.contextmanager
def hangups(handler: signal.Handlers) -> Iterator[None]:
    """Set what a server that starts in this block does on SIGHUP."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
