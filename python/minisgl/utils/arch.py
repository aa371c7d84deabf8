"""What this machine's processor can do."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def cpu_flags() -> frozenset[str]:
    """The feature flags that Linux reports; empty elsewhere, which reads as "unknown"."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def slow_dtype_advice(dtype: Any) -> str | None:
    """A sentence if this CPU computes slowly in `dtype` (a torch dtype), else None."""
    flags = cpu_flags()
    native = {
        "torch.bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
        "torch.float16": {"amx_fp16", "avx512_fp16", "asimdhp"},
    }.get(str(dtype))
    if native is None or not flags or flags & native:
        return None
    short = str(dtype).removeprefix("torch.")
    return (
        f"this CPU has no {short} instructions: {short} halves the memory of weights but computes "
        "slowly here; --dtype float32 is likely faster"
    )
