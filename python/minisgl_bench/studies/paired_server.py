"""`benchmarks paired` through HTTP: the server of a checkout, asked by this checkout's client."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from minisgl.benchmark.client import Target
from minisgl_bench.counters import describe_server
from minisgl_bench.lengths import Workload
from minisgl_bench.shards import run_whole
from minisgl_bench.startup import running_server
from minisgl_bench.workload import at_once
from minisgl_gateway.http import http_client


class ServerWorker:
    """A `paired.Worker` over HTTP. For a workload it reports latencies instead of ids."""

    def __init__(self, process: subprocess.Popen[str], url: str, num_clients: int) -> None:
        self._process, self._num_clients = psutil.Process(process.pid), num_clients
        self._target = Target(url=url, model=describe_server(url)["model"])

    def run(self, work: Workload, prompts: list[list[int]]) -> dict[str, Any]:
        """Run the workload. Returns {"wall_s", "cpu_s", "latencies"}: seconds from the first
        request to the end of the last stream, CPU seconds of the server's processes, milliseconds
        of TTFT and ITL."""
        sessions = at_once(prompts, [output for _, output in work.requests])
        target = replace(self._target, extra={"temperature": work.temperature})
        before = family_cpu_s(self._process)
        summary, _ = run_whole(target, sessions, self._num_clients)
        cpu_s = family_cpu_s(self._process) - before
        latencies = {
            f"{name}_{part}": value
            for name in ("ttft", "itl")
            for part, value in summary[f"{name}_ms"].items()
            if part in ("p50", "p99", "max")
        }
        return {"wall_s": summary["duration_s"], "cpu_s": cpu_s, "latencies": latencies}

    def answers(self, work: Workload, prompts: list[list[int]]) -> list[str]:
        """Return the text of each answer."""
        with http_client(self._target.url, timeout=600.0) as client:
            return [
                client.post(
                    self._target.endpoint,
                    json={
                        "model": self._target.model,
                        "prompt": ids,
                        "max_tokens": output,
                        "ignore_eos": True,
                        "temperature": work.temperature,
                    },
                )
                .raise_for_status()
                .json()["choices"][0]["text"]
                for ids, (_, output) in zip(prompts, work.requests, strict=True)
            ]


def family_cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of all its descendants that live."""
    family = [process, *process.children(recursive=True)]
    return float(sum(sum(each.cpu_times()[:2]) for each in family))


@contextmanager
def server_worker(
    environment: Mapping[str, str], folder: Path, flags: Sequence[str], num_clients: int
) -> Iterator[ServerWorker]:
    """Start the server of the checkout that PYTHONPATH names. Raises ConfigError if it ends."""
    # -P: the folder where this runs must not hide the checkout's package.
    flags = ("--model", str(folder), *flags)
    with running_server(*flags, environment=environment, python=("-P",)) as (url, process):
        yield ServerWorker(process, url, num_clients)
