"""Time on the GPU's own clock: between two events on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def events_s(run: Callable[[], object], count: int = 1) -> float:
    """Seconds of one of `count` runs; waits for them."""
    events: Any = torch.cuda  # whose events have no annotations
    start, end = events.Event(enable_timing=True), events.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
