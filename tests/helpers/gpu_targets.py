"""Compiles Triton kernels without a GPU, for several compute capabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TARGETS = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability, times ten, and KiB of shared memory that a block may have (CUDA C++
Programming Guide, technical specifications): A100, RTX 4090 and L4, H100, B200, RTX 5090."""


def shared_bytes_of(script: str, target: int, folder: Path) -> dict[str, int]:
    """Run a script for a target without a GPU, in a process of its own, with caches in `folder`.
    Returns its last line, JSON: the shared memory of each kernel, which must fit the target."""
    caches = {"TRITON_CACHE_DIR": str(folder / "t"), "MINISGL_CACHE_DIR": str(folder / "m")}
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, script, str(target)],
        env={**os.environ, **caches, **no_gpu, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    shared_bytes: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    assert max(shared_bytes.values()) <= TARGETS[target] * 1024, shared_bytes
    return shared_bytes


def type_of(arg: object) -> str:
    """Return the type of a kernel's argument as Triton writes it."""
    if isinstance(arg, torch.Tensor):
        if arg.dtype == torch.float8_e4m3fn:
            return "*fp8e4nv"
        width = arg.dtype.itemsize * 8
        kind = {torch.bfloat16: "bf", torch.bool: "i", torch.uint8: "u"}.get(arg.dtype)
        kind = kind or ("fp" if arg.dtype.is_floating_point else "i")
        return f"*{kind}{1 if arg.dtype == torch.bool else width}"
    return "fp32" if isinstance(arg, float) else "i32"


def compiled_bytes(
    kernel: Any,
    target: int,
    types: Sequence[str],
    constants: Sequence[object],
    num_warps: int,
    num_stages: int,
) -> int:
    """Compile a kernel for a compute capability, times ten. Returns the bytes of shared memory that
    a block takes.

    types: of its arguments. constants: its compile-time arguments, which follow. Pointers are
    multiples of 16 bytes, unless the kernel says otherwise.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    unaligned = kernel.do_not_specialize_on_alignment or ()
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, (*types, *["constexpr"] * len(constants)), strict=True)),
        constexprs={(len(types) + i,): value for i, value in enumerate(constants)},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, (name, kind) in enumerate(zip(names, types, strict=False))
            if kind.startswith("*") and name not in unaligned
        },
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    size: int = binary.metadata.shared
    return size
