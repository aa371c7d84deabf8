"""The kernels of GGUF's packed weights compile for GPUs that are not here, and fit a block of each.

Needs the CUDA toolkit's compiler, and no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from helpers.gpu_targets import TARGETS
from minisgl_kernels import CSRC
from minisgl_kernels.tiles import (
    EXPERTS,
    MANY,
    SHARED_BYTES,
    WARPS,
    few_config,
    macros,
)
from minisgl_zoo.gguf.tiles import TILE_FORMS

NVCC = shutil.which("nvcc")
CORES = 128
MOST_SPILLED = 100
"""Bytes of registers that a thread may write to memory."""


def compiled(name: str, numbers: tuple[tuple[str, int], ...], target: int, folder: Path) -> str:
    """Return what the compiler says about the kernel's registers."""
    files = ("hopper.cuh", "tile_numbers.cuh", "tiles.cuh", f"{name}.cu")
    source = folder / f"{name}.cu"
    source.write_text("".join((CSRC / file).read_text() for file in files))
    defines = ["-DBFLOAT16=1", *(f"-D{macro}={value}" for macro, value in numbers)]
    result = subprocess.run(
        [
            NVCC or "nvcc", "-std=c++17", "-cubin", f"-arch=sm_{target}", "-Xptxas", "-v", *defines,
            "-o", folder / "kernel.cubin", source,
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_fit(target: int, tmp_path: Path) -> None:
    assert TARGETS[target] * 1024 >= SHARED_BYTES
    for kind in ("Q4_K", "Q6_K"):
        form = TILE_FORMS[kind]
        kernels = [
            ("tiles_dense", macros(form, WARPS=WARPS)),
            ("tiles_lanes", macros(form, WARPS=WARPS)),
            ("tiles_few", macros(form, **few_config(1, None, CORES))),
            ("tiles_few", macros(form, "gelu_tanh", **few_config(1, "gelu_tanh", CORES))),
            ("tiles_few", macros(form, "silu", **EXPERTS)),
            ("tiles_few", macros(form, **EXPERTS)),
            ("tiles_many", macros(form, "silu", **MANY[0])),
            ("tiles_many", macros(form, **MANY[-1])),
        ]
        for name, numbers in kernels:
            said = compiled(name, numbers, target, tmp_path)
            assert sum(map(int, re.findall(r"(\d+) bytes spill stores", said))) <= MOST_SPILLED, (
                kind, name, numbers, said
            )  # fmt: skip
