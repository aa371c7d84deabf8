"""Time on the GPU's own clock: between two events on torch's current stream; a card's rates."""

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


def card_rates() -> dict[str, float]:
    """Measured here and now: copy bandwidth (read plus written) and bf16 products of 8,192."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)

    def rate(amount: float, run: Callable[[], object]) -> float:
        events_s(run, 3)
        return amount / events_s(run, 10) / 1e12

    return {
        "copy_tb_s": round(rate(2 * source.nbytes, lambda: target.copy_(source)), 2),
        "gemm_tflop_s": round(rate(2 * 8192**3, lambda: a @ b)),
    }
