"""Measures GPU times with CUDA events on the current stream."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from minisgl.errors import ConfigError

ROUNDS = 7
ROUND_S = 5e-3  # time of one run in a round; CUDA events resolve 0.5 us

Result = TypeVar("Result")


def need_gpu() -> None:
    """Raise ConfigError if torch finds no CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "this times a GPU, and torch finds no CUDA device here; "
            "`python -m minisgl_bench.studies` has kernels and cpu_formats, which time a CPU"
        )


def events_s(run: Callable[[], object], count: int = 1) -> float:
    """Run `count` times and wait. Returns the seconds of one run."""
    events: Any = torch.cuda  # whose events have no annotations
    start, end = events.Event(enable_timing=True), events.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def captured(run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
    """Capture `run` as a CUDA graph. Returns (replay, its result, which each replay overwrites)."""
    with torch.inference_mode():
        run()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
    graph.replay()
    return graph.replay, result


def interleaved_s(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each run. Rounds interleave the runs, so a drift affects all."""
    counts = {name: max(1, int(ROUND_S / events_s(run))) for name, run in runs.items()}
    rounds = [
        {name: events_s(run, counts[name]) for name, run in runs.items()} for _ in range(ROUNDS)
    ]
    return {name: statistics.median(times[name] for times in rounds) for name in runs}
