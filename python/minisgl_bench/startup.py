"""Measures the time from the command to the first token over HTTP.

Each run starts a server as a user would, on a free port, and asks it for one token. The first run
may compile kernels, so it is reported alone.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from minisgl.errors import ConfigError
from minisgl.utils.start import describe_start
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.counters import scrape
from minisgl_bench.report import machine_load, write_json
from minisgl_gateway.http import http_client

TIMEOUT_S = 120.0


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--runs", type=natural, default=5, help="servers to start")
    add_json(parser)
    parser.add_argument("server", nargs="*", help="flags of the server, after --")
    args = parser.parse_args(argv)

    load = machine_load()
    runs = []
    for index in range(args.runs + 1):
        run = _start_once(args.server)
        label = "first (may compile)" if index == 0 else f"run {index}"
        print(
            f"{label}: ready {run['ready_s']:.2f} s ({describe_start(run['part_s'])}), "
            f"first token {run['first_token_s']:.2f} s"
        )
        runs.append(run)
    first, rest = runs[0], runs[1:]
    median = statistics.median(run["first_token_s"] for run in rest)
    print(f"command to first token over HTTP: median {median:.2f} s of {len(rest)} runs")
    if args.json:
        result = {"load_before": load, "first": first, "runs": rest}
        write_json(args.json, {**result, "median_first_token_s": median})


def _start_once(flags: list[str]) -> dict[str, Any]:
    """Return the seconds from the command until the server is ready (ready_s) and until its first
    token (first_token_s), and the server's own times of its start (part_s)."""
    start = time.perf_counter()
    with running_server("--log-level", "error", *flags) as (url, server):
        ready_s = time.perf_counter() - start
        first_token_s = first_token(url, start)
        parts = start_parts(url)
    assert server.returncode == 0, f"the server ended with exit code {server.returncode}"
    return {"ready_s": ready_s, "first_token_s": first_token_s, "part_s": parts}


@contextmanager
def running_server(
    *flags: str, environment: Mapping[str, str] | None = None, python: Sequence[str] = ()
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start `minisgl serve` on a free port. Yields its address and its process, which ends with the
    block: by SIGTERM, or else it is killed and subprocess.TimeoutExpired is raised.

    python: flags of the interpreter. Raises ConfigError if the server does not start.
    """
    command = [sys.executable, *python, "-m", "minisgl", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            url = wait_for_url(server)
            # A full pipe would block the server.
            threading.Thread(target=server.stdout.read, daemon=True).start()
            yield url, server
        finally:
            server.terminate()
            try:
                server.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                raise


def wait_for_url(server: subprocess.Popen[str]) -> str:
    """Wait until the server, whose stdout is a pipe, prints its URL, and return it.

    Raises ConfigError if the server ends instead; its stderr has the reason.
    """
    assert server.stdout is not None
    for line in server.stdout:
        if match := re.search(r"Serving .* on (http://\S+)", line):
            return match[1]
    raise ConfigError(f"the server ended with exit code {server.wait()} before it was ready")


def start_parts(url: str) -> dict[str, float]:
    """Return the seconds of each part of the server's start, as its /metrics has them."""
    found = re.compile(r'minisgl_start_seconds{part="(\w+)"}')
    samples = ((found.fullmatch(name), value) for name, value in scrape(url).items())
    return {match[1]: round(value, 3) for match, value in samples if match}


def first_token(url: str, start: float) -> float:
    """Return the seconds from `start`, on `time.perf_counter`, to the first token of a stream."""
    body = {"prompt": "Hello", "max_tokens": 1, "stream": True, "ignore_eos": True}
    with (
        http_client(url, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        response.raise_for_status()
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        seconds = time.perf_counter() - start
        assert list(lines)[-2:] == ["data: [DONE]", ""], "the stream has no proper end"
    return seconds
