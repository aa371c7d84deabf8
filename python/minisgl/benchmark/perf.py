"""Measures GPU times with CUDA events on the current stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


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
