"""What the host knows of our products on Hopper alike (`csrc/cuda/hopper.cuh`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from minisgl.kernel.jit import CSRC, load_cubin

INPUTS = 64  # of a turn, and of a box of the bulk copy engine
SHARED_BYTES = 227 << 10  # that a block can have
TYPES = (torch.bfloat16, torch.float16)


def multiply_source(columns: int, dtype: torch.dtype) -> str:
    """`multiply`, the matrix instruction for so many columns, an operand for each of its sums."""
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    count = columns // 2
    names = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return (
        f"__device__ void multiply(float (&sums)[{count}], unsigned long long a,"
        " unsigned long long b) {\n"
        '  asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0;\\n"\n'
        f'      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} "\n'
        f'      "{{{names}}}, %{count}, %{count + 1}, add, 1, 1, 0, 0; }}"\n'
        f'      : {operands} : "l"(a), "l"(b));\n}}\n'
    )


def load_product(
    name: str, dtype: torch.dtype, columns: Iterable[int], numbers: Mapping[str, int]
) -> bytes:
    """The cubin of `csrc/cuda/NAME.cu` with matrix instructions of so many columns.

    Raises JitUnavailable.
    """
    defines = [f"{key}={int(value)}" for key, value in numbers.items()]
    defines.append(f"BFLOAT16={int(dtype == torch.bfloat16)}")
    common = (CSRC / "cuda" / "hopper.cuh").read_text()
    before = common + "".join(multiply_source(n, dtype) for n in columns)
    return load_cubin(name, "sm_90a", defines, before)
