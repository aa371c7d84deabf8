"""The instruction sets of this machine's CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags by Linux. Empty if they are unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def slow_dtype_advice(dtype: Any) -> str | None:
    """Return a sentence if this CPU has no instructions for `dtype` (a torch dtype), else None."""
    flags = cpu_flags()
    native = {
        "torch.bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
        "torch.float16": {"amx_fp16", "avx512_fp16", "asimdhp"},
    }.get(str(dtype))
    if native is None or not flags or flags & native:
        return None
    short = str(dtype).removeprefix("torch.")
    return (
        f"this CPU has no {short} instructions: {short} halves the bytes of weights and KV "
        "cache, but long prompts compute slowly; --dtype float32 computes them faster"
    )
