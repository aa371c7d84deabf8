"""GEMMs of many rows on fp8 tensor cores: fp8 weights by activations that are quantised to fp8.

Each 128 numbers of a row of activations get a scale from their absolute maximum, as in DeepSeek-V3
(2024, section 3.3.2). If the weights have a scale for each row, each row of activations gets one.
cuBLAS multiplies; it supports such scales on Hopper since CUDA 12.9.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.sizes import power_of_2
from minisgl.kernel.triton.launch import Launcher, begin
from minisgl.kernel.triton.packed import Packed

BLOCK = 128
ROWS = 16
"""Rows are padded to a multiple of this, because cuBLAS needs the scales of a column of blocks
aligned."""
MOST = 448.0


def takes(weight: Packed, dtype: torch.dtype) -> bool:
    """Return whether cuBLAS multiplies by these weights on this GPU. This runs a GEMM to find
    out."""
    if weight.kind != "fp8" or dtype != torch.bfloat16 or len(weight.shape) != 2:
        return False
    outputs, inputs = weight.shape
    is_blocks = (weight.rows, weight.group) == (BLOCK, BLOCK) and weight.outer is None
    if not (is_blocks or (weight.group == 0 and weight.outer is not None)):
        return False
    if inputs % BLOCK or outputs % BLOCK or torch.cuda.get_device_capability() < (9, 0):
        return False
    try:
        linear(torch.zeros(ROWS, inputs, dtype=dtype, device=weight.numbers.device), weight, None)
    except (RuntimeError, ValueError):
        return False
    return True


def linear(x_MD: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, with x rounded to fp8. Requires `takes`."""
    numbers, scale_gM = quantise(x_MD, BLOCK if weight.group else x_MD.shape[1])
    if weight.group:
        assert weight.scale is not None
        scale_b = weight.scale.t()
    else:
        assert weight.outer is not None
        scale_b = weight.outer[None, :]
        scale_gM = scale_gM.view(1, -1)
    out: Tensor = torch._scaled_mm(
        numbers, weight.numbers.t(), scale_gM.t(), scale_b, out_dtype=x_MD.dtype
    )[: len(x_MD)]
    return out if bias is None else out + bias


def quantise(x_MD: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return (fp8 numbers [M', D], float32 scales [D / block, M']), contiguous, where M' is M
    rounded up to a multiple of `ROWS`. Padding is 0."""
    rows, inputs = x_MD.shape
    padded = -(-rows // ROWS) * ROWS
    numbers = torch.empty((padded, inputs), dtype=torch.float8_e4m3fn, device=x_MD.device)
    scales = torch.empty((inputs // block, padded), dtype=torch.float32, device=x_MD.device)
    height = max(4096 // power_of_2(block), 1)
    _launch_quantise(
        (-(-padded // height), inputs // block, 1), (x_MD, numbers, scales, rows, padded),
        (inputs, block, power_of_2(block), height), dtype=x_MD.dtype,
        num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip
    return numbers, scales


@triton.jit(do_not_specialize=["M", "PADDED"])
def _quantise(
    x_ptr, numbers_ptr, scale_ptr, M, PADDED, D: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, HEIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    g = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    at = m.to(tl.int64)[:, None] * D + g * GROUP + i[None, :]
    begin(PDL)
    mask = (m[:, None] < M) & (i[None, :] < GROUP)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), 1)
    scale = tl.where(most > 0, most / 448.0, 1.0)
    numbers = tl.clamp(x / scale[:, None], -448.0, 448.0).to(tl.float8e4nv)
    tl.store(numbers_ptr + at, numbers, mask=(m[:, None] < PADDED) & (i[None, :] < GROUP))
    tl.store(scale_ptr + g * PADDED + m, scale, mask=m < PADDED)


_launch_quantise = Launcher(_quantise)
