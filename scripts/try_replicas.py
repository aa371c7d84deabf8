"""Tries `minisgl route` over servers of the built-in model: cost, a killed server, an upgrade.

    python scripts/try_replicas.py [--replicas N] [--streams N] [--rounds N] [--json FILE]

1. cost: the same request to a server and through the router, in turns, whole and streamed.
2. kill: a server is killed with SIGKILL under streams. Every client must have an end, only streams
   of that server may fail, and those that had no token yet must not.
3. upgrade: each server in turn gets SIGTERM and is started again, under a steady load. No request
   may fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import openai

from minisgl_bench.report import write_json
from own_server import free_port

START_S: Final = 120.0
END_S: Final = 60.0
QUESTION: Final = "What is a radix cache?"


class Process:
    """`minisgl ARGS` on a port. Mutable: it can be ended and started again."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.port, self._args, self._folder = free_port(), args, folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        log = (self._folder / f"{self.port}.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", *self._args, "--port", str(self.port)],
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1"},
        )

    def wait_ready(self) -> None:
        """Wait until it is ready. Raises TimeoutError."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"{self._args} was not ready within {START_S:g} s; see {self._folder}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(END_S)


def cost(servers: list[Process], router: Process, rounds: int) -> dict[str, Any]:
    """Return medians in ms, for one request at a time."""
    times: dict[str, list[float]] = {}
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    with httpx.Client(trust_env=False, timeout=END_S) as client:
        for _ in range(rounds):
            for name, process in (("direct", servers[0]), ("routed", router)):
                path = f"{process.url}/v1/chat/completions"
                began = time.perf_counter()
                client.post(path, json=body).raise_for_status()
                times.setdefault(f"{name}_whole", []).append(time.perf_counter() - began)
                began = time.perf_counter()
                with client.stream("POST", path, json=body | {"stream": True}) as stream:
                    lines = stream.iter_lines()
                    next(lines)
                    times.setdefault(f"{name}_first", []).append(time.perf_counter() - began)
                    for _line in lines:
                        pass
                times.setdefault(f"{name}_stream", []).append(time.perf_counter() - began)
    return {name: round(statistics.median(each) * 1e3, 3) for name, each in times.items()}


class Clients:
    """Streams through the router, each in a thread. Mutable: it counts how they ended."""

    def __init__(self, router: Process) -> None:
        self._client = openai.OpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=END_S
        )
        self.ends: Counter[str] = Counter()
        self.errors: list[str] = []
        self.num_begun = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, num: int, max_tokens: int) -> None:
        for index in range(num):
            thread = threading.Thread(target=self.ask, args=(index, max_tokens))
            thread.start()
            self._threads.append(thread)

    def ask(self, index: int, max_tokens: int) -> None:
        num_chunks, end = 0, "whole"
        try:
            stream = self._client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": f"Count from {index} on."}],
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                num_chunks += bool(chunk.choices)
                if num_chunks == 1:
                    with self._lock:
                        self.num_begun += 1
        except openai.APIError as error:
            end = "error within" if num_chunks else "error before"
            self.errors.append(str(error))
        with self._lock:
            self.ends[end] += 1

    @contextlib.contextmanager
    def keep_asking(self, num: int, max_tokens: int) -> Iterator[None]:
        """Keep so many streams open. Each one that has begun ends before the block does."""
        ended = threading.Event()

        def ask_on(index: int) -> None:
            while not ended.is_set():
                self.ask(index, max_tokens)

        threads = [threading.Thread(target=ask_on, args=(index,)) for index in range(num)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join(END_S)

    def join(self) -> int:
        """Return the number of streams that have no end in time."""
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return sum(thread.is_alive() for thread in self._threads)


def kill(servers: list[Process], router: Process, num_streams: int) -> dict[str, Any]:
    clients = Clients(router)
    clients.start(num_streams, 400)
    while clients.num_begun < num_streams // 2:
        time.sleep(0.01)
    victim = servers[0]
    names = _open_at(router, victim)
    victim.process.kill()
    victim.process.wait()
    began = time.monotonic()
    num_hanging = clients.join()
    victim.start()
    victim.wait_ready()
    while httpx.get(f"{router.url}/health", trust_env=False).json()["up"] < len(servers):
        time.sleep(0.05)
    return {
        "streams": num_streams,
        "at_the_victim": names,
        "without_an_end": num_hanging,
        "ends": dict(clients.ends),
        "errors": sorted(set(clients.errors))[:3],
        "whole_again_s": round(time.monotonic() - began, 1),
    }


def _open_at(router: Process, server: Process) -> int:
    page = httpx.get(f"{router.url}/metrics", trust_env=False, timeout=END_S).text
    name = f'minisgl_replica_requests_open{{replica="127.0.0.1:{server.port}"}} '
    return int(float(page.partition(name)[2].split()[0]))


def upgrade(servers: list[Process], router: Process, num_clients: int = 4) -> dict[str, Any]:
    clients = Clients(router)
    with clients.keep_asking(num_clients, max_tokens=40):
        for server in servers:
            time.sleep(2)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(END_S)
            server.start()
            server.wait_ready()
        time.sleep(2)
    return {"ends": dict(clients.ends), "errors": sorted(set(clients.errors))[:3]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=2, help="servers")
    parser.add_argument(
        "--streams", type=int, default=32, help="streams that are open when a server is killed"
    )
    parser.add_argument("--rounds", type=int, default=50, help="rounds, to measure the cost")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ("serve", "--served-model-name", "m", "--num-pages", "2048")
        servers = [Process(folder, *flags) for _ in range(args.replicas)]
        urls = [word for server in servers for word in ("--replica", server.url)]
        router = Process(folder, "route", *urls)
        try:
            for process in (*servers, router):
                process.wait_ready()
            result = {
                "replicas": args.replicas,
                "cost_ms": cost(servers, router, args.rounds),
                "kill": kill(servers, router, args.streams),
                "upgrade": upgrade(servers, router),
            }
        finally:
            for process in (router, *servers):
                process.end()
    print(json.dumps(result, indent=1))
    if args.json:
        write_json(args.json, result)
    killed, ends = result["kill"], Counter(result["kill"]["ends"])
    failures = ends["error before"] + ends["error within"]
    is_good = not killed["without_an_end"] and not ends["error before"]
    is_good = is_good and failures <= killed["at_the_victim"]
    return int(not (is_good and set(result["upgrade"]["ends"]) == {"whole"}))


if __name__ == "__main__":
    sys.exit(main())
