"""The instruction sets of this machine's CPU.

`MINISGL_CPU_ISA` names a set that the C++ kernels are limited to, so that a machine with AVX-512
can run, and be tested, as one without it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from minisgl import env
from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    """flags: for the compiler. needs: the features that /proc/cpuinfo must name."""

    flags: Sequence[str]
    needs: frozenset[str]


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni", "avx512vbmi"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi")
SETS: Final[Mapping[str, Mapping[str, InstructionSet]]] = {
    "x86_64": {
        "avx512bf16": InstructionSet(
            flags=(*_VNNI_FLAGS, "-mavx512bf16"), needs=_VNNI | {"avx512_bf16"}
        ),
        "avx512vnni": InstructionSet(flags=_VNNI_FLAGS, needs=_VNNI),
        "avx512": InstructionSet(flags=("-march=x86-64-v4",), needs=_V4),
        "avxvnni": InstructionSet(
            flags=("-march=x86-64-v3", "-mavxvnni"), needs=_V3 | {"avx_vnni"}
        ),
        "avx2": InstructionSet(flags=("-march=x86-64-v3",), needs=_V3),
        "sse2": InstructionSet(flags=("-march=x86-64",), needs=frozenset()),
    },
    "aarch64": {
        "neon-bf16": InstructionSet(
            flags=("-march=armv8.2-a+bf16",), needs=frozenset({"asimd", "bf16"})
        ),
        "neon": InstructionSet(flags=("-march=armv8-a",), needs=frozenset()),
    },
}
"""Machine -> its instruction sets, the best first."""


def instruction_sets() -> Mapping[str, InstructionSet]:
    """Return the instruction sets of this kind of machine, the best first."""
    return SETS.get(platform.machine(), {})


def cpu_limit() -> InstructionSet | None:
    """Return the set that MINISGL_CPU_ISA names, or None if it names none.

    Raises ConfigError if the CPU lacks it.
    """
    name = env.cpu_isa()
    if not name:
        return None
    limit = instruction_sets().get(name)
    if limit is None or limit.needs - _all_cpu_flags():
        able = [n for n, each in instruction_sets().items() if each.needs <= _all_cpu_flags()]
        raise ConfigError(
            f"MINISGL_CPU_ISA={name}: this CPU does not have it; it has {', '.join(able)}"
        )
    return limit


def cpu_flags() -> frozenset[str]:
    """Return the features that all cores have, by Linux's names. Empty if they are unknown.

    Those that only sets beyond MINISGL_CPU_ISA need are left out.
    """
    limit = cpu_limit()
    if limit is None:
        return _all_cpu_flags()
    named = frozenset[str]().union(*(each.needs for each in instruction_sets().values()))
    return _all_cpu_flags() - (named - limit.needs)


@cache
def _all_cpu_flags() -> frozenset[str]:
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
