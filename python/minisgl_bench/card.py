"""The rates and the memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.benchmark.perf import events_s
from minisgl.errors import ConfigError


def need_gpu() -> None:
    """Raise ConfigError if torch finds no CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "this times a GPU, and torch finds no CUDA device here; "
            "`python -m minisgl_bench.studies` has kernels and cpu_formats, which time a CPU"
        )


def card_memory() -> int:
    """Return the bytes of this GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def card_rates() -> dict[str, float]:
    """Measure copy bandwidth (read plus written) and a bf16 GEMM of 8,192 cubed on this GPU."""
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
