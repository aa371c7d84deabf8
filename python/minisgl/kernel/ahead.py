"""C++ kernels inside a wheel, which are compiled ahead for common instruction sets.

`python -m minisgl.kernel.build --ahead` writes them to FOLDER, and a wheel that is built after that
contains them, so an installation needs no compiler. A file's name has its instruction set and the
hash of the sources, so a file of other sources is never loaded. The first file in the order of
`SETS` that the processor can run is loaded. If there is none, the kernels are compiled at the first
start.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minisgl.utils.arch import cpu_flags

FOLDER: Final = Path(__file__).parent / "prebuilt"


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


def flags_of_sets() -> dict[str, Sequence[str]]:
    """Return the compiler's flags by instruction set, for this kind of machine."""
    return {name: each.flags for name, each in SETS.get(platform.machine(), {}).items()}


def path(name: str, sources: str) -> Path:
    """Return the file of the kernels for an instruction set. sources: the hash of the sources."""
    return FOLDER / f"minisgl_cpu-{platform.machine()}-{name}-{sources}.so"


def library(sources: str) -> Path | None:
    """Return the best file that this processor can run, or None. sources: see `path`."""
    if not FOLDER.is_dir():
        return None
    for name, each in SETS.get(platform.machine(), {}).items():
        if each.needs <= cpu_flags() and (found := path(name, sources)).is_file():
            return found
    return None
