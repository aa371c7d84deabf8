"""The HTTP part of `cpu_formats`: streams of a server beside `LLM`, alone and with a neighbour.

The server has the processes and flags of a user's, and random weights. The neighbour is one process
that computes without a pause.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.benchmark.client import Target
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.shards import run_whole
from minisgl_bench.startup import running_server
from minisgl_bench.workload import at_once

PROMPT: Final = 8  # tokens


class Served:
    """Asks one server for streams."""

    def __init__(self, url: str, vocab_size: int, output: int) -> None:
        """output: the tokens of each stream."""
        self._target = Target(url=url, api="generate", extra={"temperature": 0.0})
        self._vocab_size, self._output = vocab_size, output
        self._rng = np.random.default_rng(0)

    def run(self, streams: int) -> dict[str, Any]:
        """Run the streams all at once. Returns the seconds, and p50 and p99 of the ITL in ms."""
        ids = self._rng.integers(1, self._vocab_size, (streams, PROMPT), dtype=np.int32)
        sessions = at_once(ids, [self._output] * len(ids))
        summary, _ = run_whole(self._target, sessions, processes=1)
        itl = summary["itl_ms"]
        return {"seconds": summary["duration_s"], "itl_p50": itl["p50"], "itl_p99": itl["p99"]}


@contextmanager
def served(folder: Path, values: dict[str, Any], output: int) -> Iterator[Served]:
    write_checkpoint(folder, values, weights=False)
    flags = ("--model", str(folder), "--dummy-weight", "--device", "cpu", "--num-pages", "512")
    with running_server(*flags) as (url, _):
        yield Served(url, values["vocab_size"], output)


@contextmanager
def neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
