"""The instruction sets of this machine's CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def cpu_flags() -> frozenset[str]:
    """Return the features that all cores have, by Linux's names. Empty if they are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    fields = (line.partition(":") for line in lines)
    found = [set(rest.split()) for key, _, rest in fields if key.strip() in ("flags", "Features")]
    return frozenset(set.intersection(*found)) if found else frozenset()


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
