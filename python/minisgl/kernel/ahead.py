"""C++ kernels inside a wheel, which are compiled ahead for common instruction sets.

`python -m minisgl.kernel.build --ahead` writes them to FOLDER, and a wheel that is built after that
contains them, so an installation needs no compiler. A file's name has its instruction set and the
hash of the sources, so a file of other sources is never loaded. The first file in the order of
`instruction_sets` that the processor can run is loaded. If there is none, the kernels are compiled
at the first start.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

from minisgl.utils.arch import cpu_flags, instruction_sets

FOLDER: Final = Path(__file__).parent / "prebuilt"


def path(name: str, sources: str) -> Path:
    """Return the file of the kernels for an instruction set. sources: the hash of the sources."""
    return FOLDER / f"minisgl_cpu-{platform.machine()}-{name}-{sources}.so"


def library(sources: str) -> Path | None:
    """Return the best file that this processor can run, or None. sources: see `path`."""
    if not FOLDER.is_dir():
        return None
    for name, each in instruction_sets().items():
        if each.needs <= cpu_flags() and (found := path(name, sources)).is_file():
            return found
    return None
