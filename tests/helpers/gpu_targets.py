"""The compute capabilities for which our Triton kernels are compiled, and types as Triton writes
them."""

from __future__ import annotations

import torch

TARGETS = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability, times ten, and KiB of shared memory that a block may have (CUDA C++
Programming Guide, technical specifications): A100, RTX 4090 and L4, H100, B200, RTX 5090."""


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
