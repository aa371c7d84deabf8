"""The cost of watching: CPU seconds of a server per token, with and without an X-ray reader.

Two servers of the built-in model run at the same time, each kept busy by 64 streams, so that other
load on the machine meets both. In a window one of them has a headless reader of `/xray/events`, in
the next the other. A window's cost is the CPU time of all of a server's processes, divided by the
tokens that `/metrics` counts. A pair's ratio is the geometric mean of its two windows'
watched / alone; the result is that of all pairs, with a bootstrap confidence interval of 95 %.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil

from minisgl.errors import EngineError
from minisgl_bench.arguments import above_zero, add_json, benchmark_parser, natural
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.startup import running_server
from minisgl_bench.studies.paired import interval
from minisgl_bench.studies.paired_server import family_cpu_s

SETTLE_S = 4.5
"""The pause between windows, within which the lease of a reader that has left ends."""
ANSWER_TOKENS = 400


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--streams", type=natural, default=64, help="concurrent requests of each server")
    add("--pairs", type=natural, default=10, help="pairs of windows")
    add("--window-s", type=above_zero, default=8.0, help="length of a window")
    add_json(parser)
    args = parser.parse_args(argv)
    load = machine_load()
    with ExitStack() as stack:
        env = os.environ | {
            "OMP_NUM_THREADS": "1"
        }  # several threads would spin while they wait for each other
        servers = list[Server]()
        for _ in range(2):
            url, process = stack.enter_context(running_server(environment=env))
            servers.append((url, psutil.Process(process.pid)))
            stack.enter_context(streams(url, args.streams))
        time.sleep(SETTLE_S)
        pairs = []
        for number in range(args.pairs):
            windows = []
            for watched in range(2):
                windows.append(measure(servers, watched, args.window_s))
                time.sleep(SETTLE_S)
            pairs.append(windows)
            print(f"{number + 1:>3}  {_ratio(windows):.4f}", flush=True)
    mean, low, high = interval([_ratio(windows) for windows in pairs])
    print(f"watched / alone: {mean:.4f} [{low:.4f}, {high:.4f}] of the CPU seconds per token")
    result = {
        "kind": "xray_cost",
        "load_before": load,
        "streams": args.streams,
        "window_s": args.window_s,
        "ratio": {"low": round(low, 4), "mean": round(mean, 4), "high": round(high, 4)},
        "pairs": pairs,
    }
    if args.json:
        write_json(args.json, result)
    return 0


Server = tuple[str, psutil.Process]
"""A server's address and its process."""


@contextmanager
def streams(url: str, count: int) -> Iterator[None]:
    """Keep `count` streamed answers open, from a process of its own."""
    code = f"from {__name__} import keep_asking; keep_asking({url!r}, {count})"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            yield
        finally:
            child.kill()


def keep_asking(url: str, count: int) -> None:
    """Read `count` answers at a time, without end."""

    def ask(number: int) -> None:
        body = {
            "model": "any",
            "prompt": [10 + number] * 32,
            "max_tokens": ANSWER_TOKENS + number,  # so that they do not end together
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.Client(timeout=None, trust_env=False) as http:
            model = http.get(f"{url}/v1/models").json()["data"][0]["id"]
            while True:
                with http.stream("POST", f"{url}/v1/completions", json=body | {"model": model}) as (
                    answer
                ):
                    answer.raise_for_status()
                    for _ in answer.iter_raw():
                        pass

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(servers: Sequence[Server], watched: int, window_s: float) -> dict[str, Any]:
    """Return CPU seconds and tokens of both servers, and the frames of the watched one."""
    left = threading.Event()
    frames = [0]
    reader = threading.Thread(target=_read, args=(servers[watched][0], left, frames))
    reader.start()
    time.sleep(1.0)
    before, num_frames = [_spent(server) for server in servers], frames[0]
    time.sleep(window_s)
    after, num_frames = [_spent(server) for server in servers], frames[0] - num_frames
    left.set()
    reader.join()
    costs = [
        {"cpu_s": round(end[0] - begin[0], 3), "tokens": end[1] - begin[1]}
        for begin, end in zip(before, after, strict=True)
    ]
    return {"watched": costs[watched], "alone": costs[1 - watched], "frames": num_frames}


def _spent(server: Server) -> tuple[float, int]:
    return family_cpu_s(server[1]), _tokens(server[0])


def _read(url: str, left: threading.Event, frames: list[int]) -> None:
    with httpx.stream("GET", f"{url}/xray/events", timeout=30, trust_env=False) as events:
        for line in events.iter_lines():
            frames[0] += line.startswith("data: ") and bool(json.loads(line[6:]))
            if left.is_set():
                return


def _tokens(url: str) -> int:
    """Return the number of pieces of text that the API process has got, each of which is a token
    here. The engine's own count is up to a second old."""
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    found = re.findall(
        r"^minisgl_(?:inter_token|time_to_first_token)_seconds_count (\S+)$", page, re.M
    )
    if len(found) != 2:
        raise EngineError("the server's /metrics has no counts of tokens")
    return int(sum(map(float, found)))


def _ratio(windows: Sequence[dict[str, Any]]) -> float:
    logs = []
    for window in windows:
        watched, alone = window["watched"], window["alone"]
        ratio = watched["cpu_s"] / watched["tokens"] / (alone["cpu_s"] / alone["tokens"])
        logs.append(math.log(ratio))
    return math.exp(sum(logs) / len(logs))
