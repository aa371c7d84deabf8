"""Breaks a running server on purpose, and checks that every client gets an end.

    python scripts/chaos.py [--rounds N] [--seed S] [--tp N] [--no-restart] [--json FILE]

A round: clients ask, one thing breaks, and every client must have an end within the bound. Then the
server must be ready again (with `--restart`), or must have ended with code 1 and left nothing. What
breaks: a worker is killed, is stopped, or is stopped for a second; or a client does not read,
closes its sending half, or vanishes, which must not disturb the others. Round i of seed S is the
same in each run but for the machine's timing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

FAULTS: Final = ("kill", "stop", "pause", "unread", "half-close", "vanish")
HANG_S: Final = 6.0
"""With 3 s a pause of 1 s was once taken for a hang, on two cores under a load of 18."""
PAUSE_S: Final = 1.0
LATE_S: Final = 15.0
"""For a busy machine: heartbeat, check and answer."""
START_S: Final = 120.0
NUM_CLIENTS: Final = 6


class Server:
    """`minisgl serve` with the built-in model, its sockets in `folder`."""

    def __init__(self, folder: Path, *, tp: int, restart: bool) -> None:
        self.folder = folder
        flags = ["--port", "0", "--num-pages", "256", "--hang-timeout", str(HANG_S)]
        flags += ["--tp", str(tp), *(["--restart", "--max-restarts", "10000"] if restart else [])]
        self._log = folder.parent / f"{folder.name}.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout
        self.url = ""
        for line in self.process.stdout:
            if found := re.search(r"Serving \S+ on (http://\S+)", line):
                self.url = found[1]
                break
        if not self.url:
            raise RuntimeError(f"the server did not start: {self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def workers(self) -> dict[str, int]:
        """Process ids by name, of the last start."""
        return {
            name: int(pid)
            for name, pid in re.findall(r"the (\S+) is ready after .* \(pid (\d+)\)", self.log)
        }

    def is_idle(self) -> bool:
        """Whether it is ready, and no request or page is left."""
        try:
            if httpx.get(f"{self.url}/ready", timeout=5).status_code != 200:
                return False
            page = httpx.get(f"{self.url}/metrics", timeout=5).text
        except httpx.HTTPError:
            return False
        used = re.findall(r'minisgl_kv_pages\{.*state="used"\} (\S+)', page)
        return "minisgl_requests_open 0.0" in page and all(float(n) == 0 for n in used)

    def close(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


class Client(threading.Thread):
    """One request. end: how it ended; "" if it has not."""

    def __init__(self, url: str, number: int, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.end = ""
        self._url = url
        self._body: dict[str, Any] = {
            "prompt": [rng.randrange(200) for _ in range(rng.choice((3, 40, 300)))],
            "max_tokens": rng.choice((1, 50, 400)),
            "stream": number % 3 != 0,
            "ignore_eos": True,
        }

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=120
            ) as response:
                text = response.read().decode()
        except httpx.HTTPError as error:  # the server is gone
            self.end = f"connection: {type(error).__name__}"
            return
        code = re.search(r'"code":"(\w+)"', text)
        whole = "[DONE]" in text or '"usage":{' in text
        self.end = code[1] if code else "done" if whole else f"cut off: {text[-80:]!r}"


def bad_client(url: str, fault: str) -> None:
    """A request whose client misbehaves. Returns when it has left."""
    port = int(url.rpartition(":")[2])
    body = b'{"prompt": "a", "max_tokens": 400, "stream": true, "ignore_eos": true}'
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        if fault == "half-close":
            client.shutdown(socket.SHUT_WR)
        if fault == "unread":
            time.sleep(1)


@dataclass(slots=True, kw_only=True)
class Result:
    """Mutable. ends: of all clients, by kind. problems: what must not be."""

    seed: int
    tp: int
    restart: bool
    rounds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    slowest_end_s: float = 0.0
    problems: list[str] = field(default_factory=list)


def break_something(server: Server, fault: str, rng: random.Random) -> None:
    if fault in ("unread", "half-close", "vanish"):
        bad_client(server.url, fault)
        return
    name = rng.choice(sorted(server.workers()))
    pid = server.workers()[name]
    os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "pause":
        time.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)


def one_round(server: Server, number: int, fault: str, result: Result) -> None:
    rng = random.Random(result.seed * 100_003 + number)
    where = f"round {number} ({fault})"
    clients = [Client(server.url, index, rng) for index in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
        time.sleep(rng.random() * 0.05)
    time.sleep(rng.random() * 0.3)
    break_something(server, fault, rng)
    began = time.monotonic()
    for client in clients:
        client.join(max(began + HANG_S + LATE_S - time.monotonic(), 0.01))
    result.slowest_end_s = max(result.slowest_end_s, time.monotonic() - began)
    result.rounds[fault] += 1
    for client in clients:
        result.ends[client.end or "no end"] += 1
        if not client.end or client.end.startswith("cut off"):
            result.problems.append(f"{where}: a client's end: {client.end or 'none'}")
    is_broken = fault in ("kill", "stop")
    if not is_broken and (bad := {client.end for client in clients} - {"done", ""}):
        result.problems.append(f"{where}: others were disturbed: {sorted(bad)}")
    if is_broken and not result.restart:
        code = server.process.wait(30)
        if code != 1:
            result.problems.append(f"{where}: exit code {code}")
        return
    deadline = time.monotonic() + START_S
    while not server.is_idle():
        if time.monotonic() > deadline:
            result.problems.append(f"{where}: not ready and idle again")
            break
        time.sleep(0.05)


def leftovers(folder: Path, before: set[str], family: list[psutil.Process]) -> list[str]:
    _, alive = psutil.wait_procs(family, timeout=10)
    shared = set(os.listdir("/dev/shm")) - before if os.path.isdir("/dev/shm") else set()
    files = [path.name for path in folder.iterdir()]
    return [*(f"process {p.pid}" for p in alive), *files, *(f"/dev/shm/{n}" for n in shared)]


def run(num_rounds: int, seed: int, tp: int, restart: bool) -> Result:
    result = Result(seed=seed, tp=tp, restart=restart)
    order = random.Random(seed)
    server: Server | None = None
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        for number in range(num_rounds):
            if server is None:
                folder = Path(scratch) / str(number)
                folder.mkdir()
                server = Server(folder, tp=tp, restart=restart)
            fault = FAULTS[number % len(FAULTS)] if num_rounds < 12 else order.choice(FAULTS)
            own = psutil.Process(server.process.pid)
            family = own.children(recursive=True)
            one_round(server, number, fault, result)
            if server.process.poll() is not None or number == num_rounds - 1:
                if server.process.poll() is None and (code := server.close()) != 0:
                    result.problems.append(f"round {number}: exit code {code} after Ctrl-C")
                if left := leftovers(server.folder, before, family):
                    result.problems.append(f"round {number}: left behind: {left}")
                if "Traceback" in server.log:
                    result.problems.append(f"round {number}: a traceback in {server.log[-2000:]}")
                server = None
    return result


def as_json(result: Result) -> dict[str, Any]:
    return {each.name: getattr(result, each.name) for each in fields(result)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--no-restart", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    result = run(args.rounds, args.seed, args.tp, not args.no_restart)
    found = json.dumps(as_json(result), indent=1)
    print(found)
    if args.json:
        args.json.write_text(found + "\n")
    return int(bool(result.problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
