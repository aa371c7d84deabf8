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

from minisgl.kernel.triton.elementwise import activate, normed, warps_of
from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl_zoo.weights.quantised import Packed

BLOCK = 128
ROWS = 16
"""Rows are padded to a multiple of this, because cuBLAS needs the scales of a column of blocks
aligned."""
GATE_SIZE = 1024
"""Elements of a program."""


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
    out = multiply(numbers, scale_gM, weight, x_MD.dtype)[: len(x_MD)]
    return out if bias is None else out + bias


def multiply(numbers: Tensor, scale_gM: Tensor, weight: Packed, dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T of quantised activations, padding included, by cuBLAS."""
    if weight.group:
        assert weight.scale is not None
        scale_b = weight.scale.t()
    else:
        assert weight.outer is not None
        scale_b = weight.outer[None, :]
        scale_gM = scale_gM.view(1, -1)
    out: Tensor = torch._scaled_mm(
        numbers, weight.numbers.t(), scale_gM.t(), scale_b, out_dtype=dtype
    )
    return out


def quantise(x_MD: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return (fp8 numbers [M', D], float32 scales [D / block, M']), contiguous, where M' is M
    rounded up to a multiple of `ROWS`. Padding is 0."""
    rows, inputs = x_MD.shape
    numbers, scales = _empty(rows, inputs, block, x_MD.device)
    padded = len(numbers)
    height = max(4096 // power_of_2(block), 1)
    _launch_quantise(
        (-(-padded // height), inputs // block, 1), (x_MD, numbers, scales, rows, padded),
        (inputs, block, power_of_2(block), height), dtype=x_MD.dtype,
        num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip
    return numbers, scales


def _empty(rows: int, inputs: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tensors that `quantise` returns."""
    padded = -(-rows // ROWS) * ROWS
    numbers = torch.empty((padded, inputs), dtype=torch.float8_e4m3fn, device=device)
    return numbers, torch.empty((inputs // block, padded), dtype=torch.float32, device=device)


def gate_and_quantise(x_MG: Tensor, *, silu: bool) -> tuple[Tensor, Tensor]:
    """Return `quantise` of `Ops.gated`, for blocks; contiguous."""
    rows, inputs = len(x_MG), x_MG.shape[1] // 2
    numbers, scales = _empty(rows, inputs, BLOCK, x_MG.device)
    _launch_gate(
        (len(numbers), -(-inputs // GATE_SIZE), 1),
        (x_MG, numbers, scales, rows, len(numbers)), (inputs, silu, GATE_SIZE),
        dtype=x_MG.dtype, num_warps=4,
    )  # fmt: skip
    return numbers, scales


def norm_and_quantise(
    x_MD: Tensor, residual_MD: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `quantise` of `Ops.add_rms_norm`, for blocks, and x + residual; all contiguous."""
    rows, inputs = x_MD.shape
    numbers, scales = _empty(rows, inputs, BLOCK, x_MD.device)
    padded = len(numbers)
    total = x_MD if residual_MD is None else torch.empty_like(x_MD)
    _launch_norm(
        (padded, 1, 1),
        (
            x_MD, x_MD if residual_MD is None else residual_MD, weight, numbers, scales, total, eps,
            rows, padded,
        ),
        (inputs, power_of_2(inputs), residual_MD is not None),
        dtype=(x_MD.dtype, weight.dtype), num_warps=warps_of(inputs),
    )  # fmt: skip
    return numbers, scales, total


@triton.jit
def as_fp8(x):
    """Return (numbers, scales [M]) of x [M, GROUP]."""
    most = tl.max(tl.abs(x), 1)
    scale = tl.where(most > 0, most / 448.0, 1.0)
    return tl.clamp(x / scale[:, None], -448.0, 448.0).to(tl.float8e4nv), scale


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
    numbers, scale = as_fp8(x)
    tl.store(numbers_ptr + at, numbers, mask=(m[:, None] < PADDED) & (i[None, :] < GROUP))
    tl.store(scale_ptr + g * PADDED + m, scale, mask=m < PADDED)


@triton.jit(do_not_specialize=["M", "PADDED"])
def _norm_and_quantise(
    x_ptr, residual_ptr, weight_ptr, numbers_ptr, scale_ptr, total_ptr, eps, M, PADDED,
    D: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = row.to(tl.int64) * D
    i = tl.arange(0, SIZE)
    weight = tl.load(weight_ptr + i, mask=i < D, other=0.0)
    begin(PDL)
    mask = (i < D) & (row < M)
    x = tl.load(x_ptr + at + i, mask=mask, other=0.0)
    if ADD:
        x = x + tl.load(residual_ptr + at + i, mask=mask, other=0.0)
        tl.store(total_ptr + at + i, x, mask=mask)
    y = normed(x, weight, eps, D).to(tl.float32)
    numbers, scale = as_fp8(tl.reshape(y, [SIZE // 128, 128]))
    group = tl.arange(0, SIZE // 128)
    within = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(numbers_ptr + at + within, numbers, mask=within < D)
    tl.store(scale_ptr + group * PADDED + row, scale, mask=group < D // 128)


@triton.jit(do_not_specialize=["M", "PADDED"])
def _gate_and_quantise(
    x_ptr, numbers_ptr, scale_ptr, M, PADDED, D: tl.constexpr, SILU: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.program_id(1) * (SIZE // 128) + tl.arange(0, SIZE // 128)
    i = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = row.to(tl.int64) * D
    begin(PDL)
    mask = (i < D) & (row < M)
    gate = tl.load(x_ptr + 2 * at + i, mask=mask, other=0.0)
    up = tl.load(x_ptr + 2 * at + D + i, mask=mask, other=0.0)
    numbers, scale = as_fp8((activate(gate, SILU) * up).to(tl.float32))
    tl.store(numbers_ptr + at + i, numbers, mask=i < D)
    tl.store(scale_ptr + group * PADDED + row, scale, mask=group < D // 128)


_launch_quantise = Launcher(_quantise)
_launch_gate = Launcher(_gate_and_quantise)
_launch_norm = Launcher(_norm_and_quantise)
