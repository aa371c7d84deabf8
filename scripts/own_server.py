"""A server that a script of this folder starts and breaks: its process, port and small disk."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import httpx
import psutil

from minisgl.errors import ConfigError
from minisgl_bench.startup import wait_for_url

START_S: Final = 120.0
DISK: Final = "size=256k,nr_inodes=64"


class Server:
    """`minisgl serve` with the built-in model, its sockets in `folder`.

    family: its processes of all starts.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        """Raises RuntimeError if it does not start."""
        self.folder = folder
        self.family: set[psutil.Process] = set()
        self._log = folder.parent / f"{folder.name}.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        )
        try:
            self.url = wait_for_url(self.process)
        except ConfigError as error:
            raise RuntimeError(f"{error}: {self.log}") from None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def upgrade(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Upgrade it. stdout has all that the command says."""
        return subprocess.run(
            [sys.executable, "-m", "minisgl", "upgrade", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )

    def workers(self) -> dict[str, int]:
        """Return the process ids of the last start, by name."""
        return {
            name: int(pid)
            for name, pid in re.findall(r"the (\S+) is ready after .* \(pid (\d+)\)", self.log)
        }

    @property
    def num_starts(self) -> int:
        """The number of times that the workers were started again."""
        return self.log.count("started again after")

    def is_idle(self) -> bool:
        """Return whether it is ready, and no request or page is left."""
        try:
            if httpx.get(f"{self.url}/ready", timeout=5).status_code != 200:
                return False
            page = httpx.get(f"{self.url}/metrics", timeout=5).text
        except httpx.HTTPError:
            return False
        used = re.findall(r'minisgl_kv_pages\{.*state="used"\} (\S+)', page)
        return "minisgl_requests_open 0.0" in page and all(float(n) == 0 for n in used)

    def note_family(self) -> None:
        """Add the processes of this moment to `family`."""
        own = psutil.Process(self.process.pid)
        self.family.update([own, *own.children(recursive=True)])

    def close(self) -> int:
        """Stop it as Ctrl-C does. Returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system on `folder`. Yields False, and prints a line, if that is
    forbidden."""
    command = ["mount", "-t", "tmpfs", "-o", DISK, "chaos", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        failure = done.stderr if done.returncode else ""
    except OSError as error:
        failure = str(error)
    if failure:
        print(f"no disk will be full: {failure.strip()}", file=sys.stderr)
    try:
        yield not failure
    finally:
        if not failure:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Use up the bytes and the files of the small disk on `folder`."""
    made: list[Path] = []
    try:
        while True:
            made.append(folder / f"full-{len(made)}")
            with made[-1].open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
    except OSError:
        pass
    try:
        yield
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def wait_until(holds: Callable[[], bool]) -> bool:
    """Wait until the condition holds, `START_S` at most. Returns whether it holds."""
    deadline = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def leftovers(server: Server, before: set[str]) -> list[str]:
    """Return the processes, files and shared memory that a server that has ended left behind.

    before: the shared memory before its start.
    """
    _, alive = psutil.wait_procs(list(server.family), timeout=10)
    shared = shared_memory() - before
    deadline = time.monotonic() + 10
    while shared and time.monotonic() < deadline:  # other programs of this machine make some, too
        time.sleep(0.1)
        shared &= shared_memory()
    files = [path.name for path in server.folder.iterdir()]
    return [*(f"process {p.pid}" for p in alive), *files, *(f"/dev/shm/{n}" for n in shared)]


def shared_memory() -> set[str]:
    """Return the names in /dev/shm that no process has mapped; mapped ones may be other
    programs'."""
    names = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    for process in Path("/proc").glob("[0-9]*"):
        if not names:
            break
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            names -= {name for name in names if f"/dev/shm/{name}" in maps}
    return names
